"""Fault case 015: the metadata lists tensors in another order than the payload carries them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.buckets import (
    FULL,
    TABLE_ENTRY_BYTES,
    Bucket,
    Heading,
    Range,
    RangeSpec,
    pack_bucket,
    seal,
    unpack,
)
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, int_view, same_bits

TENSORS = (
    torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
    torch.tensor([3.0], dtype=torch.float32),
    torch.tensor([4.0, 5.0], dtype=torch.bfloat16),
)
METAS = tuple(ParamMeta.of(name, tensor) for name, tensor in zip("abc", TENSORS, strict=True))


def packed(order: list[int]) -> Bucket:
    ranges = [
        Range(RangeSpec(n, Encoding.DENSE, 0, METAS[n].numel), None, int_view(TENSORS[n])) for n in order
    ]
    return pack_bucket(Heading(FULL, 1, 0, 1), ranges, METAS)


def received(bucket: Bucket) -> dict[str, Tensor]:
    found = unpack(bucket, METAS)
    return {METAS[one.spec.tensor].name: one.bits.view(METAS[one.spec.tensor].dtype) for one in found}


@given(order=st.permutations([0, 1, 2]))
def test_whatever_order_the_sender_packs_in_each_tensor_gets_its_own_bits(order: list[int]) -> None:
    """Fault case 015: grouped by dtype (a, c, b) or not, the table follows the bytes."""
    found = received(packed(order))
    for meta, tensor in zip(METAS, TENSORS, strict=True):
        assert same_bits(found[meta.name], tensor)


def test_a_table_in_another_order_than_the_bytes_is_refused() -> None:
    """Fault case 015: bytes a, c, b under the table a, b, c, total and checksum right."""
    bucket = packed([0, 2, 1])
    payload = bucket.payload.clone()
    table = payload[: 3 * TABLE_ENTRY_BYTES].view(3, TABLE_ENTRY_BYTES)
    table[:, :4] = table[[0, 2, 1], :4]
    with pytest.raises(
        PatchMismatch, match=r"'b' announces 4 bytes for 2 elements of torch\.float32 as dense\+raw"
    ):
        unpack(seal(bucket.header.heading, 3, payload), METAS)
