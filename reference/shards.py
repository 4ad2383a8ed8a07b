"""Split, join and reshard a tensor along one dimension, by partition_stride or partition_sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import int_view

Interval = tuple[int, int]
"""Half-open interval [start, end) of a full dimension."""


def segments(
    length: int, world: int, rank: int, *, stride: int = 1, sizes: Sequence[int] | None = None
) -> tuple[Interval, ...]:
    """The intervals of a full dimension of ``length`` that ``rank`` of ``world`` holds, in local order.

    - ``stride`` 1: one interval, as ``torch.chunk`` cuts: 7 over 3 ranks is 3, 3, 1; 2 over 4 is 1, 1, 0, 0.
    - ``stride`` s: the dimension is s * world equal segments; the rank holds segments rank, rank + world, ...
    - ``sizes``: packed blocks, block i of ``sizes[i] * world`` elements, each cut on its own in equal parts.

    Raises:
        PlanMismatch: the dimension does not divide as ``stride`` or ``sizes`` asks, or the rank is outside.
    """
    if world < 1 or not 0 <= rank < world:
        raise PlanMismatch(f"rank {rank} is outside of a world of {world}; expected 0 <= rank < world")
    if sizes is not None:
        if min(sizes, default=0) < 0 or sum(sizes) * world != length:
            raise PlanMismatch(
                f"partition_sizes {list(sizes)} over {world} ranks describe {sum(sizes) * world} elements, "
                f"expected {length}; correct partition_sizes or the full shape"
            )
        held, offset = [], 0
        for size in sizes:
            held.append((offset + rank * size, offset + (rank + 1) * size))
            offset += size * world
        return tuple(held)
    if stride < 1:
        raise PlanMismatch(f"partition_stride {stride} is not positive; expected 1 or more")
    if stride == 1:
        step = -(-length // world)
        return ((min(rank * step, length), min((rank + 1) * step, length)),)
    if length % (world * stride):
        raise PlanMismatch(
            f"a dimension of {length} elements does not divide by {world} ranks * partition_stride {stride}; "
            "choose a tensor-parallel size that divides it"
        )
    step = length // (world * stride)
    starts = [(rank + block * world) * step for block in range(stride)]
    return tuple((start, start + step) for start in starts)


def split(
    full: Tensor, world: int, rank: int, dim: int, stride: int = 1, sizes: Sequence[int] | None = None
) -> Tensor:
    """The shard of ``full`` that ``rank`` of ``world`` holds: new contiguous storage, no attributes."""
    held = segments(full.shape[dim], world, rank, stride=stride, sizes=sizes)
    pieces = [_bits(full).narrow(dim, start, end - start) for start, end in held]
    return torch.cat(pieces, dim).contiguous().view(full.dtype)


def join(shards: Sequence[Tensor], dim: int, stride: int = 1, sizes: Sequence[int] | None = None) -> Tensor:
    """The full tensor of all ranks' shards, in rank order: the bitwise inverse of ``split``, new storage.

    Raises:
        PlanMismatch: a shard's dtype, or its length along ``dim``, is not what the cut of the total gives it.
    """
    world = len(shards)
    if not world:
        raise PlanMismatch(
            "no shards were given, expected one per rank; pass every rank's shard in rank order"
        )
    length = sum(shard.shape[dim] for shard in shards)
    shape = list(shards[0].shape)
    shape[dim] = length
    full = torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device)
    target = full.view(int_view(shards[0]).dtype) if full.dim() else int_view(full)
    for rank, shard in enumerate(shards):
        held = segments(length, world, rank, stride=stride, sizes=sizes)
        expected = list(shape)
        expected[dim] = sum(end - start for start, end in held)
        if list(shard.shape) != expected or shard.dtype != full.dtype:
            raise PlanMismatch(
                f"shard of rank {rank} is {shard.dtype} {list(shard.shape)}, expected {full.dtype} "
                f"{expected}; pass every rank's shard in rank order, cut with the same stride and sizes"
            )
        source, offset = _bits(shard), 0
        for start, end in held:
            target.narrow(dim, start, end - start).copy_(source.narrow(dim, offset, end - start))
            offset += end - start
    return full


def reshard(
    shards: Sequence[Tensor], dim: int, world: int, *, stride: int = 1, new_stride: int = 1
) -> tuple[Tensor, ...]:
    """Shards for ``world`` ranks with ``new_stride``, from those of ``len(shards)`` ranks with ``stride``."""
    full = join(shards, dim, stride)
    return tuple(split(full, world, rank, dim, new_stride) for rank in range(world))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its shape; torch lacks some copies of float8."""
    return int_view(tensor).reshape(tensor.shape)
