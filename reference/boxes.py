"""The fewest boxes that two cuts of one tensor have in common, and copying them bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from torch import Tensor

from weightsync.reference.params import int_view

Interval = tuple[int, int]
"""Half-open interval [start, end) of a dimension."""

Box = tuple[Interval, ...]
"""An interval per dimension."""

Placed = tuple[tuple[int, int, int], ...]
"""Of one dimension, intervals that somebody holds: start and end in the full one, local index of the start."""


def place(held: Sequence[Interval]) -> Placed:
    """Intervals in local order, each with its local start."""
    placed, local = [], 0
    for start, end in held:
        placed.append((start, end, local))
        local += end - start
    return tuple(placed)


def merge(held: Sequence[Interval]) -> tuple[Interval, ...]:
    """The same intervals, each joined with the next where that continues it; empty ones left out."""
    merged: list[Interval] = []
    for start, end in held:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        elif start < end:
            merged.append((start, end))
    return tuple(merged)


def within(held: Sequence[Interval], local: Sequence[Interval]) -> tuple[Interval, ...]:
    """What the ``local`` intervals of somebody who holds ``held`` are in the full dimension, in local order."""
    return merge(
        [
            (max(start, first + start - offset), min(end, last + start - offset))
            for first, last in local
            for start, end, offset in place(held)
            if first < offset + end - start and offset < last
        ]
    )


def common(source: Sequence[Placed], destination: Sequence[Placed]) -> Iterator[tuple[Box, Box]]:
    """The fewest boxes that make up what both hold, by local indices in the source and in the destination.

    Boxes come in row-major order of where they start in the destination.
    """
    for runs in product(*map(_runs, source, destination)):
        yield (
            tuple((taken, taken + count) for _, taken, count in runs),
            tuple((put, put + count) for put, _, count in runs),
        )


def subtract(placed: Sequence[Placed], held: Sequence[Sequence[Interval]]) -> list[tuple[Placed, ...]]:
    """What is left of the elements ``placed`` without those ``held``: disjoint products, local starts kept.

    One product, or none, unless the two overlap in part along several dimensions.
    """
    outside = [_clip(one, _gaps(other)) for one, other in zip(placed, held, strict=True)]
    if any(left == one for left, one in zip(outside, placed, strict=True)):
        return [tuple(placed)]
    inside = [_clip(one, other) for one, other in zip(placed, held, strict=True)]
    return [(*inside[:dim], left, *placed[dim + 1 :]) for dim, left in enumerate(outside) if left]


def move(source: Tensor, target: Tensor, boxes: Sequence[tuple[Box, Box]]) -> None:
    """Copy boxes of ``source`` over boxes of ``target`` in place, bit for bit; strides may be any."""
    source_bits, target_bits = _bits(source), _bits(target)
    for taken, put in boxes:
        target_bits[_slices(put)].copy_(source_bits[_slices(taken)])


def _runs(source: Placed, destination: Placed) -> list[tuple[int, int, int]]:
    """Of one dimension, (index in the destination, index in the source, count) of every longest common run."""
    left, right = sorted(source), sorted(destination)
    found, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if start < end:
            found.append((start - right[j][0] + right[j][2], start - left[i][0] + left[i][2], end - start))
        i, j = (i + 1, j) if left[i][1] < right[j][1] else (i, j + 1)
    runs: list[tuple[int, int, int]] = []
    for put, taken, count in sorted(found):
        last_put, last_taken, last_count = runs[-1] if runs else (0, 0, 0)
        if runs and (last_put + last_count, last_taken + last_count) == (put, taken):
            runs[-1] = (last_put, last_taken, last_count + count)
        else:
            runs.append((put, taken, count))
    return runs


def _clip(placed: Placed, held: Sequence[Interval]) -> Placed:
    """The parts of ``placed`` that lie in ``held``."""
    return tuple(
        (max(start, first), min(end, last), local + max(first - start, 0))
        for start, end, local in placed
        for first, last in held
        if max(start, first) < min(end, last)
    )


def _gaps(held: Sequence[Interval]) -> list[Interval]:
    """What the intervals leave free, to both sides without end."""
    bounds = [bound for interval in sorted(held) for bound in interval]
    edges = [-(1 << 63), *bounds, 1 << 63]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as integers of its shape and strides; torch lacks some copies of float8."""
    bits = int_view(tensor.new_empty(0)).dtype
    return tensor.detach().resolve_conj().resolve_neg().view(bits)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, end) for start, end in box)
