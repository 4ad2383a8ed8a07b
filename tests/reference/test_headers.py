"""The 64 bytes before every payload: they come back, and whatever bit of a bucket was changed is refused."""

from __future__ import annotations

import binascii
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.buckets import (
    DELTA,
    HEADER_BYTES,
    KINDS,
    Bucket,
    Header,
    Heading,
    Range,
    RangeSpec,
    abort_bucket,
    check_payload,
    end_bucket,
    pack_bucket,
)
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, int_view

HEADING = Heading(DELTA, epoch=3, base=6, version=7, sequence=2)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
U32 = st.integers(0, (1 << 32) - 1)
META = ParamMeta("a", torch.bfloat16, (2, 3))


def headings() -> st.SearchStrategy[Heading]:
    return st.builds(Heading, st.sampled_from(sorted(KINDS)), epoch=U32, base=I64, version=I64, sequence=U32)


def example() -> Bucket:
    bits = int_view(torch.tensor([1.0, -0.0], dtype=torch.bfloat16))
    spec = RangeSpec(0, Encoding.INT32, 0, 2)
    return pack_bucket(HEADING, [Range(spec, torch.tensor([1, 4], dtype=torch.int32), bits)], [META])


def flipped(raw: bytes, bit: int) -> bytes:
    """The bytes with one bit flipped."""
    changed = bytearray(raw)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@given(
    heading=headings(),
    ranges=U32,
    size=st.integers(0, (1 << 64) - 1),
    checksum=st.binary(min_size=16, max_size=16),
    status=st.integers(0, (1 << 16) - 1),
)
def test_a_header_survives_its_64_bytes(
    heading: Heading, ranges: int, size: int, checksum: bytes, status: int
) -> None:
    header = Header(heading, ranges, size, checksum, status)
    raw = header.pack()
    assert len(raw) == HEADER_BYTES == 64
    assert Header.unpack(raw) == header


@pytest.mark.parametrize(
    ("at", "byte", "said"),
    [
        (0, 0, r"starts with b'\\x00SYN', expected b'WSYN'"),
        (4, 2, "format 2, expected format 1"),
        (7, 1, "flags 1, expected 0 in format 1"),
        (6, 9, r"kind 9, expected one of 1 \(full\), 2 \(delta\), 3 \(end\), 4 \(abort\)"),
    ],
    ids=["magic", "format", "flags", "kind"],
)
def test_a_header_of_another_make_is_refused(at: int, byte: int, said: str) -> None:
    raw = bytearray(example().header.pack())
    raw[at] = byte
    raw[10:12] = binascii.crc_hqx(raw[:10] + bytes(2) + raw[12:], 0xFFFF).to_bytes(2, "little")
    with pytest.raises(PatchMismatch, match=said):
        Header.unpack(bytes(raw))


@pytest.mark.parametrize("kind", ["bucket", "end", "abort"])
def test_any_flipped_bit_of_a_bucket_is_refused(kind: str) -> None:
    """Those of the header before it is known how many bytes follow."""
    made = {"bucket": example(), "end": end_bucket(HEADING, 1, 2, 3), "abort": abort_bucket(HEADING, "why")}
    bucket = made[kind]
    raw = bucket.header.pack()
    for bit in range(8 * HEADER_BYTES):
        with pytest.raises(PatchMismatch):
            Header.unpack(flipped(raw, bit))
    for bit in range(8 * bucket.payload.numel()):
        payload = torch.frombuffer(bytearray(flipped(bytes(bucket.payload.tolist()), bit)), dtype=torch.uint8)
        with pytest.raises(PatchMismatch, match="checksum"):
            check_payload(Bucket(bucket.header, payload))


@given(bits=st.sets(st.integers(0, 8 * HEADER_BYTES - 1), min_size=1, max_size=3))
def test_up_to_three_flipped_bits_of_a_header_are_refused(bits: set[int]) -> None:
    raw = example().header.pack()
    for bit in bits:
        raw = flipped(raw, bit)
    with pytest.raises(PatchMismatch):
        Header.unpack(raw)


@given(heading=headings(), ranges=U32, status=st.integers(0, (1 << 16) - 1))
def test_a_payload_fits_no_other_header(heading: Heading, ranges: int, status: int) -> None:
    """Also one whose own check is right: the checksum is of both."""
    right = example()
    other = replace(right.header, heading=heading, ranges=ranges, status=status)
    if other != right.header:
        with pytest.raises(PatchMismatch, match="checksum"):
            check_payload(Bucket(Header.unpack(other.pack()), right.payload))


def test_a_header_of_another_length_is_refused() -> None:
    with pytest.raises(PatchMismatch, match="has 63 bytes, expected 64"):
        Header.unpack(example().header.pack()[:-1])
