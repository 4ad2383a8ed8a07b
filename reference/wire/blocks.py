"""BLOCK: gaps that begin anew every 65,536 positions, with an index, so that a reader may open only its own.

u32 number of the first window, u32 windows, then per window u32 changes and u32 bytes up to its end, then the gap
bytes of all windows (see ``gaps``; the first gap of a window counts from the window's beginning).
"""

from __future__ import annotations

import numpy as np

from weightsync.reference.wire.gaps import ends_of, escape, gaps_of
from weightsync.reference.wire.streams import Bytes, Integers

WINDOW = 1 << 16
"""Positions of one window; windows begin at multiples of it, relative to the range's base."""

INDEX_BYTES = 8


def write_blocks(positions: Integers, most: int) -> Bytes | None:
    """The BLOCK stream of ascending positions, (n,) int32; None when it has more than ``most`` bytes."""
    first = int(positions[0]) // WINDOW
    windows = int(positions[-1]) // WINDOW - first + 1
    head = INDEX_BYTES * (windows + 1)
    if head + positions.size > most:
        return None
    edges = np.arange(first, first + windows + 1, dtype=np.int64) * WINDOW
    cuts = np.searchsorted(positions, edges)
    gaps = gaps_of(positions)
    filled = cuts[:-1][cuts[1:] > cuts[:-1]]
    gaps[filled] = positions[filled] % WINDOW
    items = escape(gaps, np.uint8, most - head)
    if items is None:
        return None
    ends = ends_of(items) + 1
    index = np.zeros((windows + 1, 2), "<u4")
    index[0] = first, windows
    index[1:, 0] = cuts[1:]
    reached = np.concatenate(([0], ends))
    index[1:, 1] = reached[cuts[1:]]
    return np.concatenate([index.reshape(-1).view(np.uint8), items])


def read_blocks(
    stream: Bytes, count: int, limit: int, first: int = 0, last: int | None = None
) -> tuple[Integers, int] | str:
    """Positions from ``first`` to before ``last``, int32 ascending, and how many changes stand before them.

    Only the index and the windows that hold such positions are read. A string says what is wrong with them.

    Args:
        stream: what ``write_blocks`` gave.
        count: changes of the whole section.
        limit: one more than the largest position allowed.
        first: first position wanted, relative to the range's base.
        last: where to stop; None reads to the end.
    """
    found = _read_index(stream, count, limit)
    if isinstance(found, str):
        return found
    start, index = found
    whole = last is None
    last = limit if last is None else last
    windows = len(index) - 1
    low = min(max(first // WINDOW - start, 0), windows)
    high = windows if whole else min(max(-(-last // WINDOW) - start, low), windows)
    opened = index[low : high + 1]
    if opened[-1, 0] == opened[0, 0]:
        return np.empty(0, np.int32), int(opened[0, 0])
    head = INDEX_BYTES * len(index)
    items = stream[head + opened[0, 1] : head + opened[-1, 1]]
    positions = _open(items, opened - opened[0], start + low, limit)
    if isinstance(positions, str) or whole:
        return positions if isinstance(positions, str) else (positions, 0)
    begin, end = np.searchsorted(positions, [first, last])
    return positions[begin:end], int(opened[0, 0] + begin)


def _open(items: Bytes, index: Integers, window: int, limit: int) -> Integers | str:
    """Positions of neighbouring windows from number ``window`` on; ``index`` counts from the first one's begin."""
    counts = np.diff(index[:, 0])
    filled = np.flatnonzero(counts)
    ends = ends_of(items)
    if ends.size != index[-1, 0] or (ends[index[filled + 1, 0] - 1] + 1 != index[filled + 1, 1]).any():
        return "has other gaps than its index says"
    if int(items.sum(dtype=np.uint64)) >= WINDOW * len(counts):
        return "names positions outside their window"
    sums = np.cumsum(items, dtype=np.int64)
    begins = index[filled]
    before = np.where(begins[:, 1] > 0, sums[begins[:, 1] - 1], 0)
    positions = sums[ends] + np.arange(ends.size)
    positions -= np.repeat(before + begins[:, 0], counts[filled])
    if (positions[index[filled + 1, 0] - 1] >= np.minimum(WINDOW, limit - (filled + window) * WINDOW)).any():
        return "names positions outside their window"
    positions += np.repeat((filled + window) * WINDOW, counts[filled])
    return positions.astype(np.int32)


def _read_index(stream: Bytes, count: int, limit: int) -> tuple[int, Integers] | str:
    """The first window and, per window edge, changes and bytes before it; or what is wrong."""
    if stream.size < 2 * INDEX_BYTES:
        return f"has an index of {stream.size} bytes"
    first, windows = stream[:INDEX_BYTES].copy().view("<u4").tolist()
    if not 1 <= windows <= stream.size // INDEX_BYTES - 1 or (first + windows - 1) * WINDOW >= limit:
        return f"announces {windows} windows from window {first}"
    head = INDEX_BYTES * (windows + 1)
    index = np.zeros((windows + 1, 2), np.int64)
    index[1:] = stream[INDEX_BYTES:head].copy().view("<u4").reshape(-1, 2)
    steps = np.diff(index, axis=0)
    if index[-1, 0] != count or index[-1, 1] != stream.size - head:
        return f"has windows of {index[-1, 0]} positions in {index[-1, 1]} bytes"
    if (
        (steps < 0).any()
        or (steps[:, 1] < steps[:, 0]).any()
        or ((steps == 0).all(1) != (steps == 0).any(1)).any()
    ):
        return "has windows that overlap"
    if not steps[0, 0] or not steps[-1, 0]:
        return "has an empty window at an end"
    return first, index
