"""The wire: bits per changed element, encode and decode, against the field's ways on the same data.

Ours is a whole bucket: header, table, padding and checksum are counted and timed; the others are bare frames. All end
at the same positions and new bits, which is checked first. The floor of bits is the entropy of independent positions
and steps. The last rows hold ``choose`` against the best form, on measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from fit_wire import fastest
from harness import Row, compete
from wire_data import DTYPE, NUMEL, SHAPE, Update, adam, decode, encode, entropy_bits, uniform
from wire_methods import Method, methods

from weightsync.reference.buckets import DELTA, Bucket, Heading, Range, RangeSpec, pack_bucket, unpack
from weightsync.reference.params import ParamMeta
from weightsync.reference.wire.choosing import choose
from weightsync.reference.wire.forms import ALL_FORMS, Form, Positions, Values
from weightsync.reference.wire.rates import RATES
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded, resolve

TENSORS = 16
METAS = [ParamMeta(f"model.layers.{number}.w", DTYPE, SHAPE) for number in range(TENSORS)]
HEADING = Heading(DELTA, epoch=1, base=1, version=2)
DENSITIES = (0.001, 0.01, 0.03)
LINKS = (1e8, 1e9, 1e10, 1e11, 4e11)
PASSES = 4
CHOICE_DENSITIES = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.2, 0.35, 0.6)


def rows() -> Iterator[Row]:
    zstd, others = Zstd(), methods()
    for kind, make in (("uniform", uniform), ("adam", adam)):
        for density in DENSITIES:
            updates = [make(density, seed) for seed in range(TENSORS)]
            yield from compared(kind, density, updates, others, zstd)
    yield from choices(zstd)


def compared(
    kind: str, density: float, updates: list[Update], others: dict[str, Method], zstd: Zstd
) -> Iterator[Row]:
    count = sum(one.positions.numel() for one in updates)
    form = Form.named("gap16+step+zstd" if density < 0.003 else "gap8+step+zstd")
    conditions = {
        "data": f"{TENSORS} tensors of {SHAPE} bf16, {kind}",
        "density": count / (TENSORS * NUMEL),
        "changed_elements": count,
        "form": form.name,
        "threads": 1,
        "statistic": "median of 7 interleaved calls",
    }
    bucket = pack(updates, form, zstd)
    for (positions, new), one in zip(read(bucket, updates, zstd), updates, strict=True):
        require(np.array_equal(positions, one.positions.numpy()) and np.array_equal(new, one.new.numpy()))
    encoders: dict[str, Callable[[], object]] = {"ours": lambda: pack(updates, form, zstd)}
    decoders: dict[str, Callable[[], object]] = {"ours": lambda: read(bucket, updates, zstd)}
    bits = {"ours": 8 * bucket.nbytes / count}
    for name, (write, back) in others.items():
        frames = [write(one) for one in updates]
        for each, one in zip(frames, updates, strict=True):
            positions, new = back(each, one)
            require(np.array_equal(positions, one.positions.numpy()) and np.array_equal(new, one.new.numpy()))
        bits[name] = 8 * sum(len(frame) for each in frames for frame in each) / count
        encoders[name] = lambda write=write: [write(one) for one in updates]
        decoders[name] = lambda back=back, frames=frames: [
            back(each, one) for each, one in zip(frames, updates, strict=True)
        ]
    floor = entropy_bits(updates, NUMEL)
    written, opened = compete(encoders, rounds=7), compete(decoders, rounds=7)
    label = f"{kind} {density:.1%}"
    for name in others:
        yield Row(
            f"bits {label}", "bits/change", bits["ours"], name, bits[name], conditions, floor, "entropy"
        )
        yield Row(f"encode {label}", "ms", written["ours"], name, written[name], conditions)
        yield Row(f"decode {label}", "ms", opened["ours"], name, opened[name], conditions)


def pack(updates: list[Update], form: Form, zstd: Zstd) -> Bucket:
    ranges = []
    for number, one in enumerate(updates):
        spec = RangeSpec(
            number, form.positions, 0, one.positions.numel(), values=form.values, packing=form.packing
        )
        ranges.append(Range(spec, one.positions, coded(form.values, one.new, one.old, DTYPE)))
    return pack_bucket(HEADING, ranges, METAS, zstd)


def read(bucket: Bucket, updates: list[Update], zstd: Zstd) -> list[tuple[object, object]]:
    return [
        (found.positions.numpy(), resolve(found.spec.values, found.bits, one.old, DTYPE).numpy())
        for found, one in zip(unpack(bucket, METAS, zstd), updates, strict=True)
        if found.positions is not None
    ]


def choices(zstd: Zstd) -> Iterator[Row]:
    """The chosen form's total against the best form's, at every density and link; the worst ratio of each link."""
    worst: dict[float, tuple[float, str]] = {}
    for density in CHOICE_DENSITIES:
        one = adam(density, seed=3)
        count = one.positions.numel()
        measured: dict[Form, tuple[float, int]] = {}
        for _ in range(PASSES):
            for form in ALL_FORMS:
                if form.positions is Positions.DENSE:
                    continue
                found = encode(one, form, zstd)
                if found.form != form:
                    continue  # it went out in its fixed form, which is measured as itself
                rounds = max(3, min(20, 400_000 // count))
                taken = fastest(lambda one=one, form=form: encode(one, form, zstd), rounds)
                taken += fastest(lambda one=one, found=found: decode(found, one, NUMEL, zstd), rounds)
                known = measured.get(form, (taken, 0))[0]
                measured[form] = min(taken, known), found.section.numel()
        for link in LINKS:
            totals = {form: ns + nbytes * 1e9 / link for form, (ns, nbytes) in measured.items()}
            chosen = choose(count, NUMEL, 2, link_bytes_per_s=link, rates=RATES, values=frozenset(Values))
            best = min(totals, key=lambda form: totals[form])
            if chosen.positions is not Positions.DENSE:
                ratio = totals.get(chosen, totals[chosen.fixed]) / totals[best]
                told = f"{density:.2%}: {chosen.name}, best {best.name}"
                worst[link] = max(worst.get(link, (0.0, "")), (ratio, told))
    for link, (ratio, told) in worst.items():
        conditions = {"worst_at": told, "densities": str(CHOICE_DENSITIES), "forms": "all but dense ones"}
        yield Row(f"choice at {link / 1e9:g} GB/s", "x of best", ratio, "best form", 1.0, conditions)


def require(equal: bool) -> None:
    if not equal:
        raise AssertionError(
            "two ways disagree about the update, so their sizes mean nothing; fix that first"
        )
