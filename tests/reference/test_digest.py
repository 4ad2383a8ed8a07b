"""The digest: one formula in three spellings, additive, and sensitive to where each bit stands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.digest import (
    OwnedDigest,
    combine,
    digest_rows,
    digest_sum,
    element_hash,
    element_hash_numpy,
    key,
    state_digest,
    tensor_digest,
    wrap,
)
from weightsync.reference.layouts import plain, row_map
from weightsync.reference.params import ParamMeta, int_view
from weightsync.testing.strategies import (
    ShardedParam,
    Update,
    dtypes,
    sharded_params,
    tensors,
    updates,
)

U64 = 1 << 64
INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def by_hand(tensor_key: int, position: int, bits: int) -> int:
    """The formula of docs/wire.md in Python integers."""
    z = (tensor_key + position * 0x9E3779B97F4A7C15 + bits * 0xD6E8FEB86659FD93) % U64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % U64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % U64
    z ^= z >> 31
    return z - U64 if z >= 1 << 63 else z


def flat_positions(tensor: Tensor) -> Tensor:
    return torch.arange(tensor.numel())


@st.composite
def elements(draw: st.DrawFn) -> tuple[int, list[int], list[int], torch.dtype]:
    """A key, positions, zero-extended bits, and the integer dtype that holds them."""
    dtype = draw(st.sampled_from(INTEGERS))
    count = draw(st.integers(0, 5))
    tensor_key = draw(st.integers(-(1 << 63), (1 << 63) - 1))
    positions = draw(st.lists(st.integers(0, 1 << 40), min_size=count, max_size=count))
    bits = draw(st.lists(st.integers(0, (1 << 8 * dtype.itemsize) - 1), min_size=count, max_size=count))
    return tensor_key, positions, bits, dtype


@given(drawn=elements())
def test_torch_numpy_and_plain_integers_agree(drawn: tuple[int, list[int], list[int], torch.dtype]) -> None:
    tensor_key, positions, raw, dtype = drawn
    width = 8 * dtype.itemsize
    signed = [one - (1 << width) if dtype.is_signed and one >> (width - 1) else one for one in raw]
    at, bits = torch.tensor(positions, dtype=torch.int64), torch.tensor(signed, dtype=dtype)
    expected = [by_hand(tensor_key, position, one) for position, one in zip(positions, raw, strict=True)]

    assert element_hash(tensor_key, at, bits).tolist() == expected
    in_numpy = element_hash_numpy(tensor_key, at.numpy(), bits.numpy())
    assert in_numpy.view(np.int64).tolist() == expected
    assert digest_sum(tensor_key, at, bits) == wrap(sum(expected))


@given(tensor=tensors(strided=True))
def test_digest_of_a_tensor_ignores_strides_and_is_the_sum_over_elements(tensor: Tensor) -> None:
    meta = ParamMeta.of("w", tensor)
    expected = int(element_hash(key(meta), flat_positions(tensor), int_view(tensor)).sum())
    assert tensor_digest(meta, tensor) == wrap(expected)
    assert tensor_digest(meta, tensor.contiguous()) == wrap(expected)


@given(update=updates())
def test_digest_is_updated_by_the_changed_elements_alone(update: Update) -> None:
    meta = ParamMeta.of("w", update.old)
    at = torch.tensor(update.positions, dtype=torch.int64)
    before = digest_sum(key(meta), at, int_view(update.old)[at])
    after = digest_sum(key(meta), at, int_view(update.new)[at])
    assert combine([tensor_digest(meta, update.old), -before, after]) == tensor_digest(meta, update.new)
    if update.positions:
        assert tensor_digest(meta, update.old) != tensor_digest(meta, update.new)


@given(param=sharded_params())
def test_shares_of_ranks_add_up_to_the_dense_digest(param: ShardedParam) -> None:
    meta, layout = ParamMeta.of("x", param.full), param.layout
    shares = []
    for rank, shard in enumerate(param.shards):
        one = row_map(plain(meta), "w", layout.attributes, rank, layout.world, {"x": 0})
        shares.append(OwnedDigest(one, [meta]).of(shard))
    assert combine(shares) == tensor_digest(meta, param.full) == state_digest([(meta, param.full)])


@given(dtype=dtypes(), data=st.data())
def test_two_different_values_that_change_places_are_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = data.draw(tensors(dtype=dtype, shape=(6,)))
    bits = int_view(tensor)
    i, j = data.draw(st.permutations(range(6)))[:2]
    swapped = tensor.clone()
    int_view(swapped)[[i, j]] = bits[[j, i]]
    meta = ParamMeta.of("w", tensor)
    same = int(bits[i]) == int(bits[j])
    assert (tensor_digest(meta, tensor) == tensor_digest(meta, swapped)) == same


def test_sign_of_zero_and_nan_payloads_count() -> None:
    meta = ParamMeta("w", torch.bfloat16, (1,))
    patterns = torch.tensor([0x0000, -0x8000, 0x7FC0, 0x7FC1], dtype=torch.int16)
    digests = [tensor_digest(meta, one.reshape(1).view(torch.bfloat16)) for one in patterns]
    assert len(set(digests)) == 4


def test_two_equal_flips_do_not_cancel() -> None:
    meta = ParamMeta("w", torch.int32, (4,))
    assert tensor_digest(meta, torch.zeros(4, dtype=torch.int32)) != tensor_digest(
        meta, torch.tensor([0, 5, 5, 0], dtype=torch.int32)
    )


@pytest.mark.parametrize(
    "other",
    [
        ParamMeta("v", torch.bfloat16, (2, 3)),
        ParamMeta("w", torch.float16, (2, 3)),
        ParamMeta("w", torch.bfloat16, (3, 2)),
        ParamMeta("w", torch.bfloat16, (23,)),
        ParamMeta("w", torch.bfloat16, ()),
    ],
    ids=str,
)
def test_key_tells_name_dtype_and_shape_apart(other: ParamMeta) -> None:
    assert key(other) != key(ParamMeta("w", torch.bfloat16, (2, 3)))


@pytest.mark.parametrize("shape", [(3, 40_000), (40_000, 3), (70_001,), (1, 32_768)], ids=str)
def test_blocks_meet_without_gap_or_overlap(shape: tuple[int, ...]) -> None:
    meta = ParamMeta("w", torch.int16, shape)
    tensor = torch.arange(meta.numel).to(torch.int16).reshape(shape)
    expected = wrap(int(element_hash(key(meta), flat_positions(tensor), int_view(tensor)).sum()))
    assert tensor_digest(meta, tensor) == expected
    rows = tensor.reshape(-1, shape[-1])
    bases = torch.arange(rows.shape[0]) * shape[-1]
    assert digest_rows(key(meta), rows, bases) == expected
    backwards = torch.arange(rows.shape[0]).flip(0)
    assert digest_rows(key(meta), rows, bases.flip(0), backwards) == expected


def test_nothing_has_digest_zero() -> None:
    empty = torch.empty(0, 3, dtype=torch.bfloat16)
    assert tensor_digest(ParamMeta.of("w", empty), empty) == 0
    assert state_digest([]) == combine([]) == 0


@given(shares=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=6))
def test_combining_wraps_as_int64_addition_does(shares: list[int]) -> None:
    assert combine(shares) == int(torch.tensor(shares, dtype=torch.int64).sum())
