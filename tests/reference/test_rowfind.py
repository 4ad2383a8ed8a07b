"""Rows found from elements say what the elements said, in rows as wide as can be."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.digest import combine, state_digest
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import plain, row_map
from weightsync.reference.params import ParamMeta
from weightsync.reference.placement import rollout_maps
from weightsync.reference.rowfind import Elements, find_rows, speak_once
from weightsync.reference.rowmap import RowMap, local_tensor
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.strategies import checkpoints, model_shapes, tp_layouts
from weightsync.testing.twosides import random_state


def same(left: Elements, right: Elements) -> bool:
    pairs = ((left.number, right.number), (left.flat, right.flat), (left.owned, right.owned))
    return all(torch.equal(a, b) for a, b in pairs)


@st.composite
def any_elements(draw: st.DrawFn) -> tuple[ParamMeta, Elements, list[ParamMeta]]:
    """Runs of two tensors' elements, in any order, also held twice, with gaps that never travel."""
    width = draw(st.integers(1, 4))
    tensors = [ParamMeta(name, torch.bfloat16, (draw(st.integers(1, 4)), width)) for name in "ab"]
    number, flat, owned = [], [], []
    for _ in range(draw(st.integers(0, 4))):
        one = draw(st.integers(-1, 1))
        last = max(tensors[one].numel, 1)
        start, length = draw(st.integers(0, last - 1)), draw(st.integers(1, 8))
        places = range(start, min(start + length, last))
        number += [one] * len(places)
        flat += [0 if one < 0 else place for place in places]
        owned += [one >= 0 and draw(st.booleans())] * len(places)
    elements = Elements(
        torch.tensor(number, dtype=torch.int64),
        torch.tensor(flat, dtype=torch.int64),
        torch.tensor(owned, dtype=torch.bool),
    )
    return ParamMeta("p", torch.bfloat16, (len(number),)), elements, tensors


@given(drawn=any_elements())
def test_any_elements_come_back_out_of_their_rows(drawn: tuple[ParamMeta, Elements, list[ParamMeta]]) -> None:
    runtime, elements, tensors = drawn
    found = find_rows(runtime, elements, tensors)
    assert same(Elements.of(found), elements)
    assert found.width * len(found.tensor) == runtime.numel
    places: list[int] = []
    for output, number in enumerate(found.outputs):
        assert tensors[number].shape[1] % found.full_widths[output] == 0
        held, local = found.to_local(output, torch.arange(tensors[number].numel))
        assert elements.number[local].eq(number).all()
        assert torch.equal(elements.flat[local], held.nonzero().reshape(-1))
        places += local.tolist()
    assert sorted(places) == elements.number.ge(0).nonzero().reshape(-1).tolist()


@given(layout=tp_layouts())
def test_rows_are_at_least_as_wide_as_those_of_a_cut(layout: object) -> None:
    meta = ParamMeta("x", torch.float32, layout.shape)
    for rank in range(layout.world):
        direct = row_map(plain(meta), "x", layout.attributes, rank, layout.world, {"x": 0})
        runtime = ParamMeta("x", torch.float32, direct.local_shape)
        found = find_rows(runtime, Elements.of(direct), [meta])
        assert same(Elements.of(found), Elements.of(direct))
        if math.prod(direct.local_shape):
            assert len(found.tensor) <= len(direct.tensor)


def test_a_column_shard_of_a_wide_matrix_needs_one_row_per_row() -> None:
    meta = ParamMeta("x", torch.bfloat16, (6, 1000))
    place = torch.arange(6000).reshape(6, 1000)[:, 300:500].reshape(-1)
    elements = Elements(torch.zeros_like(place), place, torch.ones_like(place, dtype=torch.bool))
    found = find_rows(ParamMeta("p", torch.bfloat16, (6, 200)), elements, [meta])
    assert (found.width, found.full_widths, found.column, len(found.tensor)) == (200, (1000,), 300, 6)


def test_a_transposed_parameter_is_a_table_of_elements() -> None:
    meta = ParamMeta("x", torch.bfloat16, (3, 4))
    place = torch.arange(12).reshape(3, 4).t().reshape(-1)
    elements = Elements(torch.zeros_like(place), place, torch.ones_like(place, dtype=torch.bool))
    found = find_rows(ParamMeta("p", torch.bfloat16, (4, 3)), elements, [meta])
    assert (found.width, len(found.tensor)) == (1, 12)
    (whole,) = random_state([meta], 0)
    assert torch.equal(local_tensor(found, [whole]).view(torch.int16), whole.t().view(torch.int16))


def test_a_row_held_twice_is_written_twice_and_spoken_for_once() -> None:
    meta = ParamMeta("k", torch.bfloat16, (1, 4))
    place = torch.arange(4).repeat(2)
    elements = Elements(torch.zeros_like(place), place, torch.ones_like(place, dtype=torch.bool))
    found = find_rows(ParamMeta("p", torch.bfloat16, (2, 4)), elements, [meta])
    assert (found.outputs, found.width) == ((0, 0), 4)
    ((single,),) = ([one.values()] for one in speak_once([{"p": found}], [meta]))
    (spoken,) = single
    assert spoken.owned.tolist() == [True, False]
    (whole,) = random_state([meta], 0)
    target = Target([meta], {"p": spoken}, {"p": whole.repeat(2, 1)})
    assert run(target.digest()) == state_digest([(meta, whole)])


@given(data=st.data(), model=model_shapes(tp=(1, 2, 3)), tp=st.integers(1, 3))
def test_the_first_rank_that_holds_an_element_speaks_for_it(
    data: st.DataObject, model: object, tp: int
) -> None:
    """Which is what the placement tables say; all ranks' shares add up to the digest of the checkpoint."""
    checkpoint = data.draw(checkpoints(model=model))
    direct = [rollout_maps(model, rank, tp) for rank in range(tp)]
    silent = [{name: _silent(one) for name, one in maps.items()} for maps in direct]
    spoken = speak_once(silent, model.tensors())
    shares = []
    for maps, expected in zip(spoken, direct, strict=True):
        for name, one in maps.items():
            assert same(Elements.of(one), Elements.of(expected[name])), name
        tensors = list(checkpoint.values())
        weights = {name: local_tensor(one, [tensors[o] for o in one.outputs]) for name, one in maps.items()}
        shares.append(run(Target(model.tensors(), maps, weights).digest()))
    assert combine(shares) == state_digest(zip(model.tensors(), checkpoint.values(), strict=True))


def test_a_parameter_of_another_dtype_than_its_tensor_is_refused() -> None:
    meta = ParamMeta("x", torch.bfloat16, (2,))
    place = torch.arange(2)
    elements = Elements(torch.zeros_like(place), place, torch.ones_like(place, dtype=torch.bool))
    with pytest.raises(PlanMismatch, match=r"'p' is torch.float32, but feeds or holds 'x' of torch.bfloat16"):
        find_rows(ParamMeta("p", torch.float32, (2,)), elements, [meta])


def _silent(one: RowMap) -> RowMap:
    elements = Elements.of(one)
    nobody = Elements(elements.number, elements.flat, torch.zeros_like(elements.owned))
    metas = {
        number: ParamMeta(str(number), one.dtype, (1 << 10, one.full_widths[0])) for number in one.outputs
    }
    every = [metas.get(number, ParamMeta("", one.dtype, ())) for number in range(max(one.outputs) + 1)]
    return find_rows(ParamMeta(one.name, one.dtype, one.local_shape), nobody, every, one.outputs)
