"""Strategies for cuts of tensors: strided, packed, uneven, nested, replicated, with ranks that hold nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import event
from hypothesis import strategies as st

from weightsync.reference.shards import Part

KINDS = ("chunks", "stride", "sizes", "blocks")


def cut_shapes(*, max_dims: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of 0 to ``max_dims`` dimensions; sides are those that cuts divide, and those that they do not."""
    sides = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 12])
    return st.lists(sides, max_size=max_dims).map(tuple).filter(lambda shape: math.prod(shape) <= 600)


@st.composite
def part_lists(
    draw: st.DrawFn, *, shape: Sequence[int], max_world: int = 8, replicas: bool = True
) -> tuple[Part, ...]:
    """What each of 1 to ``max_world`` ranks holds of a tensor of ``shape``, which together hold all of it.

    Up to three cuts within each other, along equal or different dimensions, or replicas; ranks in any order.
    """
    held = [Part.whole(shape)]
    for _ in range(draw(st.integers(0, 3))):
        world = draw(st.integers(1, max_world // len(held)))
        if replicas and draw(st.integers(0, 3)) == 0:
            event("cut: replicas")
            held *= world
        elif shape:
            dim = draw(st.integers(0, len(shape) - 1))
            held = [part for outer in held for part in draw(_cut(outer, dim, world))]
    ranks = draw(st.permutations(held))
    event(f"ranks that hold nothing: {any(not part.numel for part in ranks)}")
    return tuple(ranks)


@st.composite
def two_cuts(
    draw: st.DrawFn, *, replicas: bool = True
) -> tuple[tuple[int, ...], tuple[Part, ...], tuple[Part, ...]]:
    """A shape, and two unlike ``part_lists`` of it."""
    shape = draw(cut_shapes())
    source, destination = (draw(part_lists(shape=shape, replicas=replicas)) for _ in range(2))
    return shape, source, destination


@st.composite
def _cut(draw: st.DrawFn, outer: Part, dim: int, world: int) -> list[Part]:
    """One cut of ``outer``, of a drawn kind that its length allows."""
    length = outer.local_shape[dim]
    kind = draw(st.sampled_from(KINDS if length % world == 0 else ("chunks", "blocks")))
    stride, sizes, blocks = 1, None, None
    if kind == "stride":
        stride = draw(st.sampled_from([s for s in range(1, 7) if length % (world * s) == 0] or [1]))
    elif kind == "sizes":
        sizes = draw(_shares(length // world, draw(st.integers(1, 4))))
    elif kind == "blocks":
        count = draw(st.integers(1, 3))
        flat = draw(_shares(length, count * world))
        blocks = [flat[block * world : (block + 1) * world] for block in range(count)]
    event(f"cut: {kind}")
    return [outer.cut(dim, rank, world, stride=stride, sizes=sizes, blocks=blocks) for rank in range(world)]


@st.composite
def _shares(draw: st.DrawFn, total: int, count: int) -> list[int]:
    """``count`` numbers, some of them 0, that add up to ``total``."""
    ends = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
    return [end - start for start, end in zip([0, *ends], [*ends, total], strict=True)]
