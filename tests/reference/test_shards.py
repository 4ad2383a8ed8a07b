"""Cutting and joining are inverse to the bit, for every world, dimension, stride and block size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.shards import join, reshard, segments, split
from weightsync.testing.strategies import ShardedParam, TPLayout, sharded_params, tp_layouts


@given(param=sharded_params())
def test_join_of_split_is_the_tensor_itself(param: ShardedParam) -> None:
    layout = param.layout
    assert same_bits(join(param.shards, layout.dim, layout.stride, layout.sizes), param.full)
    negative = layout.dim - len(layout.shape)
    assert same_bits(join(param.shards, negative, layout.stride, layout.sizes), param.full)


@given(param=sharded_params())
def test_shards_are_new_contiguous_storage(param: ShardedParam) -> None:
    before = [shard.clone() for shard in param.shards]
    int_view(param.full).fill_(0)
    for shard, old in zip(param.shards, before, strict=True):
        assert shard.is_contiguous()
        assert same_bits(shard, old)


@given(layout=tp_layouts())
def test_segments_of_all_ranks_cover_the_dimension_once(layout: TPLayout) -> None:
    length = layout.shape[layout.dim]
    seen = [0] * length
    for rank in range(layout.world):
        for start, end in segments(length, layout.world, rank, stride=layout.stride, sizes=layout.sizes):
            assert 0 <= start <= end <= length
            for position in range(start, end):
                seen[position] += 1
    assert seen == [1] * length


@given(length=st.integers(0, 40), world=st.integers(1, 8))
def test_uneven_cuts_are_those_of_torch_chunk(length: int, world: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(length).chunk(world)]
    chunks += [[]] * (world - len(chunks))
    mine = [list(range(*segments(length, world, rank)[0])) for rank in range(world)]
    assert mine == (chunks if length else [[]] * world)


@given(length=st.integers(1, 5), world=st.integers(2, 4), stride=st.integers(2, 3))
def test_joining_strided_shards_in_rank_order_is_wrong(length: int, world: int, stride: int) -> None:
    full = torch.arange(world * stride * length)
    shards = [split(full, world, rank, 0, stride) for rank in range(world)]
    assert torch.equal(join(shards, 0, stride), full)
    assert not torch.equal(torch.cat(shards), full)
    assert torch.cat(shards).shape == full.shape


def test_stride_two_over_two_ranks_takes_every_other_segment() -> None:
    assert segments(8, 2, 0, stride=2) == ((0, 2), (4, 6))
    assert segments(8, 2, 1, stride=2) == ((2, 4), (6, 8))


def test_a_gate_and_up_shard_is_stride_two() -> None:
    gate, up = torch.arange(6.0).reshape(6, 1), torch.arange(6.0).reshape(6, 1) + 100
    for rank in range(3):
        shard = split(torch.cat([gate, up]), 3, rank, 0, stride=2)
        assert torch.equal(shard, torch.cat([gate.chunk(3)[rank], up.chunk(3)[rank]]))


def test_packed_blocks_are_each_cut_on_their_own() -> None:
    assert segments(12, 2, 1, sizes=(1, 2, 3)) == ((1, 2), (4, 6), (9, 12))


def test_grouped_experts_join_along_their_last_dimension() -> None:
    """A shape of the same kind as fault case 003: the axis comes from the attributes, not from the rank."""
    shards = [torch.arange(24).reshape(2, 4, 3), torch.arange(24).reshape(2, 4, 3) + 100]
    joined = join(shards, 2)
    assert joined.shape == (2, 4, 6)
    assert joined[0, 0].tolist() == [0, 1, 2, 100, 101, 102]


def test_grouped_gate_and_up_join_along_the_ffn_dimension() -> None:
    gate, up = torch.arange(24).reshape(3, 4, 2), torch.arange(24).reshape(3, 4, 2) + 100
    shards = [torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1) for rank in range(2)]
    assert torch.equal(join(shards, 1, stride=2), torch.cat([gate, up], 1))


@given(
    units=st.integers(0, 3),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 2)),
)
def test_resharding_there_and_back_changes_nothing(
    units: int, worlds: tuple[int, int], strides: tuple[int, int]
) -> None:
    full = torch.arange(48 * units * 2).reshape(-1, 2)
    old = [split(full, worlds[0], rank, 0, strides[0]) for rank in range(worlds[0])]
    new = reshard(old, 0, worlds[1], stride=strides[0], new_stride=strides[1])
    back = reshard(new, 0, worlds[0], stride=strides[1], new_stride=strides[0])
    assert all(torch.equal(one, other) for one, other in zip(old, back, strict=True))


@given(length=st.integers(1, 30), world=st.integers(1, 4), stride=st.integers(2, 3))
def test_a_strided_cut_that_does_not_divide_is_refused(length: int, world: int, stride: int) -> None:
    assume(length % (world * stride))
    with pytest.raises(PlanMismatch, match=f"{length} elements does not divide"):
        segments(length, world, 0, stride=stride)


def test_block_sizes_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"\[1, 2\] over 2 ranks describe 6 elements, expected 7"):
        segments(7, 2, 0, sizes=(1, 2))
    with pytest.raises(PlanMismatch, match="partition_sizes"):
        segments(2, 2, 0, sizes=(2, -1))


@pytest.mark.parametrize(("world", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_outside_of_its_world_is_refused(world: int, rank: int) -> None:
    with pytest.raises(PlanMismatch, match=f"rank {rank}"):
        segments(4, world, rank)


def test_a_stride_below_one_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="partition_stride 0"):
        segments(4, 2, 0, stride=0)


def test_joining_nothing_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="no shards"):
        join([], 0)


def test_joining_shards_out_of_order_or_of_another_shape_or_dtype_is_refused() -> None:
    three, one = torch.zeros(3, 2), torch.zeros(1, 2)
    assert join([three, three, one], 0).shape == (7, 2)
    with pytest.raises(PlanMismatch, match=r"rank 0 is .*\[1, 2\], expected .*\[3, 2\]"):
        join([one, three, three], 0)
    with pytest.raises(PlanMismatch, match=r"rank 1 .*\[3, 3\]"):
        join([three, torch.zeros(3, 3)], 0)
    with pytest.raises(PlanMismatch, match=r"rank 1 is torch.float64"):
        join([three, three.double()], 0)
