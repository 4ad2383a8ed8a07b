"""A captured loader says what the placement tables say, and a delta through it is a load of the new checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.capture import Captured, capture
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.digest import combine, state_digest
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.reference.placement import rollout_aliases, rollout_maps
from weightsync.reference.plan import TransferPlan
from weightsync.reference.rowfind import Elements, speak_once
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import deliver, make_update
from weightsync.testing.stacked_loader import ExpertModel, StackedModel, load_into
from weightsync.testing.states import examples
from weightsync.testing.strategies import DTYPES, checkpoints, model_shapes
from weightsync.testing.twosides import cut_map, poison, random_state

EXPERTS = [
    ParamMeta(f"experts.{expert}.{part}_proj.weight", torch.bfloat16, shape)
    for expert in range(4)
    for part, shape in (("gate", (3, 2)), ("up", (3, 2)), ("down", (2, 3)))
]


def uncut_plan(*metas: ParamMeta) -> TransferPlan:
    """One trainer rank, with a parameter p0, p1, ... per checkpoint tensor."""
    rows = tuple(cut_map(meta, number, None, 0, 1) for number, meta in enumerate(metas))
    return TransferPlan(metas, (rows,), 300)


def captured(one: StackedModel, **more: object) -> Captured:
    return capture(one.load_weights, one.params, one.model.tensors(), **more)  # type: ignore[arg-type]


def bits(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: int_view(tensor).clone() for name, tensor in params.items()}


def check_same_bits(params: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in params.items():
        assert torch.equal(int_view(tensor), int_view(expected[name])), name


@examples(0.6)
@given(data=st.data(), tp=st.integers(1, 8), fused=st.booleans(), odd_strides=st.booleans())
def test_a_capture_finds_the_placement_tables(
    data: st.DataObject, tp: int, fused: bool, odd_strides: bool
) -> None:
    model = data.draw(model_shapes(tp=(tp,)))
    ranks = [
        StackedModel(model, rank, tp, fused, vocab_multiple=4, odd_strides=odd_strides) for rank in range(tp)
    ]
    before = [bits(one.params) for one in ranks]
    found = [captured(one) for one in ranks]
    maps = speak_once([one.maps for one in found], model.tensors())
    for rank, one in enumerate(ranks):
        check_same_bits(one.params, before[rank])  # its own bits are back
        direct = rollout_maps(model, rank, tp, fused, vocab_multiple=4)
        for name, row_map in direct.items():
            expected = Elements.of(row_map)
            if bool((expected.number < 0).all()):
                assert name in found[rank].untouched  # a shard of nothing but padding
                continue
            read = Elements.of(maps[rank][name])
            for left, right in (
                (expected.number, read.number),
                (expected.flat, read.flat),
                (expected.owned, read.owned),
            ):
                assert torch.equal(left, right), name
            assert len(maps[rank][name].tensor) <= len(row_map.tensor), name
        assert set(maps[rank]) | set(found[rank].untouched) >= set(direct)
        if model.embedding.name in maps[rank]:
            assert found[rank].aliases == rollout_aliases(model)
        assert found[rank].overwritten == {}


@given(
    data=st.data(),
    sides=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    model=model_shapes(tp=(1, 2, 3)),
    fused=st.booleans(),
    odd_strides=st.booleans(),
)
def test_a_delta_through_a_captured_plan_is_a_load_of_the_new_checkpoint(
    data: st.DataObject, sides: tuple[int, int], model: ModelShape, fused: bool, odd_strides: bool
) -> None:
    deployment = Deployment(model, sides[0], (RolloutLayout(sides[1], fused),), 1000, 2, 4)
    old, new = (data.draw(checkpoints(model=model)) for _ in range(2))
    for name, tensor in new.items():
        kept = torch.rand(tensor.numel(), generator=torch.Generator().manual_seed(len(name))) < 0.7
        int_view(tensor)[kept] = int_view(old[name])[kept]
    live = [deployment.shards(rank, old) for rank in range(deployment.tp)]
    sources = [Source(deployment.plan, rank, params) for rank, params in enumerate(live)]
    make_update(deployment.plan, sources, slot=0, version=1)
    for rank, params in enumerate(live):
        for name, shard in deployment.shards(rank, new).items():
            int_view(params[name]).copy_(int_view(shard))
    delta = make_update(deployment.plan, sources, slot=1, version=2, base_slot=0, base=1)

    def ranks() -> list[StackedModel]:
        return [
            StackedModel(model, rank, sides[1], fused, vocab_multiple=4, odd_strides=odd_strides)
            for rank in range(sides[1])
        ]

    updated, loaded = ranks(), ranks()
    found = [captured(one) for one in updated]
    maps = speak_once([one.maps for one in found], model.tensors())
    shares = []
    for one, fresh, placed, own in zip(updated, loaded, maps, found, strict=True):
        one.load_weights(old.items())
        storage = {name: tensor.data_ptr() for name, tensor in one.params.items()}
        target = Target(model.tensors(), placed, one.params, own.aliases)
        deliver(target, delta)
        fresh.load_weights(new.items())
        check_same_bits(one.params, fresh.params)
        assert {name: tensor.data_ptr() for name, tensor in one.params.items()} == storage
        shares.append(run(target.digest()))
    assert combine(shares) == delta.digest == state_digest(zip(model.tensors(), new.values(), strict=True))


@settings(max_examples=10)
@given(model=model_shapes(tp=(1, 2)), fused=st.booleans())
def test_one_load_per_tensor_finds_what_one_load_finds(model: ModelShape, fused: bool) -> None:
    names = [meta.name for meta in model.tensors()]
    whole = captured(StackedModel(model, 0, 2, fused))
    parts = captured(StackedModel(model, 0, 2, fused), groups=[[name] for name in reversed(names)])
    assert list(whole.maps) == list(parts.maps)
    for name, one in whole.maps.items():
        for left, right in zip(
            vars(Elements.of(one)).values(), vars(Elements.of(parts.maps[name])).values(), strict=True
        ):
            assert torch.equal(left, right)
    assert (whole.padding, whole.ignored, parts.overwritten) == (parts.padding, parts.ignored, {})


def test_fused_experts_some_of_them_transposed_are_captured_per_rank() -> None:
    ranks = [ExpertModel(held, 3, 2, torch.bfloat16) for held in ((0, 2), (3, 1))]
    found = [capture(one.load_weights, one.params, EXPERTS) for one in ranks]
    maps = speak_once([one.maps for one in found], EXPERTS)
    assert found[0].ignored == tuple(meta.name for meta in EXPERTS if meta.name.split(".")[1] in "13")
    assert {name: one.width for name, one in maps[0].items()} == {"w13": 2, "w2": 1}
    old, new = (random_state(EXPERTS, seed) for seed in range(2))
    plan = uncut_plan(*EXPERTS)
    live = {f"p{number}": tensor.clone() for number, tensor in enumerate(old)}
    source = Source(plan, 0, live)
    make_update(plan, [source], slot=0, version=1)
    for number, tensor in enumerate(new):
        int_view(live[f"p{number}"]).copy_(int_view(tensor))
    delta = make_update(plan, [source], slot=1, version=2, base_slot=0, base=1)
    names = [meta.name for meta in EXPERTS]
    for one, placed, held in zip(ranks, maps, ((0, 2), (3, 1)), strict=True):
        one.load_weights(zip(names, old, strict=True))
        deliver(Target(EXPERTS, placed, one.params), delta)
        fresh = ExpertModel(held, 3, 2, torch.bfloat16)
        fresh.load_weights(zip(names, new, strict=True))
        check_same_bits(one.params, fresh.params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_old_bits_are_back_whatever_they_were(dtype: torch.dtype) -> None:
    """NaN payloads too, in gaps between elements too, and after an error too."""
    meta = ParamMeta("w", dtype, (4, 3))
    (room,) = random_state([ParamMeta("room", dtype, (4, 8))], 7)
    before = int_view(room).clone()
    params = {"w": room[:, ::2][:, :3], "tail": room[:, 7]}
    found = capture(lambda pairs: load_into(params, pairs), params, [meta])
    assert (list(found.maps), found.untouched) == (["w"], ("tail",))
    assert torch.equal(int_view(room), before)

    def failing(pairs: Iterable[tuple[str, Tensor]]) -> None:
        load_into(params, pairs)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        capture(failing, params, [meta])
    assert torch.equal(int_view(room), before)


def test_a_delta_through_a_capture_writes_what_changed_and_no_more() -> None:
    meta = ParamMeta("w", torch.bfloat16, (64, 64))
    params = {"w": torch.zeros(64, 128, dtype=torch.bfloat16)[:, ::2].t()}
    found = capture(lambda pairs: load_into(params, pairs), params, [meta])
    assert (found.maps["w"].width, len(found.maps["w"].tensor)) == (64, 64)
    plan, live = uncut_plan(meta), {"p0": random_state([meta], 0)[0]}
    source, target = Source(plan, 0, live), Target([meta], found.maps, params)
    deliver(target, make_update(plan, [source], slot=0, version=1))
    run(target.commit())
    int_view(live["p0"])[[5, 64, 4095]] ^= 1
    delta = make_update(plan, [source], slot=1, version=2, base_slot=0, base=1)
    assert deliver(target, delta) == 3 * meta.itemsize
    assert same_bits(params["w"], live["p0"])


def test_what_is_not_written_is_listed() -> None:
    metas = [ParamMeta("w", torch.bfloat16, (2, 2)), ParamMeta("rope", torch.bfloat16, (3,))]
    params = {"w": poison((3, 2), torch.bfloat16), "bias": torch.ones(2), "flag": torch.tensor(True)}

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        params["w"][1:] = dict(pairs)["w"]

    found = capture(load, params, metas)
    assert found.untouched == ("bias", "flag")
    assert (found.padding, found.ignored) == ({"w": 2}, ("rope",))
    assert bool(params["flag"])


def test_an_element_in_several_places_is_written_in_all_of_them_and_counted_once() -> None:
    """In another parameter, in the same one, and behind a tied name."""
    meta = ParamMeta("k", torch.bfloat16, (2, 2))
    twice, other = poison((4, 2), torch.bfloat16), poison((2, 2), torch.bfloat16)
    params = {"twice": twice, "other": other, "tied": other.view(2, 2)}

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in pairs:
            twice.copy_(tensor.repeat(2, 1))
            other.copy_(tensor)

    found = capture(load, params, [meta])
    assert found.aliases == {"tied": "other"}
    assert found.replicas == {"twice": 4, "other": 4}
    plan = uncut_plan(meta)
    (state,) = random_state([meta], 1)
    update = make_update(plan, [Source(plan, 0, {"p0": state})], slot=0, version=1)
    target = Target([meta], found.maps, params, found.aliases)
    deliver(target, update)
    assert same_bits(twice, state.repeat(2, 1))
    assert same_bits(other, state)
    assert run(target.digest()) == update.digest


def test_elements_written_twice_are_seen_and_the_last_one_counts() -> None:
    metas = [ParamMeta("first", torch.bfloat16, (2,)), ParamMeta("second", torch.bfloat16, (2,))]
    params = {"w": torch.zeros(3, dtype=torch.bfloat16)}

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            params["w"][slice(0, 2) if name == "first" else slice(1, 3)] = tensor

    for groups in (None, [["first"], ["second"]]):
        found = capture(load, params, metas, groups=groups)
        assert found.overwritten == {"w": 1}
        assert Elements.of(found.maps["w"]).number.tolist() == [0, 1, 1]
        assert Elements.of(found.maps["w"]).flat.tolist() == [0, 0, 1]
