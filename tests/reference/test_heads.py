"""Heads that no TP size divides: who holds them, who speaks for replicas, and what live parameters must say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference import layouts
from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.heads import HeadCut, head_share, query_to_kv
from weightsync.reference.layouts import RowMap, concat, local_tensor, plain, qkv, row_map, row_maps
from weightsync.reference.megatron import trainer_attributes, trainer_layouts, trainer_maps
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, TPAttributes, carry, fresh_copy
from weightsync.reference.placement import rollout_maps
from weightsync.reference.plan import TransferPlan

SMOL = ModelShape(
    vocab=8, hidden=3, intermediate=6, layers=1, heads=9, kv_heads=3, head_dim=2, dtype=torch.float32
)
ATTENTION = "decoder.layers.0.self_attention"
QKV, PROJ = f"{ATTENTION}.linear_qkv.weight", f"{ATTENTION}.linear_proj.weight"
START = "model.layers.0.self_attn"


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """Query heads, key/value heads and ranks, in any relation but more ranks than query heads."""
    kv_heads = draw(st.integers(1, 5))
    heads = kv_heads * draw(st.integers(1, 5))
    return heads, kv_heads, draw(st.integers(1, heads))


@st.composite
def even_cuts(draw: st.DrawFn) -> tuple[int, int, int]:
    """The cuts in which ranks divide the query heads, and one of ranks and key/value heads the other."""
    heads, kv_heads, _ = draw(cuts())
    worlds = [world for world in range(1, heads + 1) if heads % world == 0]
    fitting = [world for world in worlds if kv_heads % world == 0 or world % kv_heads == 0]
    return heads, kv_heads, draw(st.sampled_from(fitting))


def sized(cut: tuple[int, int, int], head_dim: int) -> ModelShape:
    heads, kv_heads, world = cut
    return replace(SMOL, heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=world, qkv_bias=True)


def attention(model: ModelShape, kind: str = "weight") -> tuple[ParamMeta, ParamMeta, ParamMeta]:
    """The q, k and v of the first layer."""
    rows = (model.heads, model.kv_heads, model.kv_heads)
    inputs = (model.hidden,) if kind == "weight" else ()
    q, k, v = (
        ParamMeta(f"{START}.{which}_proj.{kind}", model.dtype, (count * model.head_dim, *inputs))
        for which, count in zip("qkv", rows, strict=True)
    )
    return q, k, v


def attention_out(model: ModelShape) -> ParamMeta:
    return ParamMeta(f"{START}.o_proj.weight", model.dtype, (model.hidden, model.heads * model.head_dim))


def same_map(left: RowMap, right: RowMap) -> bool:
    tables = ((left.tensor, right.tensor), (left.row, right.row), (left.owned, right.owned))
    plainly = [
        (one.local_shape, one.outputs, one.width, one.full_widths, one.column) for one in (left, right)
    ]
    return plainly[0] == plainly[1] and all(torch.equal(a, b) for a, b in tables)


@given(cut=cuts())
def test_query_heads_are_a_run_per_rank_as_even_as_possible(cut: tuple[int, int, int]) -> None:
    heads, kv_heads, world = cut
    shares = [head_share(heads, kv_heads, rank, world) for rank in range(world)]
    assert [head for share in shares for head in range(*share.q)] == list(range(heads))
    sizes = [end - first for first, end in (share.q for share in shares)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(cut=cuts())
def test_a_rank_holds_what_its_query_heads_attend_to_and_the_first_holder_speaks(
    cut: tuple[int, int, int],
) -> None:
    heads, kv_heads, world = cut
    spoken: list[int] = []
    for rank in range(world):
        share = head_share(heads, kv_heads, rank, world)
        attended = [head * kv_heads // heads for head in range(*share.q)]
        assert sorted(set(attended)) == list(range(*share.kv))
        assert [share.kv[0] + local for local in query_to_kv(share)] == attended
        new = [head for head in range(*share.kv) if head not in spoken]
        assert [head for head, speaks in zip(range(*share.kv), share.speaks, strict=True) if speaks] == new
        spoken += new
    assert spoken == list(range(kv_heads))


@given(cut=even_cuts(), head_dim=st.integers(1, 3), fused=st.booleans())
def test_where_one_count_divides_the_other_rollouts_are_cut_as_by_equal_parts(
    cut: tuple[int, int, int], head_dim: int, fused: bool
) -> None:
    """The rule for heads that divide, written here a second time: equal parts, or neighbours with one head."""
    heads, kv_heads, world = cut
    model = sized(cut, head_dim)
    for rank in range(world):
        maps = rollout_maps(model, rank, world, fused)
        each, replicas = max(kv_heads // world, 1), max(world // kv_heads, 1)
        first = rank // replicas * each * head_dim
        rows, part = heads * head_dim, heads // world * head_dim
        kv = ((first, first + each * head_dim), rank % replicas == 0)
        held = [((rank * part, (rank + 1) * part), True), kv, kv]
        for kind in ("weight", "bias"):
            metas = attention(model, kind)
            if not fused:
                for meta, one in zip(metas, held, strict=True):
                    expected = cut_rows(plain(meta), meta.name, model, [one])
                    assert same_map(maps[meta.name], expected)
                continue
            starts = (0, rows, rows + kv_heads * head_dim)
            shifted = [((a + by, b + by), speaks) for by, ((a, b), speaks) in zip(starts, held, strict=True)]
            name = f"{START}.qkv_proj.{kind}"
            assert same_map(maps[name], cut_rows(concat(*metas), name, model, shifted))
        out = attention_out(model)
        row = TPAttributes({"tensor_model_parallel": True, "partition_dim": 1})
        expected = row_map(plain(out), out.name, row, rank, world, model.numbers())
        assert same_map(maps[out.name], expected)


def cut_rows(layout: object, name: str, model: ModelShape, held: object) -> RowMap:
    return layouts.cut(layout, name, model.numbers(), dim=0, held=held)  # type: ignore[arg-type]


@given(cut=even_cuts(), head_dim=st.integers(1, 3))
def test_where_megatron_divides_the_trainer_is_cut_by_megatrons_attributes_alone(
    cut: tuple[int, int, int], head_dim: int
) -> None:
    heads, kv_heads, world = cut
    model = sized(cut, head_dim)
    assume((heads + 2 * kv_heads) * head_dim % world == 0)  # else Megatron has no cut either
    split = [heads // kv_heads * head_dim, head_dim, head_dim]
    common = {"tensor_model_parallel": True, "partition_stride": 1, "allreduce": True}
    column = common | {"partition_dim": 0, "parallel_mode": "column", "is_qkv": True}
    expected = {QKV: column | {"qkv_split_shapes": split}}
    expected |= {PROJ: common | {"partition_dim": 1, "parallel_mode": "row"}}
    found = trainer_attributes(model, world)
    for name, values in expected.items():
        assert dict(found[name].values) == values
    q, k, v = attention(model)
    fused = qkv(q, k, v, heads=heads, groups=kv_heads, head_dim=head_dim)
    for rank in range(world):
        maps = trainer_maps(model, rank, world)
        for name, layout in ((QKV, fused), (PROJ, plain(attention_out(model)))):
            by_parts = row_map(layout, name, found[name], rank, world, model.numbers())
            assert same_map(maps[name], by_parts)


def numbered() -> dict[str, Tensor]:
    """A checkpoint in which no two elements are equal."""
    made, start = {}, 1
    for meta in SMOL.tensors():
        made[meta.name] = torch.arange(start, start + meta.numel, dtype=meta.dtype).reshape(meta.shape)
        start += meta.numel
    return made


def built(row_map: RowMap) -> Tensor:
    tensors = list(numbered().values())
    return local_tensor(row_map, [tensors[number] for number in row_map.outputs])


def test_nine_query_and_three_key_heads_on_two_ranks() -> None:
    checkpoint = numbered()
    q, k, v = (checkpoint[f"{START}.{which}_proj.weight"].split(2) for which in "qkv")
    out = checkpoint[f"{START}.o_proj.weight"]
    trainers, rollouts, unfused = (
        [make(SMOL, rank, 2) for rank in range(2)]
        for make in (trainer_maps, rollout_maps, lambda *cut: rollout_maps(*cut, fused=False))
    )
    grouped = ([*q[0:3], k[0], v[0], *q[3:5], k[1], v[1]], [q[5], k[1], v[1], *q[6:9], k[2], v[2]])
    stacked = ([*q[0:5], *k[0:2], *v[0:2]], [*q[5:9], *k[1:3], *v[1:3]])
    columns = (out[:, :10], out[:, 10:])
    for rank in range(2):
        assert torch.equal(built(trainers[rank][QKV]), torch.cat(grouped[rank]))
        assert torch.equal(built(trainers[rank][PROJ]), columns[rank])
        assert torch.equal(built(rollouts[rank][f"{START}.qkv_proj.weight"]), torch.cat(stacked[rank]))
        assert torch.equal(built(unfused[rank][f"{START}.k_proj.weight"]), torch.cat(k[rank : rank + 2]))
        for maps in (rollouts, unfused):
            assert torch.equal(built(maps[rank][f"{START}.o_proj.weight"]), columns[rank])
    told = [[maps[QKV].owned_elements(output) for output in range(3)] for maps in trainers]
    assert told == [[5 * 6, 2 * 6, 2 * 6], [4 * 6, 1 * 6, 1 * 6]]
    assert [maps[QKV].elements(1) for maps in trainers] == [2 * 6, 2 * 6]


def live(rank: int = 1, world: int = 2) -> dict[str, Tensor]:
    """What one trainer rank holds, with its attributes."""
    attributes = trainer_attributes(SMOL, world)
    return {
        name: attributes[name].stamp(torch.zeros(one.local_shape, dtype=one.dtype))
        for name, one in trainer_maps(SMOL, rank, world).items()
    }


def maps_of(params: dict[str, Tensor], rank: int = 1, world: int = 2) -> dict[str, RowMap]:
    table = {name: layout for name, (layout, _) in trainer_layouts(SMOL, world).items()}
    return row_maps(table, params, rank, world, SMOL.numbers())


def test_live_parameters_say_how_their_heads_are_cut() -> None:
    params = {name: fresh_copy(tensor) for name, tensor in live().items()}  # copies carry the counts too
    for name in (QKV, PROJ):
        assert (params[name].num_attention_heads, params[name].num_query_groups) == (9, 3)  # type: ignore[attr-defined]
        assert same_map(maps_of(params)[name], trainer_maps(SMOL, 1, 2)[name])
    assert not hasattr(params[QKV], "qkv_split_shapes")


@pytest.mark.parametrize("name", [QKV, PROJ])
@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_attention_heads": None, "num_query_groups": None}, MissingTPAttributes, "carries neither"),
        ({"num_query_groups": None}, PlanMismatch, "'num_query_groups': None"),
        ({"num_query_groups": 9}, PlanMismatch, "'num_query_groups': 9"),
        ({"num_attention_heads": 12}, PlanMismatch, "'num_attention_heads': 12"),
        ({"partition_stride": 2}, PlanMismatch, "'partition_stride': 2"),
        ({"partition_sizes": [5, 4]}, PlanMismatch, r"partition_sizes \(5, 4\)"),
        ({"tensor_model_parallel": False}, MissingTPAttributes, "is marked as replicated"),
    ],
)
def test_lost_or_wrong_counts_are_refused(
    name: str, changes: dict[str, object], error: type[Exception], text: str
) -> None:
    params = live()
    for attribute, value in changes.items():
        if value is None:
            delattr(params[name], attribute)
        else:
            setattr(params[name], attribute, value)
    with pytest.raises(error, match=text) as raised:
        maps_of(params)
    assert repr(name) in str(raised.value)


def test_a_wrong_dimension_an_even_shard_and_a_layout_without_heads_are_refused() -> None:
    params = live()
    params[PROJ].partition_dim = 0  # type: ignore[attr-defined]
    with pytest.raises(PlanMismatch, match="'partition_dim': 0"):
        maps_of(params)
    params = live()
    params[PROJ] = carry(params[PROJ], torch.zeros(3, 9))
    with pytest.raises(PlanMismatch, match=r"has shape \[3, 9\] on rank 1, expected \[3, 8\]"):
        maps_of(params)
    out = attention_out(SMOL)
    with pytest.raises(PlanMismatch, match="carries head counts, but its layout knows no heads"):
        row_map(plain(out), "w", trainer_attributes(SMOL, 2)[PROJ], 0, 2, SMOL.numbers())


def test_counts_on_a_cut_that_divides_ask_for_whole_heads() -> None:
    """Attributes decide: with counts, ranks that share a key/value head each hold all of it."""
    model = replace(SMOL, heads=4, kv_heads=1)
    layout, attributes = trainer_layouts(model, 2)[QKV]
    counts = {"num_attention_heads": 4, "num_query_groups": 1}
    whole = TPAttributes({**attributes.values, **counts})
    maps = [row_map(layout, QKV, whole, rank, 2, model.numbers()) for rank in range(2)]
    assert [[one.elements(output) for output in range(3)] for one in maps] == [[12, 6, 6], [12, 6, 6]]
    assert [one.owned_elements(1) for one in maps] == [6, 0]


def test_cuts_without_sense_are_refused() -> None:
    with pytest.raises(PlanMismatch, match="9 query heads cannot be cut for 10 ranks"):
        head_share(9, 3, 0, 10)
    with pytest.raises(PlanMismatch, match="rank 2 is outside of a world of 2"):
        head_share(9, 3, 2, 2)
    with pytest.raises(PlanMismatch, match="9 query heads share 2 key/value heads"):
        head_share(9, 2, 0, 2)


@pytest.mark.parametrize("speaks", [True, False])
def test_a_plan_refuses_replicas_that_both_or_none_speak_for(speaks: bool) -> None:
    def spoiled(row_map: RowMap, rank: int) -> RowMap:
        if row_map.name != QKV or (rank == 0) == speaks:
            return row_map
        return replace(row_map, owned=torch.full_like(row_map.owned, speaks) | (row_map.tensor == 0))

    maps = [tuple(spoiled(one, rank) for one in trainer_maps(SMOL, rank, 2).values()) for rank in range(2)]
    with pytest.raises(PlanMismatch, match=r"k_proj.weight' has (6|0) elements told"):
        TransferPlan(SMOL.tensors(), tuple(maps), 4096)


def test_the_parts_of_a_rank_have_the_lengths_of_its_heads() -> None:
    for order, lengths in (("query", [10, 8]), ("kv", [4, 4]), ("stacked", [18, 16]), ("grouped", [18, 16])):
        one = HeadCut.of(SMOL, order)  # type: ignore[arg-type]
        assert [one.length(rank, 2) for rank in range(2)] == lengths
