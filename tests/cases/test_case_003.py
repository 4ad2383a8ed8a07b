"""Fault case 003: gate and up of grouped experts re-chunked along the expert dimension."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.layouts import concat, export, row_map
from weightsync.reference.params import ParamMeta, TPAttributes, same_bits
from weightsync.reference.reshard import reshard
from weightsync.reference.shards import split
from weightsync.reference.sides import Side, agree, gather


def attributes(dim: int, stride: int = 1) -> TPAttributes:
    return TPAttributes({"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride})


def test_grouped_shards_join_along_the_dimension_that_their_attributes_name() -> None:
    """Fault case 003: the fault re-chunks dimension 0 and ends with shape (1, 4, 12)."""
    shards = [attributes(2).stamp(torch.arange(24).reshape(2, 4, 3) + 100 * rank) for rank in range(2)]
    full = gather("decoder.experts.linear_fc1.weight", shards)
    assert full.shape == (2, 4, 6)
    assert full[0, 0].tolist() == [0, 1, 2, 100, 101, 102]


def test_gate_and_up_of_grouped_experts_join_along_ffn() -> None:
    """Fault case 003: three experts, cut by ffn as [gate half, up half]."""
    gate, up = torch.arange(24).reshape(3, 4, 2), torch.arange(24).reshape(3, 4, 2) + 100
    shards = [
        attributes(1, 2).stamp(torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1))
        for rank in range(2)
    ]
    assert torch.equal(gather("experts.linear_fc1.weight", shards), torch.cat([gate, up], 1))
    metas = (ParamMeta("gate", gate.dtype, gate.shape), ParamMeta("up", up.dtype, up.shape))
    layout, numbers = concat(*metas, dim=1), {"gate": 0, "up": 1}
    maps = [{"w": row_map(layout, "w", attributes(1, 2), rank, 2, numbers)} for rank in range(2)]
    told = export(maps, [{"w": shard} for shard in shards], metas)
    assert same_bits(told["gate"], gate)
    assert same_bits(told["up"], up)


@given(
    shape=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    data=st.data(),
    worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)),
)
def test_a_gated_tensor_of_any_rank_goes_to_any_ranks_along_any_dimension(
    shape: list[int], data: st.DataObject, worlds: tuple[int, int]
) -> None:
    """Fault case 003: 1-D biases, 2-D weights, 3-D and 4-D groups; the name never says the dimension."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= worlds[0] * worlds[1]
    gate = torch.arange(torch.Size(shape).numel()).reshape(shape)
    whole = torch.cat([gate, -1 - gate], dim)
    shards = [attributes(dim, 2).stamp(split(whole, worlds[0], rank, dim, 2)) for rank in range(worlds[0])]
    assert same_bits(gather("w", shards), whole)
    wanted = Side.cut(whole.shape, attributes(dim, 2), worlds[1])
    for rank, made in enumerate(reshard(shards, *agree("w", Side.of("w", shards), wanted))):
        expected = [half.tensor_split(worlds[1], dim)[rank] for half in (gate, -1 - gate)]
        assert same_bits(made, torch.cat(expected, dim))


@pytest.mark.parametrize("wrong", [attributes(0, 2), attributes(1, 1)], ids=["dimension", "stride"])
def test_the_wrong_dimension_or_stride_gives_another_tensor(wrong: TPAttributes) -> None:
    """Fault case 003: so the tests above would see it."""
    whole = torch.arange(4 * 8 * 2).reshape(4, 8, 2)
    shards = [wrong.stamp(split(whole, 2, rank, 1, 2)) for rank in range(2)]
    assert not torch.equal(gather("w", shards).reshape(-1), whole.reshape(-1))
