"""Row maps: every checkpoint element is told by exactly one rank, and both directions agree."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.layouts import (
    Layout,
    RowMap,
    concat,
    cut,
    export,
    gate_up,
    local_tensor,
    plain,
    qkv,
    row_map,
    vocab,
)
from weightsync.reference.params import ParamMeta, TPAttributes, int_view, same_bits
from weightsync.reference.rowtables import by_output
from weightsync.reference.shards import join, split
from weightsync.testing.strategies import DTYPES, ShardedParam, TPLayout, sharded_params, tp_layouts

COLUMN = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
ROW = TPAttributes({"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1})
GLU = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2})
WHOLE = TPAttributes({"tensor_model_parallel": False})


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParamMeta:
    return ParamMeta(name, dtype, shape)


def maps_of(layout: Layout, attributes: TPAttributes, world: int) -> list[RowMap]:
    numbers = {one.name: number for number, one in enumerate(layout.metas)}
    return [row_map(layout, "w", attributes, rank, world, numbers) for rank in range(world)]


def numbered(metas: tuple[ParamMeta, ...]) -> list[Tensor]:
    """Checkpoint tensors whose elements are all different over all tensors."""
    return [
        torch.arange(one.numel, dtype=torch.float32).reshape(one.shape) + 1000 * number
        for number, one in enumerate(metas)
    ]


def exported(maps: list[RowMap], local: list[Tensor], metas: tuple[ParamMeta, ...]) -> list[Tensor]:
    full = export([{"w": one} for one in maps], [{"w": tensor} for tensor in local], metas)
    return [full[one.name] for one in metas]


@given(param=sharded_params())
def test_a_plain_cut_is_told_completely_and_lands_where_split_put_it(param: ShardedParam) -> None:
    only = ParamMeta.of("x", param.full)
    maps = maps_of(plain(only), param.layout.attributes, param.layout.world)
    for one, shard in zip(maps, param.shards, strict=True):
        assert one.local_shape == tuple(shard.shape)
        assert same_bits(local_tensor(one, [param.full]), shard)
    (full,) = exported(maps, list(param.shards), (only,))
    assert same_bits(full, param.full)


@given(layout=tp_layouts(), rank=st.integers(0, 3))
def test_to_local_inverts_to_checkpoint_and_drops_the_rest(layout: TPLayout, rank: int) -> None:
    only = meta("x", *layout.shape)
    one = maps_of(plain(only), layout.attributes, layout.world)[rank % layout.world]
    positions = torch.arange(int(torch.tensor(one.local_shape).prod()))
    output, flat = one.to_checkpoint(positions)
    assert output.dtype == torch.int32
    assert flat.dtype == torch.int64
    assert output.eq(0).all()
    held, local = one.to_local(0, flat)
    assert held.all()
    assert torch.equal(local, positions)
    everything = torch.arange(only.numel).flip(0)
    held, local = one.to_local(0, everything)
    assert int(held.sum()) == len(positions) == one.elements(0) == one.owned_elements(0)
    assert torch.equal(one.to_checkpoint(local)[1], everything[held])


@given(param=sharded_params(dtype=torch.float32))
def test_local_rows_move_whole_rows_as_the_formula_says(param: ShardedParam) -> None:
    only = ParamMeta.of("x", param.full)
    for one, shard in zip(
        maps_of(plain(only), param.layout.attributes, param.layout.world), param.shards, strict=True
    ):
        local_rows, rows = one.local_rows(0, owned_only=True)
        assert torch.equal(rows, rows.sort().values)
        if one.width:
            mine = int_view(shard).reshape(-1, one.width)[local_rows]
            full = int_view(param.full).reshape(-1, one.full_widths[0])
            assert torch.equal(mine, full[rows, one.column : one.column + one.width])


@given(
    heads_per_group=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_dim=st.integers(1, 3),
    world=st.integers(1, 4),
    hidden=st.integers(0, 3),
)
def test_fused_attention_is_per_group_and_cut_by_raw_rows(
    heads_per_group: int, groups: int, head_dim: int, world: int, hidden: int
) -> None:
    heads = heads_per_group * groups
    inputs = (hidden,) if hidden else ()  # no hidden size stands for the 1-D bias
    metas = (
        meta("q", heads * head_dim, *inputs),
        meta("k", groups * head_dim, *inputs),
        meta("v", groups * head_dim, *inputs),
    )
    q, k, v = numbered(metas)
    fused = []
    for group in range(groups):
        first = group * heads_per_group * head_dim
        fused.append(q[first : first + heads_per_group * head_dim])
        fused.append(k[group * head_dim : (group + 1) * head_dim])
        fused.append(v[group * head_dim : (group + 1) * head_dim])
    whole = torch.cat(fused)
    layout = qkv(*metas, heads=heads, groups=groups, head_dim=head_dim)
    maps = maps_of(layout, COLUMN, world)
    local = [split(whole, world, rank, 0) for rank in range(world)]
    for one, shard in zip(maps, local, strict=True):
        assert torch.equal(local_tensor(one, [q, k, v]), shard)
    for back, original in zip(exported(maps, local, metas), (q, k, v), strict=True):
        assert torch.equal(back, original)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shape", [(6,), (6, 2), (6, 2, 2)])
def test_gate_and_up_are_told_apart_in_any_number_of_dimensions(world: int, shape: tuple[int, ...]) -> None:
    metas = (meta("gate", *shape), meta("up", *shape))
    gate, up = numbered(metas)
    local = [torch.cat([gate.chunk(world)[rank], up.chunk(world)[rank]]) for rank in range(world)]
    maps = maps_of(gate_up(*metas), GLU, world)
    for back, original in zip(exported(maps, local, metas), (gate, up), strict=True):
        assert torch.equal(back, original)


def test_forgetting_the_stride_is_told_apart_by_the_export() -> None:
    metas = (meta("gate", 4, 1), meta("up", 4, 1))
    whole = torch.cat(numbered(metas))
    local = [split(whole, 2, rank, 0, stride=2) for rank in range(2)]
    gate, _ = exported(maps_of(gate_up(*metas), COLUMN, 2), local, metas)
    assert not torch.equal(gate, whole[:4])


@given(real=st.integers(0, 9), padding=st.integers(0, 9), world=st.integers(1, 4), hidden=st.integers(1, 3))
def test_padded_rows_never_travel_and_are_zero_when_built(
    real: int, padding: int, world: int, hidden: int
) -> None:
    only = meta("embed", real, hidden)
    (full,) = numbered((only,))
    padded = torch.cat([full, torch.full((padding, hidden), -7.0)])
    maps = maps_of(vocab(only, real + padding), COLUMN, world)
    local = [split(padded, world, rank, 0) for rank in range(world)]
    assert torch.equal(exported(maps, local, (only,))[0], full)
    assert sum(one.owned_elements(0) for one in maps) == only.numel
    rebuilt = join([local_tensor(one, [full]) for one in maps], 0)
    assert torch.equal(rebuilt, torch.cat([full, torch.zeros(padding, hidden)]))
    for one, shard in zip(maps, local, strict=True):
        assert torch.equal(one.owned, one.tensor >= 0)
        output, flat = one.to_checkpoint(torch.arange(shard.numel()))
        assert torch.equal(output < 0, int_view(shard) == int_view(torch.tensor(-7.0)))
        assert flat[output >= 0].lt(only.numel).all()
        assert flat[output < 0].eq(0).all()


def test_a_replicated_parameter_is_told_by_rank_0_and_found_on_every_rank() -> None:
    only = meta("norm", 5)
    maps = maps_of(plain(only), WHOLE, 3)
    positions = torch.tensor([4, 0])
    assert [one.to_checkpoint(positions)[0].tolist() for one in maps] == [[0, 0], [-1, -1], [-1, -1]]
    assert [one.to_local(0, positions)[1].tolist() for one in maps] == [[4, 0]] * 3
    assert [one.owned_elements(0) for one in maps] == [5, 0, 0]
    assert [one.elements(0) for one in maps] == [5, 5, 5]


def test_a_scalar_has_one_row_of_one_element() -> None:
    only = meta("scale")
    (one,) = maps_of(plain(only), WHOLE, 1)
    assert one.to_checkpoint(torch.tensor([0]))[1].tolist() == [0]
    assert torch.equal(local_tensor(one, [torch.tensor(3.0)]), torch.tensor(3.0))


def test_replicas_of_a_head_are_held_by_both_and_told_by_one() -> None:
    layout = plain(meta("k", 2, 1))
    maps = [
        cut(layout, "k", {"k": 0}, dim=0, held=[((rank // 2, rank // 2 + 1), rank % 2 == 0)])
        for rank in range(4)
    ]
    assert [one.to_local(0, torch.tensor([0, 1]))[0].tolist() for one in maps] == [
        [True, False],
        [True, False],
        [False, True],
        [False, True],
    ]
    assert [one.owned_elements(0) for one in maps] == [1, 0, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_computed_on_values(dtype: torch.dtype) -> None:
    only = meta("x", 4, 4, dtype=dtype)
    full = (
        torch.arange(256, dtype=torch.int64).to(torch.uint8)[-16 * dtype.itemsize :].view(dtype).reshape(4, 4)
    )
    maps = maps_of(plain(only), ROW, 2)
    local = [local_tensor(one, [full]) for one in maps]
    assert same_bits(exported(maps, local, (only,))[0], full)


def test_positions_beyond_two_to_the_31_need_only_a_table_of_rows() -> None:
    only = meta("huge", 2**10, 2**22)
    one = maps_of(plain(only), ROW, 2)[1]
    assert one.to_checkpoint(torch.tensor([2**31 - 1]))[1].tolist() == [2**32 - 1]
    held, local = one.to_local(0, torch.tensor([0, 2**32 - 1]))
    assert (held.tolist(), local.tolist()) == ([False, True], [2**31 - 1])


def test_an_output_that_a_rank_holds_nothing_of_answers_with_nothing() -> None:
    first = maps_of(concat(meta("a", 2), meta("b", 2)), COLUMN, 2)[0]
    held, local = first.to_local(1, torch.tensor([0, 1]))
    assert (held.tolist(), local.tolist()) == ([False, False], [])
    assert (first.elements(1), first.owned_elements(1)) == (0, 0)


def test_one_key_head_over_two_ranks_is_cut_by_raw_rows() -> None:
    metas = (meta("q", 4, 1), meta("k", 1, 1), meta("v", 1, 1))
    maps = maps_of(qkv(*metas, heads=4, groups=1, head_dim=1), COLUMN, 2)
    local = [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0], [20.0], [30.0]])]
    assert [[one.owned_elements(output) for output in range(3)] for one in maps] == [[3, 0, 0], [1, 1, 1]]
    q, k, v = exported(maps, local, metas)
    assert (q.flatten().tolist(), k.tolist(), v.tolist()) == ([0, 1, 2, 3], [[20]], [[30]])


@pytest.mark.parametrize(
    ("length", "world", "offsets"), [(7, 3, [0, 3, 6]), (2, 4, [0, 1, None, None]), (4, 2, [0, 2])]
)
def test_uneven_ranks_tell_positions_from_their_real_offsets(
    length: int, world: int, offsets: list[int | None]
) -> None:
    maps = maps_of(plain(meta("x", length)), COLUMN, world)
    told = [one.to_checkpoint(torch.arange(one.local_shape[0]))[1].tolist() for one in maps]
    assert [flat[0] if flat else None for flat in told] == offsets
    assert [position for flat in told for position in flat] == list(range(length))


@given(output=st.lists(st.integers(-1, 11), max_size=30), outputs=st.integers(12, 14))
def test_few_outputs_and_many_are_told_apart_alike(output: list[int], outputs: int) -> None:
    found = torch.tensor(output, dtype=torch.int32)
    by_hand = {index: [place for place, one in enumerate(output) if one == index] for index in range(outputs)}
    expected = {index: places for index, places in by_hand.items() if places}
    assert {index: chosen.tolist() for index, chosen in by_output(found, outputs)} == expected
    few = torch.where(found < 3, found, -1)
    expected = {index: places for index, places in expected.items() if index < 3}
    assert {index: chosen.tolist() for index, chosen in by_output(few, 3)} == expected
