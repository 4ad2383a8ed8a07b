"""A reader of the wire in plain Python, written from ``docs/wire.md`` alone: it shares no code with what it checks.

Slow and simple on purpose. Bits are unsigned integers. A reader of another implementation may start from this file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import zstandard

DENSE, INT32, GAP8, GAP16, BITMAP, BLOCK = range(6)
RAW, XOR, STEP = range(3)
FIXED, STREAMS, ZSTD = range(3)

Change = tuple[int, int]
"""A position and the bits there."""


def read_bucket(
    wire: bytes,
    itemsizes: list[int],
    signed_magnitude: list[bool],
    old: Callable[[int, int], int] = lambda tensor, position: 0,
) -> list[tuple[int, list[Change]]]:
    """Tensor number and changes of every range of a full or delta bucket: header, then payload.

    Args:
        wire: all bytes of the bucket.
        itemsizes: bytes of an element, per tensor.
        signed_magnitude: per tensor, whether its elements are floats with a sign bit.
        old: bits of the base version, by tensor number and flat position.
    """
    magic, form, _kind, _flags, _status, _epoch, _base, _version, _sequence, ranges, size = (
        struct.unpack_from("<4sHBBIIqqIIQ", wire)
    )
    if magic != b"WSYN" or form != 1 or len(wire) != 64 + size:
        raise ValueError(f"{wire[:8]!r} begins no bucket of format 1 of {len(wire)} bytes")
    found = []
    start = 64 + 32 * ranges
    for entry in range(ranges):
        tensor, positions, values, packing, zero, base, count, nbytes = struct.unpack_from(
            "<IBBBBqQQ", wire, 64 + 32 * entry
        )
        if zero:
            raise ValueError(f"byte 7 of range {entry} is {zero}")
        section = wire[start : start + nbytes]
        itemsize = itemsizes[tensor]
        where, what = read_section(section, positions, values, packing, count, itemsize)
        at = [base + position for position in where]
        before = [old(tensor, position) for position in at] if values != RAW else [0] * count
        bits = [
            new_bits(values, one, was, 8 * itemsize, signed_magnitude[tensor])
            for one, was in zip(what, before, strict=True)
        ]
        found.append((tensor, list(zip(at, bits, strict=True))))
        start += -(-nbytes // 8) * 8
    return found


def read_section(
    section: bytes, positions: int, values: int, packing: int, count: int, itemsize: int
) -> tuple[list[int], list[int]]:
    """Positions relative to the range's base, and the values as they travel."""
    if packing == FIXED:
        split = 4 * count if positions == INT32 else 0
        at = items(section[:split], 4) if positions == INT32 else list(range(count))
        return at, items(section[split:], itemsize)
    widths = {DENSE: [], INT32: [4], GAP8: [1], GAP16: [2], BITMAP: [1], BLOCK: [1]}[positions]
    widths += [itemsize] if values != STEP else [1, 1, itemsize]
    streams = iter(read_streams(section, widths, packing == ZSTD))
    at = list(range(count))
    if positions == INT32:
        at = items(next(streams), 4)
    elif positions in (GAP8, GAP16):
        at = from_gaps(items(next(streams), 1 + (positions == GAP16)), 255 if positions == GAP8 else 65535)
    elif positions == BITMAP:
        stream = next(streams)
        origin = int.from_bytes(stream[:4], "little")
        at = [origin + number for number, bit in enumerate(bits_of(stream[4:])) if bit]
    elif positions == BLOCK:
        at = from_blocks(next(streams))
    if values != STEP:
        return at, items(next(streams), itemsize)
    negative, far = bits_of(next(streams)), bits_of(next(streams))
    rest = iter(items(next(streams), itemsize))
    steps = []
    for number in range(count):
        size = next(rest) + 2 if far[number] else 1
        steps.append((-size if negative[number] else size) % (1 << 8 * itemsize))
    return at, steps


def read_streams(section: bytes, widths: list[int], compressed: bool) -> Iterator[bytes]:
    """Every stream's bytes, the planes of one stream put together again."""
    planes = [width if compressed else 1 for width in widths]
    table = [struct.unpack_from("<II", section, 8 * number) for number in range(sum(planes))]
    start = 8 * len(table)
    entries = iter(table)
    for count in planes:
        parts = []
        for _ in range(count):
            stored, plain = next(entries)
            raw = section[start : start + stored]
            start += stored
            parts.append(raw if stored == plain else zstandard.ZstdDecompressor().decompress(raw))
            if len(parts[-1]) != plain:
                raise ValueError(f"a stream has {len(parts[-1])} bytes, {plain} were announced")
        yield bytes(byte for item in zip(*parts, strict=True) for byte in item)


def from_gaps(coded: list[int], escape: int) -> list[int]:
    """Positions from gaps: an item that is no escape ends one."""
    found: list[int] = []
    position = -1
    for item in coded:
        position += item
        if item != escape:
            position += 1
            found.append(position)
    return found


def from_blocks(stream: bytes) -> list[int]:
    """Positions from the windows of a BLOCK stream."""
    first, windows = struct.unpack_from("<II", stream)
    begin = 8 * (windows + 1)
    gaps = stream[begin:]
    found: list[int] = []
    opened = 0
    for window in range(windows):
        count, closed = struct.unpack_from("<II", stream, 8 * (window + 1))
        found += [65536 * (first + window) + at for at in from_gaps(list(gaps[opened:closed]), 255)]
        if len(found) != count:
            raise ValueError(f"window {window} ends after {len(found)} changes, its index says {count}")
        opened = closed
    return found


def new_bits(values: int, value: int, old: int, width: int, signed_magnitude: bool) -> int:
    """The bits that a value stands for, given those of the base version."""
    if values == RAW:
        return value
    if values == XOR:
        return old ^ value
    everything, sign = (1 << width) - 1, 1 << (width - 1)
    if not signed_magnitude:
        return (old + value) & everything

    def rank(bits: int) -> int:
        return bits ^ (sign - 1) if bits & sign else bits

    return rank((rank(old) + value) & everything)


def items(raw: bytes, width: int) -> list[int]:
    """Little-endian unsigned integers of ``width`` bytes."""
    return [int.from_bytes(raw[start : start + width], "little") for start in range(0, len(raw), width)]


def bits_of(raw: bytes) -> list[int]:
    """Bits, the lowest of each byte first."""
    return [byte >> bit & 1 for byte in raw for bit in range(8)]
