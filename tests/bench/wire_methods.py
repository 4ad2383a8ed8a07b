"""The field's ways to put a delta on the wire, written by us in numpy on the data of ``wire_data``: one class a way.

Each encodes a list of updates to frames and decodes them to positions and new bits; headers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from wire_data import NUMEL, SHAPE, Update

Frames = list[bytes]
Change = tuple[NDArray[Any], NDArray[Any]]
Method = tuple[Callable[[Update], Frames], Callable[[Frames, Update], Change]]


def methods() -> dict[str, Method]:
    """Name -> encode and decode of one tensor, sharing one compressor and one decompressor of level 1."""
    packer, opener = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()

    def pack(array: NDArray[Any]) -> bytes:
        return packer.compress(np.ascontiguousarray(array))

    def unpack(frame: bytes, dtype: Any) -> NDArray[Any]:
        return np.frombuffer(opener.decompress(frame), dtype)

    def arrays(one: Update) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        return one.positions.numpy(), one.new.numpy(), one.old.numpy()

    def xor_dense(one: Update) -> Frames:
        positions, new, old = arrays(one)
        dense = np.zeros(NUMEL, np.int16)
        dense[positions] = new ^ old
        return [pack(dense)]

    def from_xor_dense(frames: Frames, one: Update) -> Change:
        dense = unpack(frames[0], np.int16)
        positions = np.flatnonzero(dense).astype(np.int32)
        return positions, dense[positions] ^ one.old.numpy()

    def overwrite(one: Update) -> Frames:
        positions, new, _ = arrays(one)
        dense, mask = np.zeros(NUMEL, np.int16), np.zeros(NUMEL, bool)
        dense[positions], mask[positions] = new, True
        return [pack(dense), pack(np.packbits(mask))]

    def from_overwrite(frames: Frames, one: Update) -> Change:
        positions = np.flatnonzero(np.unpackbits(unpack(frames[1], np.uint8), count=NUMEL)).astype(np.int32)
        return positions, unpack(frames[0], np.int16)[positions]

    def plain(one: Update) -> Frames:
        positions, new, _ = arrays(one)
        return [positions.tobytes(), new.tobytes()]

    def from_plain(frames: Frames, one: Update) -> Change:
        return np.frombuffer(frames[0], np.int32), np.frombuffer(frames[1], np.int16)

    def gaps(one: Update, dtype: Any, wide: Any) -> Frames:
        positions, new, old = arrays(one)
        top = np.iinfo(dtype).max
        found = np.diff(positions, prepend=-1)
        long = found >= top
        items = found.astype(dtype)
        items[long] = top
        return [pack(items), pack(found[long].astype(wide)), pack(new ^ old)]

    def from_gaps(frames: Frames, one: Update, dtype: Any, wide: Any) -> Change:
        items = unpack(frames[0], dtype)
        found = items.astype(np.int32)
        found[items == np.iinfo(dtype).max] = unpack(frames[1], wide)
        positions = np.cumsum(found, dtype=np.int32)
        positions -= 1
        return positions, unpack(frames[2], np.int16) ^ one.old.numpy()

    def coo(one: Update) -> Frames:
        positions, new, _ = arrays(one)
        rows, columns = np.divmod(positions, SHAPE[1])
        return [pack(rows.astype(np.uint16)), pack(columns.astype(np.uint16)), pack(new)]

    def from_coo(frames: Frames, one: Update) -> Change:
        rows = unpack(frames[0], np.uint16).astype(np.int32)
        return rows * SHAPE[1] + unpack(frames[1], np.uint16), unpack(frames[2], np.int16)

    return {
        "numpy u8 gaps, escapes, xor, zstd-1": (
            lambda one: gaps(one, np.uint8, np.uint32),
            lambda frames, one: from_gaps(frames, one, np.uint8, np.uint32),
        ),
        "u16 gaps, xor, zstd-1": (
            lambda one: gaps(one, np.uint16, np.uint32),
            lambda frames, one: from_gaps(frames, one, np.uint16, np.uint32),
        ),
        "int32 positions and values": (plain, from_plain),
        "COO, zstd-1": (coo, from_coo),
        "xor of dense bytes, zstd-1": (xor_dense, from_xor_dense),
        "overwritten bytes and a mask, zstd-1": (overwrite, from_overwrite),
    }
