"""How one tensor's changes lie in a shard: positions as gaps, values as steps from their base, both in zstd.

This is the one place that knows; the rest hands positions and bits in and gets them back. A step tells the new
bits only to who holds the old ones, so readers prove the base first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from weightsync.reference.errors import PatchMismatch

DENSE = "dense"
GAPS = "gaps-steps"
ENCODINGS = (DENSE, GAPS)

Ints = NDArray[Any]

_LENGTHS = struct.Struct("<QIIII")  # bytes of the gaps, then of four zstd frames
_ESCAPE = 255
_LEVEL = 1


@dataclass(frozen=True, eq=False, slots=True)
class Sparse:
    """A section whose positions are known and whose values still want their base.

    Attributes:
        positions: int64 (n,), strictly ascending.
    """

    positions: Ints
    _sign: bytes
    _wide: bytes
    _rest: bytes

    def values(self, old: Ints) -> Ints:
        """The new bits, unsigned (n,), from those at the same positions of the base."""
        count = old.size
        sign = np.unpackbits(np.frombuffer(_unpacked(self._sign, -(-count // 8)), np.uint8), count=count)
        wide = np.unpackbits(np.frombuffer(_unpacked(self._wide, -(-count // 8)), np.uint8), count=count)
        magnitude = np.ones(count, old.dtype)
        where = np.flatnonzero(wide)
        planes = np.frombuffer(_unpacked(self._rest, where.size * old.itemsize), np.uint8)
        rest = np.ascontiguousarray(planes.reshape(old.itemsize, -1).T).view(old.dtype).reshape(-1)
        magnitude[where] = rest
        return np.where(sign.view(bool), old - magnitude, old + magnitude)


def encode(positions: Ints, new: Ints, old: Ints) -> bytes:
    """The section of ``new`` at ``positions`` (int64 (n,) ascending), n at least 1; both bits unsigned (n,)."""
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // _ESCAPE + 1)
    stretched = np.full(int(ends[-1]), _ESCAPE, np.uint8)
    stretched[ends - 1] = gaps % _ESCAPE
    step = new - old
    sign = step >> np.array(8 * step.itemsize - 1, step.dtype)
    magnitude = np.where(sign.astype(bool), old - new, step)
    wide = magnitude != 1
    planes = np.ascontiguousarray(magnitude[wide].view(np.uint8).reshape(-1, step.itemsize).T)
    packer = zstandard.ZstdCompressor(level=_LEVEL)
    frames = [
        packer.compress(part.tobytes())
        for part in (stretched, np.packbits(sign.astype(bool)), np.packbits(wide), planes.reshape(-1))
    ]
    return _LENGTHS.pack(stretched.size, *map(len, frames)) + b"".join(frames)


def decode(raw: bytes, count: int, numel: int, name: str) -> Sparse:
    """A section of ``count`` positions in a tensor of ``numel`` elements; sizes are checked before memory is taken.

    Raises:
        PatchMismatch: it does not hold exactly that, or names a position out of bounds.
    """
    if not 0 < count <= numel or len(raw) < _LENGTHS.size:
        raise PatchMismatch(f"section of {name!r} names {count} of {numel} elements in {len(raw)} bytes")
    gaps_bytes, *sizes = _LENGTHS.unpack(raw[: _LENGTHS.size])
    if sum(sizes) + _LENGTHS.size != len(raw) or not count <= gaps_bytes <= count + numel // _ESCAPE:
        raise PatchMismatch(f"section of {name!r} has parts that do not fill its {len(raw)} bytes")
    bounds = np.cumsum([_LENGTHS.size, *sizes]).tolist()
    frames = [raw[start:stop] for start, stop in pairwise(bounds)]
    stretched = np.frombuffer(_unpacked(frames[0], gaps_bytes), np.uint8)
    ends = np.flatnonzero(stretched != _ESCAPE)
    if ends.size != count or ends[-1] != gaps_bytes - 1:
        raise PatchMismatch(f"section of {name!r} has {ends.size} positions, expected {count}; it is damaged")
    escapes = np.diff(ends, prepend=-1) - 1
    positions = np.cumsum(escapes * _ESCAPE + stretched[ends] + 1) - 1
    if positions[-1] >= numel:
        raise PatchMismatch(f"section of {name!r} names position {positions[-1]}, expected 0 to {numel - 1}")
    return Sparse(positions, *frames[1:])


def _unpacked(frame: bytes, nbytes: int) -> bytes:
    """A frame's content, if it says itself that it is of ``nbytes`` bytes."""
    try:
        said = zstandard.frame_content_size(frame)
        if said != nbytes:
            raise PatchMismatch(f"compressed part says {said} bytes, expected {nbytes}; it is damaged")
        found = zstandard.ZstdDecompressor().decompress(frame) if nbytes else b""
    except zstandard.ZstdError as error:
        raise PatchMismatch(f"compressed part is damaged: {error}") from None
    if len(found) != nbytes:
        raise PatchMismatch(f"compressed part has {len(found)} bytes, expected {nbytes}; it is damaged")
    return found
