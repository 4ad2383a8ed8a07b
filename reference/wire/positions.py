"""Position forms: ascending positions, relative to a range's base, to streams and back.

Whatever the form, the plain streams of ``count`` positions have at most ``4 * count`` bytes: what would need more is
written as INT32. So a reader's memory is bounded by the count that the range table announces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightsync.reference.wire.blocks import read_blocks, write_blocks
from weightsync.reference.wire.forms import Form, Positions
from weightsync.reference.wire.gaps import escape, gaps_of, unescape
from weightsync.reference.wire.streams import Bytes, Integers, StreamReader, plane_sizes, planes, unplane
from weightsync.reference.wire.values import stream_count

POSITION_BYTES = 4
_ORIGIN = np.dtype("<u4")


def position_streams(form: Positions, positions: Integers, split: bool) -> list[Bytes] | None:
    """The streams of ascending positions (n,) int32, n at least 1; None when INT32 would be smaller.

    Args:
        form: any but DENSE.
        positions: relative to the range's base.
        split: whether items of several bytes are cut in planes.
    """
    most = POSITION_BYTES * positions.size
    if form is Positions.INT32:
        return planes(positions, split)
    if form is Positions.BITMAP:
        return _bitmap(positions, most)
    if form is Positions.BLOCK:
        stream = write_blocks(positions, most)
        return None if stream is None else [stream]
    dtype: Any = np.uint8 if form is Positions.GAP8 else np.uint16
    items = escape(gaps_of(positions), dtype, most // np.dtype(dtype).itemsize)
    return None if items is None else planes(items, split)


def position_stream_count(form: Positions, split: bool) -> int:
    """Streams that ``position_streams`` makes."""
    wide = {
        Positions.DENSE: 0,
        Positions.INT32: POSITION_BYTES if split else 1,
        Positions.GAP16: 2 if split else 1,
    }
    return wide.get(form, 1)


def read_positions(reader: StreamReader, form: Positions, count: int, limit: int, split: bool) -> Integers:
    """Positions (count,) int32 that the next streams of ``reader`` hold: strictly ascending, below ``limit``.

    Raises:
        PatchMismatch: they are anything else.
    """
    if form is Positions.INT32:
        positions = unplane(reader.take_planes(count, POSITION_BYTES, split), np.int32)
        return require_ascending(positions, limit, reader.refusal)
    item = 2 if form is Positions.GAP16 else 1
    total = reader.size * (item if split else 1)
    if not 1 <= total <= POSITION_BYTES * count or total % item:
        raise reader.refusal(f"announces {total} bytes of {form.name}", f"1 to {POSITION_BYTES * count}")
    streams = [reader.take(size) for size in plane_sizes(total // item, item, split)]
    if form is Positions.BITMAP:
        found: Integers | str = _from_bitmap(streams[0], count, limit)
    elif form is Positions.BLOCK:
        blocks = read_blocks(streams[0], count, limit)
        found = blocks if isinstance(blocks, str) else blocks[0]
    else:
        found = unescape(unplane(streams, np.uint8 if item == 1 else np.uint16), count, limit)
    if isinstance(found, str):
        raise reader.refusal(found, f"{count} positions below {limit}, in {form.name}")
    return found


def require_ascending(positions: Integers, limit: int, refusal: Callable[[str, str], Exception]) -> Integers:
    """``positions`` if they are strictly ascending from 0 or more and below ``limit``, else the refusal raised."""
    if positions.size and (positions[0] < 0 or positions[-1] >= limit):
        outside = positions[0] if positions[0] < 0 else positions[-1]
        raise refusal(f"names position {outside} relative to its base", f"0 to {limit - 1}")
    if not bool((positions[1:] > positions[:-1]).all()):
        raise refusal("has positions that do not ascend", "each above the one before it")
    return positions


def decode_window(
    section: Tensor, form: Form, count: int, limit: int, name: str, *, first: int, last: int
) -> tuple[Tensor, int]:
    """Positions of a BLOCK section from ``first`` to before ``last``, without reading any others'.

    Args:
        section: uint8, the whole section.
        form: its form; its positions are BLOCK.
        count: elements of the section.
        limit: one more than the largest position allowed.
        name: the tensor, for errors.
        first: first position wanted, relative to the range's base.
        last: where to stop.

    Returns:
        int32 positions, ascending, and how many elements of the section stand before them: the values of these
        positions begin there.

    Raises:
        PatchMismatch: the index or an opened window is damaged.
        ValueError: the section is in another form.
    """
    if form.positions is not Positions.BLOCK:
        raise ValueError(f"{form.name} has no windows, expected positions in BLOCK; decode the section whole")
    reader = StreamReader(section.numpy(), 1 + stream_count(form.values, 1, False), None, name)
    size = reader.size
    if not 1 <= size <= POSITION_BYTES * count:
        raise reader.refusal(f"announces {size} bytes of BLOCK", f"1 to {POSITION_BYTES * count}")
    found = read_blocks(reader.take(size), count, limit, first, last)
    if isinstance(found, str):
        raise reader.refusal(found, f"{count} positions below {limit}, in BLOCK")
    return torch.from_numpy(found[0]), found[1]


def _bitmap(positions: Integers, most: int) -> list[Bytes] | None:
    """u32 first position, then one bit a position from that one to the last, lowest bit first."""
    origin = int(positions[0])
    span = int(positions[-1]) - origin + 1
    if _ORIGIN.itemsize + -(-span // 8) > most:
        return None
    flags = np.zeros(span, np.uint8)
    flags[positions - origin] = 1
    return [
        np.concatenate([np.array([origin], _ORIGIN).view(np.uint8), np.packbits(flags, bitorder="little")])
    ]


def _from_bitmap(stream: Bytes, count: int, limit: int) -> Integers | str:
    if stream.size <= _ORIGIN.itemsize:
        return f"has a bitmap of {stream.size} bytes"
    origin = int(stream[: _ORIGIN.itemsize].copy().view(_ORIGIN)[0])
    bits = stream[_ORIGIN.itemsize :]
    if origin >= limit or not bits[0] & 1 or not bits[-1]:
        return f"has a bitmap from position {origin} that does not begin or end with a change"
    found = np.flatnonzero(np.unpackbits(bits, bitorder="little").view(bool))
    if found.size != count or origin + int(found[-1]) >= limit:
        return f"has {found.size} positions up to {origin + int(found[-1])} in its bitmap"
    found += origin
    return found.astype(np.int32)
