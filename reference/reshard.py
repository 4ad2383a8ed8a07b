"""From one cut of a tensor to another: which box goes from which rank to which, and no dense tensor between.

The schedule is data. Every rank computes the same one from both cuts alone. A pair of ranks meets its copies
in the same order on both sides, so blocking sends and receives in that order cannot wait in a circle.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, groupby, pairwise

import torch
from torch import Tensor

from weightsync.reference.boxes import Box, Interval, Placed, common, move, subtract, within
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.shards import Part


@dataclass(frozen=True, slots=True)
class Copy:
    """One box of elements that goes from a source rank to a destination rank.

    Attributes:
        source: rank that has it.
        destination: rank that gets it.
        taken: the box in the source rank's own tensor, an interval per dimension.
        put: the box in the destination rank's own tensor, of the same size.
    """

    source: int
    destination: int
    taken: Box
    put: Box

    @property
    def numel(self) -> int:
        """Elements in the box."""
        return math.prod(end - start for start, end in self.put)


def schedule(source: Sequence[Part], destination: Sequence[Part]) -> tuple[Copy, ...]:
    """The copies that make every destination rank's part, each of its elements written once.

    They ascend by destination rank, then row-major by where the box starts there. A source rank sends what it
    is to send in the fewest boxes there can be. Where several source ranks hold an element, destination rank
    d takes it from the first of them, counted from source rank d on and round again: replicas share the
    work, and a rank of equally many that has what it needs takes it from itself.

    Args:
        source: what each source rank holds, in rank order; replicas and empty parts are allowed.
        destination: what each destination rank shall hold, in rank order.

    Raises:
        PlanMismatch: the parts are of different full shapes, or no source rank holds an element.
    """
    shapes = sorted({part.shape for part in (*source, *destination)})
    if len(shapes) > 1:
        raise PlanMismatch(
            f"parts of tensors of shapes {[list(shape) for shape in shapes]} were given, expected one full "
            "shape on both sides; correct the shapes or the tensor-parallel sizes"
        )
    disjoint = [(rank, part.placed) for rank, part in enumerate(source)]
    told = _tellers(source, 0)
    shared = told != disjoint
    copies: list[Copy] = []
    for rank, part in enumerate(destination):
        if shared:
            told = _tellers(source, rank % len(source))
        found = [
            Copy(teller, rank, taken, put)
            for teller, placed in told
            for taken, put in common(placed, part.placed)
        ]
        missing = part.numel - sum(copy.numel for copy in found)
        if missing:
            raise PlanMismatch(
                f"{missing} of the {part.numel} elements of destination rank {rank} are held by none of "
                f"{len(source)} source ranks, expected each to be held; pass every source rank's part"
            )
        copies += sorted(found, key=lambda copy: copy.put)
    return tuple(copies)


def require_complete(copies: Sequence[Copy], source: Sequence[Part], destination: Sequence[Part]) -> None:
    """Return if ``copies``, whoever made them, write every destination element once, rightly and in order.

    Raises:
        PlanMismatch: the first copy that names no such rank or box, moves other elements than it writes,
            overlaps another or is out of order; or the destination rank that misses elements.
    """
    for number, copy in enumerate(copies):
        problem = _problem(copy, source, destination)
        if problem:
            raise PlanMismatch(f"copy {number}, {copy}, {problem}; compute the schedule from both cuts again")
    for before, after in pairwise(copies):
        if (before.destination, before.put) > (after.destination, after.put):
            raise PlanMismatch(
                f"{after} comes after {before}, expected ascending destination ranks and places; compute "
                "the schedule from both cuts again"
            )
    for rank, part in enumerate(destination):
        mine = [copy for copy in copies if copy.destination == rank]
        for one, other in combinations(mine, 2):
            if all(a < d and c < b for (a, b), (c, d) in zip(one.put, other.put, strict=True)):
                raise PlanMismatch(
                    f"{one} and {other} write the same elements, expected each to be written once; compute "
                    "the schedule from both cuts again"
                )
        if sum(copy.numel for copy in mine) != part.numel:
            raise PlanMismatch(
                f"{sum(copy.numel for copy in mine)} elements of destination rank {rank} are written, "
                f"expected all {part.numel}; compute the schedule from both cuts again"
            )


def execute(copies: Sequence[Copy], shards: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Carry out a schedule in place and in its order, bit for bit; strides of both sides may be any.

    Args:
        copies: the schedule.
        shards: the source ranks' tensors, in rank order; only read.
        targets: the destination ranks' tensors, in rank order, written in place.
    """
    for (source, destination), several in groupby(copies, lambda copy: (copy.source, copy.destination)):
        move(shards[source], targets[destination], [(copy.taken, copy.put) for copy in several])


def reshard(
    shards: Sequence[Tensor], source: Sequence[Part], destination: Sequence[Part]
) -> tuple[Tensor, ...]:
    """The destination ranks' shards: new contiguous storage, no attributes, and no other memory.

    Args:
        shards: the source ranks' tensors, in rank order, of any strides.
        source: what each of them holds.
        destination: what each destination rank shall hold.

    Raises:
        PlanMismatch: a shard's dtype or shape is not that of its part, or as ``schedule``.
    """
    if not shards or len(shards) != len(source):
        raise PlanMismatch(
            f"{len(shards)} shards were given for {len(source)} source ranks, expected one for each; pass "
            "every rank's shard in rank order"
        )
    dtype = shards[0].dtype
    for rank, (shard, part) in enumerate(zip(shards, source, strict=True)):
        if tuple(shard.shape) != part.local_shape or shard.dtype != dtype:
            raise PlanMismatch(
                f"shard of rank {rank} is {shard.dtype} {list(shard.shape)}, expected {dtype} "
                f"{list(part.local_shape)}; pass every rank's shard in rank order, cut as its part says"
            )
    copies = schedule(source, destination)
    targets = tuple(
        torch.empty(part.local_shape, dtype=dtype, device=shards[0].device) for part in destination
    )
    execute(copies, shards, targets)
    return targets


def _tellers(source: Sequence[Part], first: int) -> list[tuple[int, tuple[Placed, ...]]]:
    """Which rank tells which elements, disjoint: the first that holds them, counted from rank ``first``."""
    told: list[tuple[int, tuple[Placed, ...]]] = []
    earlier: dict[Part, None] = {}
    for rank in (*range(first, len(source)), *range(first)):
        products = [] if source[rank] in earlier else [source[rank].placed]
        for part in earlier if products else ():
            products = [left for one in products for left in subtract(one, part.held)]
        earlier[source[rank]] = None
        told += [(rank, one) for one in products]
    return told


def _problem(copy: Copy, source: Sequence[Part], destination: Sequence[Part]) -> str:
    """What is wrong with one copy, or nothing."""
    if not (0 <= copy.source < len(source) and 0 <= copy.destination < len(destination)):
        return f"is between ranks that {len(source)} source and {len(destination)} destination ranks lack"
    ends = ((copy.taken, source[copy.source]), (copy.put, destination[copy.destination]))
    for box, part in ends:
        inside = len(box) == len(part.shape) and all(
            0 <= start < end <= length for (start, end), length in zip(box, part.local_shape, strict=True)
        )
        if not inside:
            return f"leaves a local tensor of shape {list(part.local_shape)}"
    taken, put = (_full(part, box) for box, part in ends)
    return "" if taken == put else f"takes full indices {taken} and writes them as {put}"


def _full(part: Part, box: Box) -> list[tuple[Interval, ...]]:
    """Per dimension, the intervals of the full tensor that a local box is, in local order."""
    return [within(held, [interval]) for held, interval in zip(part.held, box, strict=True)]
