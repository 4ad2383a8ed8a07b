"""diff, encode, decode and apply of one bf16 tensor against stock torch and stock numpy on the same data.

Stock diff compares integer views and takes what differs. Stock encode and decode are the libraries' own
containers (``torch.save``, ``numpy.savez``); ours also names the tensor's range and the versions.
Stock apply is indexed assignment, which checks no order; ours checks all positions before the first write.
"""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
import torch
import xxhash
from harness import Row, compete
from torch import Tensor

from weightsync.reference.buckets import DELTA, Bucket, Heading, Range, RangeSpec, pack_bucket, unpack
from weightsync.reference.delta import SparsePatch, UndoLog, apply, diff
from weightsync.reference.encoding import Encoding
from weightsync.reference.params import ParamMeta, int_view

META = ParamMeta("model.layers.0.mlp.down_proj.weight", torch.bfloat16, (4096, 4096))
DENSITIES = (0.001, 0.01, 0.1)
HEADING = Heading(DELTA, epoch=1, base=1, version=2)


def rows() -> Iterator[Row]:
    for density in DENSITIES:
        old, new = pair(density)
        patch = diff(META, new, old)
        conditions = {
            "dtype": "bfloat16",
            "shape": "x".join(map(str, META.shape)),
            "changed_elements": patch.nnz,
            "density": density,
            "placed": "uniformly at random, seed 0",
            "threads": 1,
            "statistic": "median of 15 interleaved calls",
        }
        for row in (*diffs(old, new), *encodings(patch), *decodings(patch), *applications(old, new, patch)):
            name, ours, compared, theirs, floor, floor_of = row
            yield Row(f"{name} {density:.1%}", "ms", ours, compared, theirs, conditions, floor, floor_of)


Measured = tuple[str, float, str, float, float | None, str]


def pair(density: float) -> tuple[Tensor, Tensor]:
    """Old and new tensor that differ in ``density`` of their elements, in one bit each."""
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(META.shape, generator=generator).to(torch.bfloat16)
    new = old.clone()
    chosen = torch.randperm(META.numel, generator=generator)[: round(density * META.numel)]
    int_view(new)[chosen] ^= 1
    return old, new


def against(name: str, times: dict[str, float], floor_of: str = "") -> Iterator[Measured]:
    floor = times.get("floor")
    for compared in ("torch", "numpy"):
        yield name, times["ours"], compared, times[compared], floor, floor_of


def diffs(old: Tensor, new: Tensor) -> Iterator[Measured]:
    old_bits, new_bits = int_view(old), int_view(new)
    old_array, new_array = old_bits.numpy(), new_bits.numpy()
    old_words, twin = old_bits.view(torch.int64), old_bits.clone().view(torch.int64)

    def with_torch() -> tuple[Tensor, Tensor]:
        positions = torch.nonzero(new_bits != old_bits).flatten()
        return positions.to(torch.int32), new_bits[positions]

    def with_numpy() -> tuple[np.ndarray, np.ndarray]:
        positions = np.flatnonzero(new_array != old_array)
        return positions.astype(np.int32), new_array[positions]

    patch = diff(META, new, old)
    for positions, values in (with_torch(), map(torch.from_numpy, with_numpy())):
        require_equal(patch.positions, positions)
        require_equal(int_view(patch.values), values)
    times = compete(
        {
            "ours": lambda: diff(META, new, old),
            "torch": with_torch,
            "numpy": with_numpy,
            "floor": lambda: torch.equal(old_words, twin),
        }
    )
    yield from against("diff", times, "torch.equal of equal int64 words")


def encode(patch: SparsePatch) -> Bucket:
    spec = RangeSpec(0, Encoding.INT32, 0, patch.nnz, 0)
    return pack_bucket(HEADING, [Range(spec, patch.positions, int_view(patch.values))], [META])


def save_torch(patch: SparsePatch) -> bytes:
    out = io.BytesIO()
    torch.save({"positions": patch.positions, "values": patch.values}, out)
    return out.getvalue()


def save_numpy(patch: SparsePatch) -> bytes:
    out = io.BytesIO()
    np.savez(out, positions=patch.positions.numpy(), values=int_view(patch.values).numpy())
    return out.getvalue()


def encodings(patch: SparsePatch) -> Iterator[Measured]:
    payload = encode(patch).payload
    copied = torch.empty_like(payload)
    times = compete(
        {
            "ours": lambda: encode(patch),
            "torch": lambda: save_torch(patch),
            "numpy": lambda: save_numpy(patch),
            "floor": lambda: copied.copy_(payload),
        }
    )
    yield from against("encode", times, "copy of the payload")


def decodings(patch: SparsePatch) -> Iterator[Measured]:
    bucket, torch_bytes, numpy_bytes = encode(patch), save_torch(patch), save_numpy(patch)

    def with_torch() -> tuple[Tensor, Tensor]:
        loaded = torch.load(io.BytesIO(torch_bytes), weights_only=True)
        return loaded["positions"], loaded["values"]

    def with_numpy() -> tuple[np.ndarray, np.ndarray]:
        loaded = np.load(io.BytesIO(numpy_bytes))
        return loaded["positions"], loaded["values"]

    ((_, positions, values),) = unpack(bucket, [META])
    found = [(positions, values), with_torch(), tuple(map(torch.from_numpy, with_numpy()))]
    for got_positions, got_values in found:
        require_equal(got_positions, patch.positions)
        require_equal(int_view(got_values), int_view(patch.values))
    raw = bucket.payload.numpy()
    times = compete(
        {
            "ours": lambda: unpack(bucket, [META]),
            "torch": with_torch,
            "numpy": with_numpy,
            "floor": lambda: xxhash.xxh3_128_digest(raw),
        }
    )
    yield from against("decode", times, "checksum of the payload")


def applications(old: Tensor, new: Tensor, patch: SparsePatch) -> Iterator[Measured]:
    ours, logged, theirs, flat = (old.clone() for _ in range(4))
    bits, array = int_view(theirs), int_view(flat).numpy()
    values = int_view(patch.values)

    def with_torch() -> None:
        bits[patch.positions] = values

    def with_numpy() -> None:
        array[patch.positions.numpy()] = values.numpy()

    contestants = {
        "ours": lambda: apply(patch, ours),
        "logged": lambda: apply(patch, logged, UndoLog()),
        "torch": with_torch,
        "numpy": with_numpy,
    }
    times = compete(contestants)
    for target in (ours, logged, theirs, flat):
        require_equal(int_view(target), int_view(new))
    yield from against("apply", times)
    yield from against("apply, undoable", {**times, "ours": times["logged"]})


def require_equal(left: Tensor, right: Tensor) -> None:
    if not torch.equal(left, right):
        raise AssertionError("ours and the stock code disagree, so their times mean nothing; fix that first")
