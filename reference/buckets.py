"""Buckets: a header and a payload that holds named byte ranges, or a trailer. Format 1, little endian.

``docs/wire.md`` draws the layout. A bucket is checked whole before anything in it is believed: sizes,
checksum, range table, tensor numbers and encodings. What only the receiver knows (versions, order, bounds of
positions) is checked by ``Target.validate``.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from weightsync.reference.encoding import (
    Encoding,
    as_bytes,
    element_bytes,
    padded,
    read_section,
    write_section,
)
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.headers import (
    ABORT,
    DELTA,
    END,
    FULL,
    HEADER_BYTES,
    KINDS,
    NO_BASE,
    Header,
    Heading,
)
from weightsync.reference.params import ParamMeta

__all__ = [
    "ABORT", "DELTA", "END", "END_BYTES", "FULL", "HEADER_BYTES", "KINDS", "NO_BASE", "TABLE_ENTRY_BYTES",
    "Bucket", "BucketSpec", "End", "Header", "Heading", "Range", "RangeSpec",
    "abort_bucket", "check_payload", "end_bucket", "pack_bucket", "read_abort", "read_end", "seal", "unpack",
]  # fmt: skip

TABLE_ENTRY = struct.Struct("<IB3sqQQ")
TRAILER = struct.Struct("<qQQ")
TABLE_ENTRY_BYTES = TABLE_ENTRY.size
END_BYTES = HEADER_BYTES + TRAILER.size


@dataclass(frozen=True, slots=True)
class Bucket:
    """A header and its payload, uint8 (header.payload_bytes,)."""

    header: Header
    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes on the wire: header and payload."""
        return HEADER_BYTES + self.payload.numel()

    def copy(self) -> Bucket:
        """The same bucket with a payload of its own."""
        return Bucket(self.header, self.payload.clone())


class RangeSpec(NamedTuple):
    """One tensor's place in one bucket.

    Attributes:
        tensor: number of the tensor in the plan.
        encoding: how its positions travel.
        base: DENSE: flat position of the first element; INT32: what every position is relative to.
        count: number of elements.
        first: INT32: ordinal of the first element among the changed elements of its piece; not on the wire,
            so 0 once unpacked.
    """

    tensor: int
    encoding: Encoding
    base: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    first: int = 0

    def section_bytes(self, itemsize: int) -> int:
        """Bytes of its section, without padding."""
        return self.count * element_bytes(self.encoding, itemsize)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The ranges of one bucket, as the plan cuts them.

    Attributes:
        ranges: in wire order.
        nbytes: bytes on the wire, header included.
    """

    ranges: tuple[RangeSpec, ...]
    nbytes: int

    @classmethod
    def of(cls, ranges: Sequence[RangeSpec], tensors: Sequence[ParamMeta]) -> BucketSpec:
        """The spec with its size."""
        sections = sum(padded(one.section_bytes(tensors[one.tensor].itemsize)) for one in ranges)
        return cls(tuple(ranges), HEADER_BYTES + TABLE_ENTRY_BYTES * len(ranges) + sections)


class Range(NamedTuple):
    """One unpacked range.

    Attributes:
        spec: its entry in the table.
        positions: int32 (count,) relative to ``spec.base``, or None for DENSE.
        bits: integer view (count,) of the values.
    """

    spec: RangeSpec
    positions: Tensor | None
    bits: Tensor


class End(NamedTuple):
    """The trailer of a successful update.

    Attributes:
        digest: digest of the state that the update leads to, signed int64.
        buckets: buckets sent before the trailer.
        nbytes: their bytes, headers included.
    """

    digest: int
    buckets: int
    nbytes: int


def pack_bucket(heading: Heading, ranges: Sequence[Range], tensors: Sequence[ParamMeta]) -> Bucket:
    """One bucket in new memory; ``ranges`` may be overwritten once this returns.

    Args:
        heading: of kind "full" or "delta".
        ranges: in wire order; ``bits`` are integer views of the tensors' item sizes.
        tensors: the plan's checkpoint tensors.
    """
    table = TABLE_ENTRY_BYTES * len(ranges)
    sizes = [one.spec.section_bytes(tensors[one.spec.tensor].itemsize) for one in ranges]
    payload = torch.zeros(table + sum(map(padded, sizes)), dtype=torch.uint8)
    entries = bytearray()
    offset = table
    for (spec, positions, bits), size in zip(ranges, sizes, strict=True):
        write_section(payload[offset : offset + size], positions, bits)
        entries += TABLE_ENTRY.pack(spec.tensor, spec.encoding, bytes(3), spec.base, spec.count, size)
        offset += padded(size)
    if entries:
        payload[:table] = torch.frombuffer(entries, dtype=torch.uint8)
    return seal(heading, len(ranges), payload)


def end_bucket(heading: Heading, digest: int, buckets: int, nbytes: int) -> Bucket:
    """The trailer of a success, for the update that ``heading`` belongs to."""
    return seal(replace(heading, kind=END), 0, _tensor(TRAILER.pack(digest, buckets, nbytes)))


def abort_bucket(heading: Heading, reason: str, status: int = 1) -> Bucket:
    """The trailer of a failure: receivers roll back. ``reason`` travels as UTF-8."""
    return seal(replace(heading, kind=ABORT), 0, _tensor(reason.encode()), status)


def check_payload(bucket: Bucket) -> None:
    """Refuse a payload that is not the one its header announces.

    Raises:
        PatchMismatch: dtype, size or checksum differ.
    """
    header, payload = bucket.header, bucket.payload
    name = f"bucket {header.heading.sequence} of version {header.heading.version}"
    if payload.dtype != torch.uint8 or payload.numel() != header.payload_bytes:
        raise PatchMismatch(
            f"{name} carries {payload.numel()} elements of {payload.dtype}, expected {header.payload_bytes} "
            "bytes of torch.uint8; send exactly what the header announces"
        )
    found = header.sum_with(_raw(payload))
    if found != header.checksum:
        raise PatchMismatch(
            f"{name} has checksum {found.hex()}, expected {header.checksum.hex()}; send the update again"
        )


def unpack(bucket: Bucket, tensors: Sequence[ParamMeta]) -> list[Range]:
    """The ranges of a "full" or "delta" bucket, in its payload's memory; everything checked but the
    positions.

    Raises:
        PatchMismatch: payload, table, tensor number, encoding, size or dense bounds do not fit.
    """
    check_payload(bucket)
    header, payload = bucket.header, bucket.payload
    if header.kind not in (FULL, DELTA):
        raise PatchMismatch(
            f"bucket of kind {header.kind!r} has no ranges, expected 'full' or 'delta'; read its trailer"
        )
    offset = TABLE_ENTRY_BYTES * header.ranges
    if offset > payload.numel():
        raise PatchMismatch(
            f"range table of {header.ranges} entries needs {offset} bytes, found {payload.numel()}; "
            "send exactly what the header announces"
        )
    table = bytes(payload[:offset].numpy())
    found: list[Range] = []
    for tensor, number, filler, base, count, size in TABLE_ENTRY.iter_unpack(table):
        if tensor >= len(tensors):
            raise PatchMismatch(
                f"range names tensor {tensor}, expected 0 to {len(tensors) - 1}; compare the plans' "
                "fingerprints"
            )
        meta = tensors[tensor]
        spec = RangeSpec(tensor, Encoding.of(number, meta.name), base, count)
        _check_range(spec, meta, size, filler, header.kind)
        if offset + padded(size) > payload.numel():
            raise PatchMismatch(
                f"range of {meta.name!r} ends at payload byte {offset + padded(size)}, expected at most "
                f"{payload.numel()}; send exactly what the header announces"
            )
        found.append(
            Range(spec, *read_section(payload[offset : offset + size], spec.encoding, count, meta.dtype))
        )
        offset += padded(size)
    if offset != payload.numel():
        raise PatchMismatch(
            f"payload has {payload.numel()} bytes, its ranges account for {offset}; "
            "list every section in the range table"
        )
    return found


def read_end(bucket: Bucket) -> End:
    """The trailer in a bucket of kind "end"; PatchMismatch when it is damaged or of another kind."""
    _check_trailer(bucket, END)
    if bucket.payload.numel() != TRAILER.size:
        raise PatchMismatch(
            f"end trailer has {bucket.payload.numel()} bytes, expected {TRAILER.size}; "
            "use the same release on both sides"
        )
    return End(*TRAILER.unpack(bytes(bucket.payload.numpy())))


def read_abort(bucket: Bucket) -> str:
    """The sender's reason in a bucket of kind "abort"; PatchMismatch when it is damaged or of another
    kind.
    """
    _check_trailer(bucket, ABORT)
    return bytes(bucket.payload.numpy()).decode(errors="replace")


def _check_range(spec: RangeSpec, meta: ParamMeta, size: int, filler: bytes, kind: str) -> None:
    expected = spec.section_bytes(meta.itemsize)
    if filler != bytes(3):
        raise PatchMismatch(
            f"range of {meta.name!r} has bytes {filler!r} behind its encoding, expected zeros; "
            "use the same release on both sides"
        )
    if size != expected:
        raise PatchMismatch(
            f"range of {meta.name!r} announces {size} bytes for {spec.count} elements of {meta.dtype} as "
            f"{spec.encoding.name}, expected {expected}; compare the dtype on both sides"
        )
    if spec.count < 1 or spec.base < 0 or spec.base + spec.count > meta.numel:
        raise PatchMismatch(
            f"range of {meta.name!r} names {spec.count} elements from position {spec.base}, expected at "
            f"least one and none beyond {meta.numel - 1}; compare the shape on both sides"
        )
    if kind == FULL and spec.encoding is not Encoding.DENSE:
        raise PatchMismatch(
            f"range of {meta.name!r} in a full update is {spec.encoding.name}, expected DENSE; send it whole"
        )


def _check_trailer(bucket: Bucket, kind: str) -> None:
    if bucket.header.kind != kind or bucket.header.ranges:
        raise PatchMismatch(
            f"bucket of kind {bucket.header.kind!r} with {bucket.header.ranges} ranges is no trailer, "
            f"expected kind {kind!r} without ranges; unpack it instead"
        )
    check_payload(bucket)


def seal(heading: Heading, ranges: int, payload: Tensor, status: int = 0) -> Bucket:
    """The bucket of a uint8 payload, which it shares, with a header that announces it, sums included."""
    bare = Header(heading, ranges, payload.numel(), bytes(16), status)
    return Bucket(replace(bare, checksum=bare.sum_with(_raw(payload))), payload)


def _raw(payload: Tensor) -> memoryview:
    return as_bytes(payload).cpu().numpy().data


def _tensor(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
