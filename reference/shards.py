"""What each rank holds of a tensor: intervals of every dimension. Split, join and all maps follow from them.

A dimension is cut as packed blocks, each with a number of elements per rank; the rank holds its run of every
block. Megatron's ``partition_stride`` and ``partition_sizes``, uneven shards and DTensor's are such tables. A
``Part`` is what a rank holds of all dimensions, and cutting a part again gives a part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from weightsync.reference.boxes import Interval, Placed, common, merge, move, place, within
from weightsync.reference.errors import PlanMismatch

__all__ = ["Interval", "Part", "chunks", "join", "parts", "reshard", "segments", "split", "take"]


def chunks(length: int, world: int) -> tuple[int, ...]:
    """Elements per rank as ``torch.chunk``, FSDP2 and DTensor cut: 7 over 3 is 3, 3, 1; 2 over 4 is 1, 1, 0, 0."""
    step = -(-length // world)
    return tuple(max(min(step, length - rank * step), 0) for rank in range(world))


def segments(
    length: int,
    world: int,
    rank: int,
    *,
    stride: int = 1,
    sizes: Sequence[int] | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
) -> tuple[Interval, ...]:
    """The intervals of a dimension of ``length`` that ``rank`` of ``world`` holds, one a block, in local order.

    - ``stride`` 1: one block, cut as ``chunks`` says.
    - ``stride`` s: s equal blocks, each cut in equal parts; the rank holds segments rank, rank + world, ...
    - ``sizes``: packed blocks, block i of ``sizes[i] * world`` elements, each cut in equal parts.
    - ``blocks``: packed blocks in uneven parts, ``blocks[i][rank]`` elements of block i; zero is allowed.

    ``blocks`` goes before ``sizes``, and ``sizes`` before ``stride``, as in Megatron.

    Raises:
        PlanMismatch: the dimension does not divide as asked, or the rank is outside.
    """
    if world < 1 or not 0 <= rank < world:
        raise PlanMismatch(f"rank {rank} is outside of a world of {world}; expected 0 <= rank < world")
    if blocks is None:
        blocks = _blocks(length, world, stride, sizes)
    elif any(len(block) != world or min(block) < 0 for block in blocks) or sum(map(sum, blocks)) != length:
        raise PlanMismatch(
            f"blocks {[list(block) for block in blocks]} hold {sum(map(sum, blocks))} elements, expected "
            f"{length} and {world} counts in each, none negative; pass every rank's count of every block"
        )
    held, offset = [], 0
    for block in blocks:
        start = offset + sum(block[:rank])
        held.append((start, start + block[rank]))
        offset += sum(block)
    return tuple(held)


def _blocks(length: int, world: int, stride: int, sizes: Sequence[int] | None) -> list[tuple[int, ...]]:
    """The elements of every rank, per packed block."""
    if sizes is not None:
        if min(sizes, default=0) < 0 or sum(sizes) * world != length:
            raise PlanMismatch(
                f"partition_sizes {list(sizes)} over {world} ranks describe {sum(sizes) * world} elements, "
                f"expected {length}; correct partition_sizes or the full shape"
            )
        return [(size,) * world for size in sizes]
    if stride < 1:
        raise PlanMismatch(f"partition_stride {stride} is not positive; expected 1 or more")
    if stride == 1:
        return [chunks(length, world)]
    if length % (world * stride):
        raise PlanMismatch(
            f"a dimension of {length} elements does not divide by {world} ranks * partition_stride {stride}; "
            "choose a tensor-parallel size that divides it"
        )
    return [(length // (world * stride),) * world] * stride


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank holds of a tensor: all elements whose index is held in every dimension.

    Attributes:
        shape: shape of the full tensor.
        held: per dimension, disjoint intervals of the full one, in local order. Neighbours are made one and
            empty ones left out, so parts are equal when they hold the same in the same order.

    Raises:
        PlanMismatch: intervals overlap or are outside of the dimension.
    """

    shape: tuple[int, ...]
    held: tuple[tuple[Interval, ...], ...]

    def __post_init__(self) -> None:
        if len(self.held) != len(self.shape):
            raise PlanMismatch(
                f"intervals of {len(self.held)} dimensions, expected {len(self.shape)} for shape "
                f"{list(self.shape)}; pass those of every dimension"
            )
        for dim, (length, held) in enumerate(zip(self.shape, self.held, strict=True)):
            bounds = [bound for interval in sorted(held) if interval[0] != interval[1] for bound in interval]
            if any(a > b for a, b in pairwise([0, *bounds, length])):
                raise PlanMismatch(
                    f"intervals {list(held)} of dimension {dim} overlap or leave its {length} elements, "
                    "expected disjoint ones within; correct the cut"
                )
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "held", tuple(map(merge, self.held)))

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Part:
        """All of a tensor."""
        return cls(tuple(shape), tuple(((0, length),) for length in shape))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the rank's own tensor."""
        return tuple(sum(end - start for start, end in held) for held in self.held)

    @property
    def numel(self) -> int:
        """Elements that the rank holds."""
        return math.prod(self.local_shape)

    @property
    def placed(self) -> tuple[Placed, ...]:
        """Per dimension, its intervals with their local starts."""
        return tuple(map(place, self.held))

    def cut(
        self,
        dim: int,
        rank: int,
        world: int,
        *,
        stride: int = 1,
        sizes: Sequence[int] | None = None,
        blocks: Sequence[Sequence[int]] | None = None,
    ) -> Part:
        """What ``rank`` of ``world`` holds when this part, seen as a tensor of its own, is cut along ``dim``.

        Cuts follow each other outer first: tensor parallelism and then FSDP2 is ``.cut(0, i, tp).cut(0, j,
        dp)``, and DTensor's ``[Shard(0), Shard(0)]`` on a mesh (dp, tp) is the other order.

        Raises:
            PlanMismatch: as ``segments``, or the tensor has no such dimension.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise PlanMismatch(
                f"dimension {dim} of full shape {list(self.shape)} is to be cut, expected one that it has; "
                "correct partition_dim"
            )
        dim %= len(self.shape)
        local = segments(self.local_shape[dim], world, rank, stride=stride, sizes=sizes, blocks=blocks)
        kept = within(self.held[dim], local)
        return Part(self.shape, (*self.held[:dim], kept, *self.held[dim + 1 :]))


def parts(
    shape: Sequence[int],
    world: int,
    dim: int | None,
    *,
    stride: int = 1,
    sizes: Sequence[int] | None = None,
    blocks: Sequence[Sequence[int]] | None = None,
) -> tuple[Part, ...]:
    """What each of ``world`` ranks holds of a tensor that is cut along ``dim``, or all of it without one."""
    whole = Part.whole(shape)
    if dim is None:
        return (whole,) * world
    return tuple(
        whole.cut(dim, rank, world, stride=stride, sizes=sizes, blocks=blocks) for rank in range(world)
    )


def take(full: Tensor, part: Part) -> Tensor:
    """The shard of ``full`` that ``part`` says: new contiguous storage, no attributes.

    Raises:
        PlanMismatch: ``part`` is one of another shape.
    """
    if tuple(full.shape) != part.shape:
        raise PlanMismatch(
            f"a part of shape {list(part.shape)} cannot be taken of a tensor of shape {list(full.shape)}, "
            "expected equal shapes; pass the full tensor"
        )
    shard = torch.empty(part.local_shape, dtype=full.dtype, device=full.device)
    move(full, shard, list(common(Part.whole(part.shape).placed, part.placed)))
    return shard


def split(
    full: Tensor, world: int, rank: int, dim: int, stride: int = 1, sizes: Sequence[int] | None = None
) -> Tensor:
    """The shard of ``full`` that ``rank`` of ``world`` holds: new contiguous storage, no attributes."""
    return take(full, Part.whole(full.shape).cut(dim, rank, world, stride=stride, sizes=sizes))


def join(shards: Sequence[Tensor], dim: int, stride: int = 1, sizes: Sequence[int] | None = None) -> Tensor:
    """The full tensor of all ranks' shards, in rank order: the bitwise inverse of ``split``, new storage.

    Raises:
        PlanMismatch: a shard's dtype, or its length along ``dim``, is not what the cut of the total gives it.
    """
    if not shards:
        raise PlanMismatch(
            "no shards were given, expected one per rank; pass every rank's shard in rank order"
        )
    shape = list(shards[0].shape)
    shape[dim] = sum(shard.shape[dim] for shard in shards)
    whole = Part.whole(shape)
    full = torch.empty(shape, dtype=shards[0].dtype, device=shards[0].device)
    for rank, (shard, part) in enumerate(
        zip(shards, parts(shape, len(shards), dim, stride=stride, sizes=sizes), strict=True)
    ):
        if tuple(shard.shape) != part.local_shape or shard.dtype != full.dtype:
            raise PlanMismatch(
                f"shard of rank {rank} is {shard.dtype} {list(shard.shape)}, expected {full.dtype} "
                f"{list(part.local_shape)}; pass every rank's shard in rank order, cut with the same stride "
                "and sizes"
            )
        move(shard, full, list(common(part.placed, whole.placed)))
    return full


def reshard(
    shards: Sequence[Tensor], dim: int, world: int, *, stride: int = 1, new_stride: int = 1
) -> tuple[Tensor, ...]:
    """Join, then split for ``world`` ranks with ``new_stride``: the oracle of ``reference.reshard``."""
    full = join(shards, dim, stride)
    return tuple(split(full, world, rank, dim, new_stride) for rank in range(world))
