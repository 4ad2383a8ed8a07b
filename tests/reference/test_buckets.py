"""Headers, payloads and trailers: what is packed comes back, and what was damaged or made up is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.buckets import (
    ABORT,
    DELTA,
    END,
    END_BYTES,
    FULL,
    TABLE_ENTRY,
    TABLE_ENTRY_BYTES,
    Bucket,
    BucketSpec,
    Header,
    Heading,
    Range,
    RangeSpec,
    abort_bucket,
    end_bucket,
    pack_bucket,
    read_abort,
    read_end,
    seal,
    unpack,
)
from weightsync.reference.encoding import Encoding, as_bytes, element_bytes, from_bytes
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.wire.policy import PLAIN_WIRE
from weightsync.testing.strategies import DTYPES, tensors

HEADING = Heading(DELTA, epoch=3, base=6, version=7, sequence=2)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
U32 = st.integers(0, (1 << 32) - 1)
METAS = (ParamMeta("a", torch.bfloat16, (2, 3)), ParamMeta("b", torch.float32, (4,)))


def headings(kinds: st.SearchStrategy[str]) -> st.SearchStrategy[Heading]:
    return st.builds(Heading, kinds, epoch=U32, base=I64, version=I64, sequence=U32)


@st.composite
def contents(draw: st.DrawFn) -> tuple[tuple[ParamMeta, ...], list[Range]]:
    """Tensors of any dtype, and ranges of some of them."""
    metas: list[ParamMeta] = []
    ranges: list[Range] = []
    for number in range(draw(st.integers(1, 4))):
        dtype = draw(st.sampled_from((*DTYPES, torch.float64)))
        size = draw(st.integers(1, 9))
        metas.append(ParamMeta(f"w{number}", dtype, (size,)))
        base = draw(st.integers(0, size - 1))
        count = draw(st.integers(0, size - base))
        if count == 0:
            continue
        bits = int_view(draw(tensors(dtype=dtype, shape=(count,))))
        if draw(st.booleans()):
            ranges.append(Range(RangeSpec(number, Encoding.DENSE, base, count), None, bits))
        else:
            chosen = sorted(draw(st.permutations(range(size - base)))[:count])
            positions = torch.tensor(chosen, dtype=torch.int32)
            ranges.append(Range(RangeSpec(number, Encoding.INT32, base, count), positions, bits))
    return tuple(metas), ranges


def example() -> Bucket:
    """Two ranges: INT32 positions 1 and 4 of a, and elements 1 to 3 of b."""
    return pack_bucket(
        HEADING,
        [
            Range(
                RangeSpec(0, Encoding.INT32, 0, 2),
                torch.tensor([1, 4], dtype=torch.int32),
                torch.tensor([5, 6], dtype=torch.int16),
            ),
            Range(RangeSpec(1, Encoding.DENSE, 1, 3), None, torch.tensor([7, 8, 9], dtype=torch.int32)),
        ],
        METAS,
    )


def resealed(bucket: Bucket, payload: Tensor, **changes: int) -> Bucket:
    """The bucket with another payload under a right checksum: made up, not damaged."""
    heading = bucket.header.heading
    return seal(heading, changes.get("ranges", bucket.header.ranges), payload, bucket.header.status)


def with_entry(bucket: Bucket, number: int, **changes: int) -> Bucket:
    """The bucket with fields of one table entry replaced, under a right checksum."""
    payload = bucket.payload.clone()
    where = slice(number * TABLE_ENTRY_BYTES, (number + 1) * TABLE_ENTRY_BYTES)
    names = ("tensor", "encoding", "filler", "base", "count", "size")
    fields = dict(zip(names, TABLE_ENTRY.unpack(bytes(payload[where].tolist())), strict=True)) | changes
    payload[where] = torch.frombuffer(bytearray(TABLE_ENTRY.pack(*fields.values())), dtype=torch.uint8)
    return resealed(bucket, payload)


@given(drawn=contents(), shift=st.integers(0, 7))
def test_ranges_come_back_as_they_were_packed(
    drawn: tuple[tuple[ParamMeta, ...], list[Range]], shift: int
) -> None:
    """Also when the payload is received at an odd address."""
    metas, ranges = drawn
    packed = pack_bucket(HEADING, ranges, metas)
    assert packed.nbytes == BucketSpec.of([one.spec for one in ranges], metas).nbytes
    room = torch.empty(packed.payload.numel() + shift, dtype=torch.uint8)
    room[shift:] = packed.payload
    received = unpack(Bucket(Header.unpack(packed.header.pack()), room[shift:]), metas)
    assert len(received) == len(ranges)
    for found, sent in zip(received, ranges, strict=True):
        assert found.spec == sent.spec
        assert torch.equal(found.bits, sent.bits)
        if sent.positions is None:
            assert found.positions is None
        else:
            assert torch.equal(found.positions, sent.positions)


def test_packing_copies_so_that_the_ranges_may_be_overwritten() -> None:
    bits = torch.tensor([1, 2], dtype=torch.int16)
    packed = pack_bucket(HEADING, [Range(RangeSpec(0, Encoding.DENSE, 0, 2), None, bits)], METAS)
    bits.zero_()
    assert unpack(packed, METAS)[0].bits.tolist() == [1, 2]


@given(data=st.data())
def test_any_damaged_byte_is_refused(data: st.DataObject) -> None:
    bucket = example()
    payload = bucket.payload.clone()
    payload[data.draw(st.integers(0, payload.numel() - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(PatchMismatch, match="bucket 2 of version 7 has checksum"):
        unpack(Bucket(bucket.header, payload), METAS)


@pytest.mark.parametrize("cut", [slice(None, -1), slice(8, None), slice(0, 0)], ids=str)
def test_a_payload_of_another_size_is_refused(cut: slice) -> None:
    bucket = example()
    with pytest.raises(PatchMismatch, match=f"expected {bucket.payload.numel()} bytes"):
        unpack(Bucket(bucket.header, bucket.payload[cut]), METAS)


def test_a_payload_that_is_not_bytes_is_refused() -> None:
    bucket = example()
    with pytest.raises(PatchMismatch, match=r"of torch\.int8, expected \d+ bytes of torch\.uint8"):
        unpack(Bucket(bucket.header, bucket.payload.view(torch.int8)), METAS)


@pytest.mark.parametrize(
    ("number", "changes", "said"),
    [
        (0, {"tensor": 2}, "range names tensor 2, expected 0 to 1"),
        (0, {"encoding": 7}, r"range of 'a' has position form 7, expected one of 0 \(DENSE\), 1 \(INT32\)"),
        (
            0,
            {"count": 3},
            "'a' announces 12 bytes for 3 elements of torch.bfloat16 as int32.raw, expected 18",
        ),
        (1, {"size": 10}, "'b' announces 10 bytes for 3 elements of torch.float32 as dense.raw, expected 12"),
        (0, {"filler": b"\0\0\1"}, "range of 'a' has byte 1 behind its packing, expected zero"),
        (1, {"base": 2}, "range of 'b' names 3 elements from position 2, .* none beyond 3"),
        (1, {"base": -1}, "range of 'b' names 3 elements from position -1"),
        (0, {"count": 0, "size": 0}, "range of 'a' names 0 elements from position 0, expected at least one"),
        (0, {"tensor": 1}, "range of 'b' announces 12 bytes for 2 elements of torch.float32"),
        (1, {"count": 1, "size": 4}, "payload has 96 bytes, its ranges account for 88"),
        (0, {"count": 6, "size": 36}, "range of 'a' ends at payload byte 104, expected at most 96"),
    ],
    ids=str,
)
def test_a_made_up_table_is_refused(number: int, changes: dict[str, int], said: str) -> None:
    with pytest.raises(PatchMismatch, match=said):
        unpack(with_entry(example(), number, **changes), METAS)


def test_a_table_longer_than_the_payload_is_refused() -> None:
    bucket = example()
    with pytest.raises(PatchMismatch, match="range table of 9 entries needs 288 bytes, found 96"):
        unpack(resealed(bucket, bucket.payload, ranges=9), METAS)


def test_a_full_bucket_has_dense_ranges_only() -> None:
    bucket = example()
    full = seal(replace(HEADING, kind=FULL), bucket.header.ranges, bucket.payload)
    with pytest.raises(PatchMismatch, match="range of 'a' in a full update is INT32, expected DENSE"):
        unpack(full, METAS)


@given(digest=I64, buckets=st.integers(0, 1 << 40), nbytes=st.integers(0, 1 << 60))
def test_an_end_trailer_comes_back(digest: int, buckets: int, nbytes: int) -> None:
    trailer = end_bucket(HEADING, digest, buckets, nbytes)
    assert trailer.nbytes == END_BYTES
    assert trailer.header.heading == replace(HEADING, kind=END)
    assert read_end(trailer) == (digest, buckets, nbytes)


@given(reason=st.text(max_size=20))
def test_an_abort_trailer_comes_back(reason: str) -> None:
    trailer = abort_bucket(HEADING, reason)
    assert trailer.header.kind == ABORT
    assert trailer.header.status != 0
    assert read_abort(trailer) == reason


def test_trailers_are_not_taken_for_each_other_nor_for_buckets() -> None:
    end, abort, bucket = end_bucket(HEADING, 1, 2, 3), abort_bucket(HEADING, "why"), example()
    for found in (abort, bucket):
        with pytest.raises(PatchMismatch, match="is no trailer, expected kind 'end'"):
            read_end(found)
    with pytest.raises(PatchMismatch, match="is no trailer, expected kind 'abort'"):
        read_abort(end)
    with pytest.raises(PatchMismatch, match="kind 'end' has no ranges"):
        unpack(end, METAS)
    with pytest.raises(PatchMismatch, match="end trailer has 23 bytes, expected 24"):
        read_end(resealed(end, end.payload[:-1].clone()))
    with pytest.raises(PatchMismatch, match="checksum"):
        read_end(Bucket(end.header, end.payload ^ 1))


@given(
    numel=st.integers(1, 1000),
    itemsize=st.sampled_from([1, 2, 4, 8]),
    data=st.data(),
)
def test_the_cheapest_encoding_has_the_fewest_bytes(numel: int, itemsize: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, numel))
    dense = numel * element_bytes(Encoding.DENSE, itemsize)
    sparse = count * element_bytes(Encoding.INT32, itemsize)
    chosen = {Encoding.DENSE: dense, Encoding.INT32: sparse}[
        PLAIN_WIRE.form(count, numel, itemsize).positions
    ]
    assert chosen == min(dense, sparse)


def test_bf16_turns_dense_at_one_third() -> None:
    assert PLAIN_WIRE.form(332, 999, 2).positions is Encoding.INT32
    assert PLAIN_WIRE.form(333, 999, 2).positions is Encoding.DENSE


@given(tensor=tensors(strided=True))
def test_bytes_are_those_of_the_elements_in_order(tensor: Tensor) -> None:
    found = as_bytes(tensor)
    assert found.dtype == torch.uint8
    assert torch.equal(int_view(from_bytes(found, tensor.dtype)), int_view(tensor))
