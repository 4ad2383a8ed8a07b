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

from weightsync.reference.encoding import Encoding, as_bytes, padded, read_section
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
from weightsync.reference.ranges import TABLE_ENTRY_BYTES, BucketSpec, Range, RangeSpec
from weightsync.reference.wire.forms import Form, Packing
from weightsync.reference.wire.sections import decode_section, encode_section
from weightsync.reference.wire.streams import Zstd

__all__ = [
    "ABORT", "DELTA", "END", "END_BYTES", "FULL", "HEADER_BYTES", "KINDS", "NO_BASE", "TABLE_ENTRY_BYTES",
    "Bucket", "BucketSpec", "End", "Header", "Heading", "Range", "RangeSpec",
    "abort_bucket", "check_payload", "end_bucket", "pack_bucket", "read_abort", "read_end", "seal", "unpack",
]  # fmt: skip

TABLE_ENTRY = struct.Struct("<IB3sqQQ")
TRAILER = struct.Struct("<qQQ")
END_BYTES = HEADER_BYTES + TRAILER.size
POSITION_LIMIT = 1 << 31
"""Positions relative to a range's base are below this."""


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


def pack_bucket(
    heading: Heading, ranges: Sequence[Range], tensors: Sequence[ParamMeta], zstd: Zstd | None = None
) -> Bucket:
    """One bucket in new memory; ``ranges`` may be overwritten once this returns.

    A range is written in its fixed form where its own would take as many bytes.

    Args:
        heading: of kind "full" or "delta".
        ranges: in wire order; ``bits`` are integer views of the tensors' item sizes, in the ranges' value forms.
        tensors: the plan's checkpoint tensors.
        zstd: contexts to use; new ones when left out.
    """
    zstd = zstd or Zstd()
    table = TABLE_ENTRY_BYTES * len(ranges)
    sections = [encode_section(one.positions, one.bits, one.spec.form, zstd) for one in ranges]
    sizes = [section.numel() for _, section in sections]
    payload = torch.zeros(table + sum(map(padded, sizes)), dtype=torch.uint8)
    entries = bytearray()
    offset = table
    for one, (form, section), size in zip(ranges, sections, sizes, strict=True):
        payload[offset : offset + size] = section
        how = bytes((form.values, form.packing, 0))
        entries += TABLE_ENTRY.pack(one.spec.tensor, form.positions, how, one.spec.base, one.spec.count, size)
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


def unpack(bucket: Bucket, tensors: Sequence[ParamMeta], zstd: Zstd | None = None) -> list[Range]:
    """The ranges of a "full" or "delta" bucket, in its payload's memory where their form allows; everything checked
    but fixed positions.

    Args:
        bucket: as it was received.
        tensors: what its ranges' numbers mean.
        zstd: contexts to use; new ones when left out.

    Raises:
        PatchMismatch: payload, table, tensor number, form, section, size or dense bounds do not fit.
    """
    zstd = zstd or Zstd()
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
    for tensor, number, (values, packing, filler), base, count, size in TABLE_ENTRY.iter_unpack(table):
        if tensor >= len(tensors):
            raise PatchMismatch(
                f"range names tensor {tensor}, expected 0 to {len(tensors) - 1}; compare the plans' "
                "fingerprints"
            )
        meta = tensors[tensor]
        form = Form.of(number, values, packing, meta.name)
        spec = RangeSpec(tensor, form.positions, base, count, values=form.values, packing=form.packing)
        _check_range(spec, meta, size, filler, header.kind)
        if offset + padded(size) > payload.numel():
            raise PatchMismatch(
                f"range of {meta.name!r} ends at payload byte {offset + padded(size)}, expected at most "
                f"{payload.numel()}; send exactly what the header announces"
            )
        section = payload[offset : offset + size]
        if form.packing is Packing.FIXED:
            found.append(Range(spec, *read_section(section, spec.encoding, count, meta.dtype)))
        else:
            limit = min(meta.numel - base, POSITION_LIMIT)
            read = decode_section(section, form, count, limit, meta.dtype, meta.name, zstd)
            found.append(Range(spec, read.positions, read.values))
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


def _check_range(spec: RangeSpec, meta: ParamMeta, size: int, filler: int, kind: str) -> None:
    expected, fixed = spec.section_bytes(meta.itemsize), spec.packing is Packing.FIXED
    if filler:
        raise PatchMismatch(
            f"range of {meta.name!r} has byte {filler} behind its packing, expected zero; "
            "use the same release on both sides"
        )
    if size != expected if fixed else size >= expected:
        raise PatchMismatch(
            f"range of {meta.name!r} announces {size} bytes for {spec.count} elements of {meta.dtype} as "
            f"{spec.form.name}, expected {'' if fixed else 'fewer than '}{expected}; compare the dtype on both sides"
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
