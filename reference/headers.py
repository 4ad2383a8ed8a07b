"""The 64 bytes before every payload: which update a bucket belongs to, and what follows. Little endian.

A header carries two sums. Its own check is read before anything in it is believed, so that a size with a flipped bit
never reaches a collective; the checksum is of the header and the payload together.
"""

from __future__ import annotations

import binascii
import struct
from dataclasses import dataclass, replace

import xxhash

from weightsync.reference.errors import PatchMismatch

FULL, DELTA, END, ABORT = "full", "delta", "end", "abort"
KINDS = {FULL: 1, DELTA: 2, END: 3, ABORT: 4}
"""Bucket kind -> its number in the header. END is the trailer of a success, ABORT of a failure."""

MAGIC = b"WSYN"
FORMAT = 1
NO_BASE = 0
"""Base version of a full update: it assumes nothing. Versions start at 1."""

HEADER = struct.Struct("<4sHBBHHIqqIIQ16s")
HEADER_BYTES = HEADER.size
COVERED_BYTES = HEADER_BYTES - 16
"""So many bytes of the header, its check as zero, are in the checksum."""

_CHECK = slice(10, 12)


@dataclass(frozen=True, slots=True)
class Heading:
    """What the sender says about a bucket before its bytes are known.

    Attributes:
        kind: "full", "delta", "end" or "abort".
        epoch: group epoch.
        base: version that the receiver must hold; ``NO_BASE`` in a full update.
        version: version that the update leads to.
        sequence: number of the bucket within its update, from 0; the trailer has the next one.
    """

    kind: str
    epoch: int
    base: int
    version: int
    sequence: int = 0

    def at(self, sequence: int) -> Heading:
        """The same heading for another bucket of the update."""
        return replace(self, sequence=sequence)


@dataclass(frozen=True, slots=True)
class Header:
    """The 64 bytes before every payload.

    Attributes:
        heading: kind, group epoch, base version, version, sequence.
        ranges: entries in the range table.
        payload_bytes: exact size of the payload that follows.
        checksum: xxh3-128 of ``covered`` and then the payload, 16 bytes.
        status: 0, or the sender's error number in an ABORT; at most 65535.
    """

    heading: Heading
    ranges: int
    payload_bytes: int
    checksum: bytes
    status: int = 0

    @property
    def kind(self) -> str:
        """Kind of the bucket."""
        return self.heading.kind

    @property
    def covered(self) -> bytes:
        """What of it the checksum covers: everything before the checksum, its own check as zero."""
        return self._pack()[:COVERED_BYTES]

    def sum_with(self, payload: memoryview) -> bytes:
        """The checksum, 16 bytes, that it has to have before these bytes."""
        found = xxhash.xxh3_128(self.covered)
        found.update(payload)
        return found.digest()

    def pack(self) -> bytes:
        """The header's 64 bytes."""
        raw = bytearray(self._pack())
        raw[_CHECK] = _check(raw)
        return bytes(raw)

    def _pack(self) -> bytes:
        head = self.heading
        return HEADER.pack(
            MAGIC, FORMAT, KINDS[head.kind], 0, self.status, 0, head.epoch, head.base, head.version,
            head.sequence, self.ranges, self.payload_bytes, self.checksum,
        )  # fmt: skip

    @classmethod
    def unpack(cls, raw: bytes) -> Header:
        """The header in ``raw``.

        Raises:
            PatchMismatch: wrong length, magic, format, check or kind, or flags that this format does not have.
        """
        if len(raw) != HEADER_BYTES:
            raise PatchMismatch(
                f"bucket header has {len(raw)} bytes, expected {HEADER_BYTES}; reconnect the group"
            )
        magic, number, kind, flags, status, _, epoch, base, version, sequence, ranges, size, checksum = (
            HEADER.unpack(raw)
        )
        if magic != MAGIC:
            raise PatchMismatch(
                f"bucket header starts with {magic!r}, expected {MAGIC!r}; reconnect the group"
            )
        if number != FORMAT:
            raise PatchMismatch(
                f"bucket header has format {number}, expected format {FORMAT}; "
                "use the same release on both sides"
            )
        if raw[_CHECK] != _check(raw):
            raise PatchMismatch(
                f"bucket header has check {raw[_CHECK].hex()}, expected {_check(raw).hex()}: a bit of it was "
                "changed on the way; reconnect the group"
            )
        if flags:
            raise PatchMismatch(
                f"bucket header has flags {flags}, expected 0 in format {FORMAT}; use the same release on both sides"
            )
        names = {wire: name for name, wire in KINDS.items()}
        if kind not in names:
            known = ", ".join(f"{wire} ({name})" for wire, name in names.items())
            raise PatchMismatch(
                f"bucket has kind {kind}, expected one of {known}; use the same release on both sides"
            )
        return cls(Heading(names[kind], epoch, base, version, sequence), ranges, size, checksum, status)


def _check(raw: bytes | bytearray) -> bytes:
    """The check of a header, 2 bytes: CRC-16/CCITT of its other bytes, which sees up to three flipped bits for sure."""
    zeroed = bytes(raw[: _CHECK.start]) + bytes(2) + bytes(raw[_CHECK.stop :])
    return binascii.crc_hqx(zeroed, 0xFFFF).to_bytes(2, "little")
