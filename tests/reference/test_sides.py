"""Attributes of both sides decide how a parameter is gathered and resharded; names play no part."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference import shards
from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.params import TPAttributes, read, same_bits
from weightsync.reference.reshard import reshard, schedule
from weightsync.reference.shards import split
from weightsync.reference.sides import Side, agree, gather, packed_sizes
from weightsync.testing.strategies import ShardedParam, dtypes, sharded_params

WHOLE = TPAttributes({"tensor_model_parallel": False})


def cut(dim: int, stride: int = 1, sizes: tuple[int, ...] | None = None, **others: object) -> TPAttributes:
    values = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride, **others}
    return TPAttributes(values if sizes is None else {**values, "partition_sizes": list(sizes)})


def side(attributes: TPAttributes, *shapes: tuple[int, ...]) -> Side:
    return Side(shapes, attributes)


@given(param=sharded_params(max_world=8))
def test_gathering_inverts_cutting(param: ShardedParam) -> None:
    full = gather("w", param.shards)
    assert same_bits(full, param.full)
    assert full.is_contiguous()
    assert dict(read(full).values) == {}


@st.composite
def fused(draw: st.DrawFn, blocks: int, equal: bool = False) -> tuple[list[Tensor], int, int]:
    """Full packed blocks, ``equal`` or of any lengths, the number of ranks and the dimension that is cut."""
    world, dim, dtype = draw(st.integers(1, 8)), draw(st.integers(0, 2)), draw(dtypes())
    lengths = [world * draw(st.integers(0, 2)) for _ in range(blocks)]
    made = []
    for number, length in enumerate(lengths):
        shape = [2, 3, 2]
        shape[dim] = lengths[0] if equal else length
        raw = (torch.arange(math.prod(shape) * dtype.itemsize) * 7 + 31 * number).to(torch.uint8)
        made.append(raw.view(dtype).reshape(shape))
    return made, world, dim


def stacked(blocks: list[Tensor], world: int, dim: int, attributes: TPAttributes) -> list[Tensor]:
    """Per rank its part of every block, one behind the other: what such a layer holds."""
    return [
        attributes.stamp(bitcat([split(block, world, rank, dim) for block in blocks], dim))
        for rank in range(world)
    ]


def bitcat(tensors: list[Tensor], dim: int) -> Tensor:
    """Concatenation of any dtype."""
    return torch.cat([one.view(torch.uint8) if one.itemsize == 1 else one for one in tensors], dim).view(
        tensors[0].dtype
    )


@given(case=fused(2, equal=True))
def test_a_gated_fc1_by_its_stride_is_all_first_halves_then_all_second_halves(
    case: tuple[list[Tensor], int, int],
) -> None:
    """The rule that frameworks apply by name, here along any dimension."""
    blocks, world, dim = case
    live = stacked(blocks, world, dim, cut(dim, 2))
    halves = [shard.chunk(2, dim) for shard in live]
    by_name = bitcat([half[0] for half in halves] + [half[1] for half in halves], dim)
    assert same_bits(gather("any.name", live), by_name)
    assert same_bits(by_name, bitcat(blocks, dim))


@given(case=fused(3))
def test_three_packed_blocks_come_out_block_by_block(case: tuple[list[Tensor], int, int]) -> None:
    """A gated delta net's conv1d: q, k and v."""
    blocks_come_out(case)


@given(case=fused(6))
def test_six_packed_blocks_come_out_block_by_block(case: tuple[list[Tensor], int, int]) -> None:
    """Its in_proj: q, k, v, z, b and a."""
    blocks_come_out(case)


def blocks_come_out(case: tuple[list[Tensor], int, int]) -> None:
    blocks, world, dim = case
    sizes = packed_sizes([block.shape[dim] for block in blocks], world)
    live = stacked(blocks, world, dim, cut(dim, sizes=sizes))
    pieces = [shard.split(list(sizes), dim) for shard in live]
    by_name = bitcat([bitcat([one[block] for one in pieces], dim) for block in range(len(blocks))], dim)
    assert same_bits(gather("w", live), by_name)
    assert same_bits(by_name, bitcat(blocks, dim))


def test_a_fc1_without_a_gate_is_not_scrambled() -> None:
    """By name it would be cut in halves all the same."""
    full = torch.arange(8)
    live = [cut(0).stamp(split(full, 2, rank, 0)) for rank in range(2)]
    assert torch.equal(gather("mlp.linear_fc1.weight", live), full)
    halves = [shard.chunk(2) for shard in live]
    assert not torch.equal(torch.cat([half[0] for half in halves] + [half[1] for half in halves]), full)


@given(
    units=st.integers(0, 2),
    worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
)
def test_both_sides_attributes_reshard_as_join_then_split(
    units: int, worlds: tuple[int, int], strides: tuple[int, int]
) -> None:
    length = units * math.lcm(worlds[0] * strides[0], worlds[1] * strides[1])
    full = torch.arange(length * 2).reshape(2, length)
    old = [cut(1, strides[0]).stamp(split(full, worlds[0], rank, 1, strides[0])) for rank in range(worlds[0])]
    new = Side.cut((2, length), cut(1, strides[1]), worlds[1])
    made = reshard(old, *agree("w", Side.of("w", old), new))
    oracle = shards.reshard(old, 1, worlds[1], stride=strides[0], new_stride=strides[1])
    assert all(torch.equal(one, other) for one, other in zip(made, oracle, strict=True))


def test_each_side_is_cut_along_its_own_dimension() -> None:
    full = torch.arange(24).reshape(4, 6)
    old = [cut(0).stamp(split(full, 2, rank, 0)) for rank in range(2)]
    made = reshard(old, *agree("w", Side.of("w", old), side(cut(1), *[(4, 2)] * 3)))
    assert all(torch.equal(shard, split(full, 3, rank, 1)) for rank, shard in enumerate(made))


@pytest.mark.parametrize("stamped", [-1, 0], ids=["missing", "wrong"])
def test_the_dimension_of_a_tensor_parallel_destination_wins(stamped: int) -> None:
    """A grouped expert fc2 (experts' hidden, ffn) that is cut by columns and stamped as cut by rows."""
    full = torch.arange(24).reshape(4, 6)
    old = [cut(stamped).stamp(split(full, 2, rank, 1)) for rank in range(2)]
    made = reshard(old, *agree("fc2", Side.of("fc2", old), side(cut(1), *[(4, 2)] * 3)))
    assert all(torch.equal(shard, split(full, 3, rank, 1)) for rank, shard in enumerate(made))


def test_replicated_on_both_sides_is_one_full_copy_each_from_a_chosen_rank() -> None:
    copies = schedule(*agree("norm", side(WHOLE, *[(4,)] * 2), side(WHOLE, *[(4,)] * 3)))
    assert [(copy.source, copy.destination, copy.put) for copy in copies] == [
        (0, 0, ((0, 4),)),
        (1, 1, ((0, 4),)),
        (0, 2, ((0, 4),)),
    ]


def test_a_duplicated_parameter_is_whole_whatever_its_flag_says() -> None:
    live = [cut(0, parallel_mode="duplicated").stamp(torch.arange(4)) for _ in range(2)]
    assert torch.equal(gather("w", live), torch.arange(4))


def test_uneven_shards_begin_where_the_real_lengths_say() -> None:
    held, _ = agree("w", side(cut(0), (1,), (4,), (0,), (2,)), side(TPAttributes({}), (7,)))
    assert [part.held[0] for part in held] == [((0, 1),), ((1, 5),), (), ((5, 7),)]


def test_a_replicated_parameter_marked_as_tensor_parallel_is_refused_with_the_likely_reason() -> None:
    with pytest.raises(
        PlanMismatch, match=r"2 source ranks \* \[8, 4\] = \[16, 4\].*probably holds all of it"
    ):
        agree("norm", side(cut(0), (8, 4), (8, 4)), side(cut(0), (4, 4), (4, 4)))
    with pytest.raises(
        PlanMismatch, match=r"= \[8, 4\] and 2 destination ranks \* \[8, 4\] = \[16, 4\].*probably"
    ):
        agree("norm", side(WHOLE, (8, 4), (8, 4)), side(cut(0), (8, 4), (8, 4)))
    with pytest.raises(PlanMismatch, match="the models differ"):
        agree("norm", side(WHOLE, (8,), (8,)), side(WHOLE, (6,)))


def test_a_dimension_that_does_not_tile_by_both_strides_is_refused() -> None:
    with pytest.raises(
        PlanMismatch, match=r"'w': 12 elements do not tile in 24 equal units.*\[\(4, 2\), \(6, 2\)\]"
    ):
        agree("w", side(cut(0, 2), *[(3,)] * 4), side(cut(0, 2), *[(2,)] * 6))
    with pytest.raises(PlanMismatch, match="parameter 'w': a dimension of 6 elements does not divide"):
        gather("w", [cut(0, 2).stamp(torch.zeros(3)) for _ in range(2)])
    with pytest.raises(PlanMismatch, match="does not divide by 4 ranks"):
        Side.cut((12,), cut(0, 2), 4)


def test_a_packed_block_of_another_size_is_refused() -> None:
    source, destination = side(cut(0, sizes=(1, 3)), (4,), (4,)), side(cut(0, sizes=(3, 5)), (8,))
    with pytest.raises(
        PlanMismatch, match=r"blocks of \[2, 6\] elements on 2 source ranks and of \[3, 5\] on 1"
    ):
        agree("in_proj", source, destination)
    agree("in_proj", source, side(cut(0, sizes=(2, 6)), (8,)))
    with pytest.raises(PlanMismatch, match=r"\[2, 3\] elements do not divide by 2 ranks"):
        packed_sizes((2, 3), 2)
    with pytest.raises(PlanMismatch, match="parameter 'w': partition_sizes"):
        gather("w", [cut(0, sizes=(1, 1)).stamp(torch.zeros(3)) for _ in range(2)])


def test_attributes_that_are_lost_or_differ_are_refused() -> None:
    bare, marked = torch.zeros(2), cut(0).stamp(torch.zeros(2))
    with pytest.raises(
        MissingTPAttributes, match=r"'w' of local shape \[2\] carries no tensor_model_parallel"
    ):
        gather("w", [bare, bare])
    with pytest.raises(
        PlanMismatch, match="ranks 0 and 1: tensor_model_parallel is True on the first and absent"
    ):
        gather("w", [marked, bare])
    with pytest.raises(MissingTPAttributes, match=r"'w' .* partition_dim -1"):
        gather("w", [cut(-1).stamp(torch.zeros(2)) for _ in range(2)])
    with pytest.raises(MissingTPAttributes, match=r"'w' .* partition_dim 1"):
        agree("w", side(cut(0), (2,), (2,)), side(cut(1), (2,), (2,)))
    with pytest.raises(PlanMismatch, match="'w' has no shards"):
        gather("w", [])
    assert torch.equal(gather("w", [torch.arange(2)]), torch.arange(2))


def test_shards_that_are_not_what_the_attributes_give_are_refused() -> None:
    with pytest.raises(
        PlanMismatch, match=r"'w' has shape \[5\] on rank 0 of 2, expected \[4\] as part of \[8\]"
    ):
        gather("w", [cut(0, 2).stamp(torch.zeros(length)) for length in (5, 3)])
    with pytest.raises(PlanMismatch, match=r"'w' has shape \[3\] on rank 1 of 2, expected \[2\]"):
        gather("w", [WHOLE.stamp(torch.zeros(length)) for length in (2, 3)])
    with pytest.raises(PlanMismatch, match="cut by heads"):
        gather("w", [cut(0, num_query_groups=3).stamp(torch.zeros(2)) for _ in range(2)])
