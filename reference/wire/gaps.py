"""Ascending positions as gaps: how many unchanged elements stand before each one, with escapes for long gaps.

An item below the largest of its width ends a gap; the largest one says "that many more, and go on". So every row of
positions has exactly one coding, and its plain size is what the gaps need, whatever their distribution.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from weightsync.reference.wire.streams import Integers


def gaps_of(positions: Integers) -> Integers:
    """Unchanged elements before each position and after the one before it, (n,) int32."""
    found = np.empty_like(positions)
    found[:1] = positions[:1]
    np.subtract(positions[1:], positions[:-1], out=found[1:])
    found[1:] -= 1
    return found


def escape(gaps: Integers, dtype: Any, most: int) -> Integers | None:
    """``gaps`` as items of ``dtype`` with escapes; None when they come to more than ``most`` items."""
    top = int(np.iinfo(dtype).max)
    if gaps.size > most:
        return None
    long = np.flatnonzero(gaps >= top)
    items = gaps.astype(dtype)
    if long.size == 0:
        return items
    runs = gaps[long] // top
    extra = int(runs.sum(dtype=np.int64))
    if gaps.size + extra > most:
        return None
    items[long] = gaps[long] - runs * top
    places = np.ones(gaps.size, np.intp)
    places[long] += runs
    places[0] -= 1
    np.cumsum(places, out=places)
    found = np.full(gaps.size + extra, top, dtype)
    found[places] = items
    return found


def unescape(items: Integers, count: int, limit: int) -> Integers | str:
    """Positions (count,) int32 that ``items`` stand for, or what is wrong with them.

    Args:
        items: unsigned integers, what ``escape`` gives.
        count: positions expected.
        limit: one more than the largest position allowed, at most 2^31.
    """
    ends = ends_of(items)
    if ends.size != count:
        return f"codes {ends.size} positions"
    if ends[-1] != items.size - 1:
        return "ends within a gap"
    last = int(items.sum(dtype=np.uint64)) + count - 1
    if last >= limit:
        return f"names position {last} relative to its base"
    positions = np.cumsum(items, dtype=np.int32)
    if ends.size < items.size:
        positions = positions[ends]
    positions += np.arange(count, dtype=np.int32)
    return positions


def ends_of(items: Integers) -> Integers:
    """Where gaps end: the items that are no escape, intp ascending."""
    return np.flatnonzero(items != np.iinfo(items.dtype).max)
