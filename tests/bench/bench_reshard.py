"""From 8 tensor-parallel ranks to 2: the schedule of a model of 8B parameters, and carrying it out for a layer.

The schedule is compared with index arrays: per pair of ranks, numpy's intersection of what both hold of the
cut dimension. Carrying it out is compared with joining the full tensor and splitting it, stock torch on
contiguous shards; the floor copies as many bytes from one contiguous buffer to another.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from harness import Row, compete
from torch import Tensor

from weightsync.reference.params import int_view
from weightsync.reference.reshard import Copy, require_complete, reshard, schedule
from weightsync.reference.shards import Part, parts, segments, take

OLD, NEW = 8, 2
HIDDEN, FFN, QKV, VOCAB, LAYERS = 4096, 14336, 6144, 128256, 32
Cut = tuple[tuple[int, ...], int | None, int]
LAYER: dict[str, Cut] = {
    "linear_qkv": ((QKV, HIDDEN), 0, 1),
    "linear_proj": ((HIDDEN, HIDDEN), 1, 1),
    "linear_fc1": ((2 * FFN, HIDDEN), 0, 2),
    "linear_fc2": ((HIDDEN, FFN), 1, 1),
}
NORMS: dict[str, Cut] = {"input_norm": ((HIDDEN,), None, 1), "mlp_norm": ((HIDDEN,), None, 1)}
ROUNDS = 7


def rows() -> Iterator[Row]:
    model = [cut for _ in range(LAYERS) for cut in (*LAYER.values(), *NORMS.values())]
    model += [((VOCAB, HIDDEN), 0, 1), ((HIDDEN,), None, 1), ((VOCAB, HIDDEN), 0, 1)]
    yield building(model)
    for name, (shape, dim, stride) in LAYER.items():
        if dim is not None:
            yield moving(name, shape, dim, stride)


def building(model: list[Cut]) -> Row:
    def ours() -> list[tuple[Copy, ...]]:
        return [schedule(*sides(*cut)) for cut in model]

    def with_numpy() -> list[list[tuple[int, int, np.ndarray, np.ndarray]]]:
        return [index_arrays(*cut) for cut in model]

    made = ours()
    for cut, copies, arrays in zip(model, made, with_numpy(), strict=True):
        require_complete(copies, *sides(*cut))
        require_equal_places(cut, copies, arrays)
    times = compete({"ours": ours, "numpy": with_numpy}, rounds=ROUNDS)
    conditions = {
        "parameters": len(model),
        "copies": sum(map(len, made)),
        "ranks": f"{OLD} to {NEW}",
        "threads": 1,
        "statistic": f"median of {ROUNDS} interleaved calls",
    }
    return Row("reshard schedule 8B", "ms", times["ours"], "numpy index arrays", times["numpy"], conditions)


def moving(name: str, shape: tuple[int, ...], dim: int, stride: int) -> Row:
    """One parameter of a layer, in bfloat16, new shards allocated by either."""
    raw = torch.randint(
        -(1 << 15), 1 << 15, shape, dtype=torch.int16, generator=torch.Generator().manual_seed(0)
    )
    full = raw.view(torch.bfloat16)
    source, destination = sides(shape, dim, stride)
    shards = [take(full, part) for part in source]
    payload, copied = full.reshape(-1), torch.empty(full.numel(), dtype=full.dtype)

    def ours() -> tuple[Tensor, ...]:
        return reshard(shards, source, destination)

    def dense() -> list[Tensor]:
        """Block by block over ranks, and back."""
        pieces = [shard.chunk(stride, dim) for shard in shards]
        whole = torch.cat([piece[block] for block in range(stride) for piece in pieces], dim)
        units = whole.chunk(stride * NEW, dim)
        return [torch.cat(units[rank::NEW], dim) for rank in range(NEW)]

    for one, other in zip(ours(), dense(), strict=True):
        if not torch.equal(int_view(one), int_view(other)):
            raise AssertionError(
                "ours and join-then-split disagree, so their times mean nothing; fix that first"
            )
    times = compete({"ours": ours, "dense": dense, "floor": lambda: copied.copy_(payload)}, rounds=ROUNDS)
    conditions = {
        "dtype": "bfloat16",
        "shape": "x".join(map(str, shape)),
        "partition_dim": dim,
        "partition_stride": stride,
        "ranks": f"{OLD} to {NEW}",
        "copies": len(schedule(source, destination)),
        "threads": 1,
        "statistic": f"median of {ROUNDS} interleaved calls",
    }
    return Row(
        f"reshard {name}",
        "ms",
        times["ours"],
        "join then split",
        times["dense"],
        conditions,
        times["floor"],
        "copy of the bytes",
    )


def sides(shape: tuple[int, ...], dim: int | None, stride: int) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    return parts(shape, OLD, dim, stride=stride), parts(shape, NEW, dim, stride=stride)


def index_arrays(
    shape: tuple[int, ...], dim: int | None, stride: int
) -> list[tuple[int, int, np.ndarray, np.ndarray]]:
    """(source, destination, indices in the one, indices in the other) of every pair that shares some."""
    if dim is None:
        return [(rank, rank, np.arange(shape[0]), np.arange(shape[0])) for rank in range(NEW)]
    held = [
        [
            np.concatenate([np.arange(*one) for one in segments(shape[dim], world, rank, stride=stride)])
            for rank in range(world)
        ]
        for world in (OLD, NEW)
    ]
    found = []
    for destination, new in enumerate(held[1]):
        for source, old in enumerate(held[0]):
            _, taken, put = np.intersect1d(old, new, assume_unique=True, return_indices=True)
            if len(put):
                found.append((source, destination, taken, put))
    return found


def require_equal_places(
    cut: Cut, copies: tuple[Copy, ...], arrays: list[tuple[int, int, np.ndarray, np.ndarray]]
) -> None:
    dim = cut[1] or 0
    ours = {
        (copy.source, copy.destination, *pair)
        for copy in copies
        for pair in zip(range(*copy.taken[dim]), range(*copy.put[dim]), strict=True)
    }
    theirs = {
        (source, destination, *pair)
        for source, destination, taken, put in arrays
        for pair in zip(taken.tolist(), put.tolist(), strict=True)
    }
    if ours != theirs:
        raise AssertionError(f"the schedule of {cut} and index arrays disagree; fix that first")
