"""Change detection over a whole model's worth of tensors, and over many tiny ones, at one and two threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from harness import Row, compete
from torch import Tensor

from weightsync.reference.detect import Detector
from weightsync.reference.layouts import plain, row_map
from weightsync.reference.params import ParamMeta, TPAttributes, int_view
from weightsync.reference.plan import TransferPlan
from weightsync.reference.source import Source
from weightsync.reference.steps import run

SHAPE, TENSORS = (4096, 1024), 16
DENSITIES = (0.001, 0.01, 0.03, 0.1)
TINY_SHAPE, TINY = (768, 64), 18_000
Pair = tuple[Tensor, Tensor]
Bits = tuple[Any, ...]


def rows() -> Iterator[Row]:
    for density in DENSITIES:
        pairs = [pair(number, density) for number in range(TENSORS)]
        for threads in (1, 2):
            yield from compared(pairs, density, threads)
    yield from tiny()


def pair(number: int, density: float) -> Pair:
    """New and old bits, bfloat16 as int16, that differ by one ulp up or down in ``density`` of the elements."""
    generator = torch.Generator().manual_seed(number)
    old = int_view(torch.randn(SHAPE, generator=generator).to(torch.bfloat16))
    chosen = torch.rand(old.numel(), generator=generator) < density
    step = 2 * torch.randint(0, 2, (old.numel(),), dtype=torch.int16, generator=generator) - 1
    return torch.where(chosen, old + step, old), old


def with_numpy(new: Tensor, old: Tensor) -> Bits:
    array = new.numpy()
    positions = np.flatnonzero(array != old.numpy())
    return positions.astype(np.int32), array.take(positions)


def with_torch(new: Tensor, old: Tensor) -> Bits:
    positions = (new != old).nonzero().reshape(-1)
    return positions.to(torch.int32), new[positions]


def xor_words(new: Tensor, old: Tensor) -> Bits:
    """The first half of a dense xor coding: no positions at all."""
    return (new.view(torch.int64) ^ old.view(torch.int64),)


def compared(pairs: Sequence[Pair], density: float, threads: int) -> Iterator[Row]:
    words = [(old.view(torch.int64), old.clone().view(torch.int64)) for _, old in pairs]
    with Detector(threads) as detector, ThreadPoolExecutor(threads) as pool:

        def ours() -> list[Bits]:
            found = [detector.find(new, old, old_bits=False) for new, old in pairs]
            return [(one.positions, one.new) for one in found]

        def spread(
            call: Callable[[Tensor, Tensor], Any], over: Sequence[Pair] = pairs
        ) -> Callable[[], list[Any]]:
            return lambda: list(pool.map(lambda one: call(*one), over))

        contestants: dict[str, Callable[[], Any]] = {
            "ours": ours,
            "numpy": spread(with_numpy),
            "torch": spread(with_torch),
            "xor words": spread(xor_words),
            "floor": spread(torch.equal, words),
        }
        for name in ("numpy", "torch"):
            for mine, theirs in zip(ours(), contestants[name](), strict=True):
                if not all(
                    torch.equal(left, torch.as_tensor(right))
                    for left, right in zip(mine, theirs, strict=True)
                ):
                    raise RuntimeError(f"ours and {name} find different changes, so their times mean nothing")
        times = compete(contestants, rounds=7)
    conditions = {
        "dtype": "bfloat16", "tensors": TENSORS, "shape": "x".join(map(str, SHAPE)), "density": density,
        "changed_by": "one ulp up or down", "threads": threads, "statistic": "median of 7 interleaved calls",
    }  # fmt: skip
    for name in ("numpy", "torch", "xor words"):
        yield Row(
            f"find changes {density:.1%}, threads {threads}", "ms", times["ours"], name, times[name], conditions,
            times["floor"], "torch.equal of equal int64 words",
        )  # fmt: skip


def tiny() -> Iterator[Row]:
    """Snapshot and diff of very many tiny tensors, each with a few changes, against the bare copies and comparisons."""
    metas = [ParamMeta(f"expert.{number}", torch.bfloat16, TINY_SHAPE) for number in range(TINY)]
    first = row_map(plain(metas[0], replicated=True), "p0", TPAttributes({}), 0, 1, {metas[0].name: 0})
    maps = tuple(first.moved(f"p{number}", (number,)) for number in range(TINY))
    live = {one.name: torch.randn(TINY_SHAPE).to(torch.bfloat16) for one in maps}
    source = Source(TransferPlan(tuple(metas), (maps,), 1 << 24), 0, live)
    run(source.snapshot(0))
    for tensor in live.values():
        int_view(tensor)[::1000] ^= 1
    kept = {name: tensor.clone() for name, tensor in live.items()}

    def copies() -> None:
        for name, tensor in live.items():
            kept[name].copy_(tensor)

    held = source.held(0)

    def comparisons() -> list[Bits]:
        return [with_numpy(int_view(tensor), int_view(held[name])) for name, tensor in live.items()]

    contestants = {
        "snapshot": lambda: run(source.snapshot(1)),
        "copies": copies,
        "diff": lambda: run(source.diff(1, 0)),
        "comparisons": comparisons,
    }
    contestants["snapshot"]()
    if run(source.diff(1, 0)).nnz != sum(len(one[0]) for one in comparisons()):
        raise RuntimeError("ours and numpy count different changes, so their times mean nothing")
    times = {name: 1000 * ms / TINY for name, ms in compete(contestants, rounds=3).items()}
    conditions = {
        "dtype": "bfloat16", "tensors": TINY, "shape": "x".join(map(str, TINY_SHAPE)), "density": 0.001, "threads": 1,
        "statistic": "median of 3 interleaved calls, per tensor",
    }  # fmt: skip
    yield Row("snapshot of tiny tensors", "us", times["snapshot"], "bare copies", times["copies"], conditions)
    yield Row(
        "diff of tiny tensors",
        "us",
        times["diff"],
        "bare numpy comparisons",
        times["comparisons"],
        conditions,
    )
