"""Row maps of uneven, packed and nested cuts: told once, found back, and carried by whole updates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import (
    Layout,
    RowMap,
    concat,
    cut,
    cut_part,
    export,
    gate_up,
    local_tensor,
    plain,
    row_map,
    vocab,
)
from weightsync.reference.params import ParamMeta, TPAttributes, same_bits
from weightsync.reference.shards import Part, parts, take
from weightsync.reference.steps import run
from weightsync.testing.byhand import deliver
from weightsync.testing.cuts import cut_shapes, part_lists
from weightsync.testing.strategies import dtypes
from weightsync.testing.twosides import TwoSides, flips, random_state


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParamMeta:
    return ParamMeta(name, dtype, shape)


def numbered(*metas: ParamMeta) -> list[Tensor]:
    """Checkpoint tensors whose elements are all different over all tensors."""
    return [
        torch.arange(one.numel, dtype=torch.float32).reshape(one.shape) + 1000 * number
        for number, one in enumerate(metas)
    ]


def tellers(held: tuple[Part, ...]) -> list[bool]:
    """Of equal parts, the first speaks."""
    return [part not in held[:rank] for rank, part in enumerate(held)]


def maps_of(layout: Layout, held: tuple[Part, ...]) -> list[RowMap]:
    numbers = {one.name: number for number, one in enumerate(layout.metas)}
    return [
        cut_part(layout, "w", numbers, part, owned=owned)
        for part, owned in zip(held, tellers(held), strict=True)
    ]


def whole_tensor(layout: Layout, full: list[Tensor]) -> Tensor:
    """The uncut parameter, from the layout's table alone."""
    width = layout.shape[-1] if len(layout.shape) > 1 else 1
    rows = [
        torch.zeros(width) if number < 0 else full[number].reshape(-1)[row * width : (row + 1) * width]
        for number, row in zip(layout.tensor.tolist(), layout.row.tolist(), strict=True)
    ]
    return torch.cat([torch.zeros(0), *rows]).reshape(layout.shape)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    kind = draw(st.sampled_from(["plain", "fused", "fused experts", "padded"]))
    event(f"layout: {kind}")
    shape = draw(cut_shapes().filter(lambda one: len(one) > {"plain": -1, "fused experts": 2}.get(kind, 0)))
    if kind == "plain":
        return plain(meta("x", *shape))
    if kind == "padded":
        return vocab(meta("x", *shape), shape[0] + draw(st.integers(0, 3)))
    dim = 1 if kind == "fused experts" else 0
    more = draw(st.lists(st.integers(0, 4), min_size=1, max_size=2))
    others = [(*shape[:dim], length, *shape[dim + 1 :]) for length in more]
    return concat(*(meta(f"x{n}", *one) for n, one in enumerate([shape, *others])), dim=dim)


@given(layout=layouts(), data=st.data())
def test_any_cut_is_told_completely_and_lands_where_take_put_it(layout: Layout, data: st.DataObject) -> None:
    held = data.draw(part_lists(shape=layout.shape, replicas=False))
    held += held[: data.draw(st.integers(0, 2))]
    full = numbered(*layout.metas)
    whole = whole_tensor(layout, full)
    maps = maps_of(layout, held)
    live = []
    for one, part in zip(maps, held, strict=True):
        assert one.local_shape == part.local_shape
        live.append(take(whole, part))
        assert same_bits(local_tensor(one, full), live[-1])
    told = export([{"w": one} for one in maps], [{"w": shard} for shard in live], layout.metas)
    assert all(same_bits(told[one.name], tensor) for one, tensor in zip(layout.metas, full, strict=True))


@given(layout=layouts(), data=st.data())
def test_positions_of_any_cut_are_those_of_the_elements_there_and_back(
    layout: Layout, data: st.DataObject
) -> None:
    held = data.draw(part_lists(shape=layout.shape, replicas=False))
    full = numbered(*layout.metas)
    whole = whole_tensor(layout, full)
    for one, part in zip(maps_of(layout, held), held, strict=True):
        shard = take(whole, part).reshape(-1)
        output, flat = one.to_checkpoint(torch.arange(part.numel))
        for number, tensor in enumerate(full):
            mine = output == number
            assert torch.equal(tensor.reshape(-1)[flat[mine]], shard[mine])
            found, local = one.to_local(number, torch.arange(tensor.numel()))
            assert torch.equal(shard[local], tensor.reshape(-1)[found])
            assert int(found.sum()) == one.elements(number) == int(mine.sum())


@given(layout=layouts(), data=st.data())
def test_ascending_positions_are_located_as_each_one_would_be(layout: Layout, data: st.DataObject) -> None:
    """By runs, and where there are more of them than positions by division; int32 and int64, from any base."""
    held = data.draw(part_lists(shape=layout.shape, replicas=False))
    for one in maps_of(layout, held):
        for number, only in enumerate(layout.metas):
            base = data.draw(st.integers(0, only.numel), label="base")
            drawn = data.draw(st.sets(st.integers(0, max(0, only.numel - base - 1))), label="positions")
            chosen = sorted(drawn) if base < only.numel else []
            width = data.draw(st.sampled_from([torch.int32, torch.int64]))
            positions = torch.tensor(chosen, dtype=width)
            expected, places = one.to_local(number, positions.to(torch.int64) + base)
            taken, local = one.locate(number, positions, base)
            event(f"located by {'a slice' if isinstance(taken, slice) else 'an index'}")
            assert torch.equal(positions[taken], positions[expected])
            assert local.dtype == torch.int64
            assert torch.equal(local, places)


@given(layout=layouts(), data=st.data())
def test_positions_told_together_are_told_as_each_one_would_be(layout: Layout, data: st.DataObject) -> None:
    held = data.draw(part_lists(shape=layout.shape))
    owners = [data.draw(st.booleans()) for _ in held]
    for one, told in zip(maps_of(layout, held), owners, strict=True):
        row_map = one if told else replace(one, owned=torch.zeros_like(one.owned))
        numel = len(one.tensor) * one.width
        chosen = data.draw(st.sets(st.integers(0, max(0, numel - 1)), max_size=4)) if numel else set()
        positions = torch.tensor(data.draw(st.permutations(sorted(chosen))), dtype=torch.int64)
        together = row_map.told_together(positions)
        outputs, flat = row_map.to_checkpoint(positions)
        event(f"told together: {together is not None}")
        if together is not None:
            assert outputs.tolist() == [together[0]] * len(positions)
            assert together[0] < 0 or torch.equal(together[1], flat)
        elif len(positions) == 1:
            raise AssertionError("one position is always in one run")


def test_positions_at_the_far_end_of_int32_are_located() -> None:
    """Runs that begin or end beyond what a position of int32 can say, without allocating the tensor."""
    rows = torch.tensor([0, 1, 2, 3])
    far = RowMap(
        "w", torch.int8, (2, 1 << 30), (0,), torch.tensor([0, 0], dtype=torch.int32), rows[2:], 1 << 30, (1 << 30,),
        0, torch.ones(2, dtype=torch.bool),
    )  # fmt: skip
    last = (1 << 31) - 1
    for base, positions in ((0, [5, last]), (1 << 30, [5, last]), (1 << 31, [0, 7, last])):
        at = torch.tensor(positions, dtype=torch.int32)
        expected, places = far.to_local(0, at.to(torch.int64) + base)
        taken, local = far.locate(0, at, base)
        assert torch.equal(at[taken], at[expected])
        assert torch.equal(local, places)


def test_a_part_is_cut_as_attributes_cut_it() -> None:
    """Every dimension, also one in the middle, by stride and by sizes."""
    layout = plain(meta("x", 12, 12, 12))
    for dim in range(3):
        for stride, sizes in ((1, None), (2, None), (1, (1, 3))):
            values = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}
            if sizes:
                values["partition_sizes"] = sizes
            held = parts(layout.shape, 3, dim, stride=stride, sizes=sizes)
            for rank, one in enumerate(maps_of(layout, held)):
                other = row_map(layout, "w", TPAttributes(values), rank, 3, {"x": 0})
                assert same_map(one, other)


def same_map(one: RowMap, other: RowMap) -> bool:
    fields = ("local_shape", "outputs", "width", "full_widths", "column")
    tables = ("tensor", "row", "owned")
    return all(getattr(one, name) == getattr(other, name) for name in fields) and all(
        torch.equal(getattr(one, name), getattr(other, name)) for name in tables
    )


def test_a_table_has_a_row_for_every_row_whatever_its_width() -> None:
    """Also where a cut is cut again; gaps between columns split a row, neighbours do not."""
    layout = plain(meta("x", 8, 1 << 20))
    whole = Part.whole(layout.shape)
    nested = whole.cut(1, 1, 3).cut(0, 1, 3).cut(1, 0, 2)
    assert len(cut_part(layout, "w", {"x": 0}, nested).row) == 3
    neighbours = whole.cut(1, 0, 1, stride=4)
    assert len(cut_part(layout, "w", {"x": 0}, neighbours).row) == 8
    gaps = whole.cut(1, 1, 2, stride=2)
    assert len(cut_part(layout, "w", {"x": 0}, gaps).row) == 16


def test_columns_that_a_rank_holds_and_another_speaks_for_are_told_once() -> None:
    layout = plain(meta("x", 2, 6))
    held = [[((0, 2), True), ((2, 4), True)], [((2, 4), False), ((4, 6), True)]]
    maps = [cut(layout, "w", {"x": 0}, dim=1, held=one) for one in held]
    assert [one.local_shape for one in maps] == [(2, 4)] * 2
    assert [one.owned_elements(0) for one in maps] == [8, 4]
    (full,) = numbered(*layout.metas)
    live = [{"w": local_tensor(one, [full])} for one in maps]
    assert torch.equal(live[1]["w"], full[:, 2:])
    assert same_bits(export([{"w": one} for one in maps], live, layout.metas)["x"], full)


def test_a_run_of_columns_that_is_a_replica_is_told_by_its_speaker_alone() -> None:
    layout = plain(meta("x", 2, 6))
    maps = [cut(layout, "w", {"x": 0}, dim=1, held=[((2, 4), told)]) for told in (True, False)]
    assert [(one.elements(0), one.owned_elements(0)) for one in maps] == [(4, 4), (4, 0)]


def test_grouped_experts_fuse_gate_and_up_along_their_ffn_dimension() -> None:
    metas = (meta("gate", 3, 4, 2), meta("up", 3, 4, 2))
    gate, up = numbered(*metas)
    layout = concat(*metas, dim=1)
    assert torch.equal(whole_tensor(layout, [gate, up]), torch.cat([gate, up], 1))
    for one, rank in zip(maps_of(layout, parts((3, 8, 2), 2, 1, stride=2)), range(2), strict=True):
        mine = torch.cat([gate.chunk(2, 1)[rank], up.chunk(2, 1)[rank]], 1)
        assert torch.equal(local_tensor(one, [gate, up]), mine)
    assert torch.equal(gate_up(*metas).row, concat(*metas).row)


def test_layouts_and_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"'w' of full shape \[4\] is cut as one of \[5\]"):
        cut_part(plain(meta("x", 4)), "w", {"x": 0}, Part.whole((5,)))
    with pytest.raises(PlanMismatch, match="'x', which the plan does not name"):
        cut_part(plain(meta("x", 4)), "w", {}, Part.whole((4,)))
    for dim, shape in ((1, (4, 2)), (-1, (4, 2)), (1, (4,)), (0, ())):
        with pytest.raises(PlanMismatch, match=f"to be fused along dimension {dim}"):
            concat(meta("a", *shape), meta("b", *shape), dim=dim)
    with pytest.raises(PlanMismatch, match=r"'b' .*\[4, 2, 5\] cannot be fused with 'a'"):
        concat(meta("a", 3, 2, 5), meta("b", 4, 2, 5), dim=1)
    with pytest.raises(PlanMismatch, match="rows of one width"):
        Layout((meta("a", 2, 3), meta("b", 2, 4)), (4, 3), torch.zeros(4).int(), torch.arange(4))


@st.composite
def nested_sides(draw: st.DrawFn) -> TwoSides:
    """Tensors that both sides cut in any way, unlike each other."""
    metas = tuple(
        ParamMeta(f"x{number}", draw(dtypes()), draw(cut_shapes(max_dims=3)))
        for number in range(draw(st.integers(1, 2)))
    )
    both = []
    for _ in range(2):
        world = draw(st.integers(1, 6))
        maps: list[dict[str, RowMap]] = [{} for _ in range(world)]
        for number, one in enumerate(metas):
            held = draw(part_lists(shape=one.shape, max_world=world, replicas=False))
            held += held[:1] * (world - len(held))
            for mine, part, owned in zip(maps, held, tellers(held), strict=True):
                mine[f"p{number}"] = cut_part(plain(one), f"p{number}", {one.name: number}, part, owned=owned)
        both.append(maps)
    buckets, pieces = draw(st.sampled_from([110, 300, 4096])), draw(st.sampled_from([13, 25, 1 << 31]))
    return TwoSides(metas, *both, buckets, pieces, random_state(metas, draw(st.integers(0, 1 << 32))))


@given(sides=nested_sides(), data=st.data())
def test_a_full_update_and_a_delta_go_from_any_cut_to_any_other(sides: TwoSides, data: st.DataObject) -> None:
    """And they are the bytes that an uncut trainer sends."""
    uncut = [
        {
            f"p{number}": cut(plain(one), f"p{number}", {one.name: number})
            for number, one in enumerate(sides.metas)
        }
    ]
    state = [tensor.clone() for tensor in sides.state]
    alone = TwoSides(sides.metas, uncut, uncut, sides.bucket_bytes, sides.piece_elements, state)
    targets = sides.targets()
    for version in (1, 2):
        if version == 2:
            chosen = data.draw(flips(sides=sides))
            sides.train(chosen)
            alone.train(chosen)
        update, other = (one.full() if version == 1 else one.delta() for one in (sides, alone))
        for target in targets:
            deliver(target, update)
            run(target.commit())
        sides.expect(targets)
        assert update.digest == other.digest == sides.digest()
        for left, right in zip(update.buckets, other.buckets, strict=True):
            assert left.header == right.header
            assert torch.equal(left.payload, right.payload)
