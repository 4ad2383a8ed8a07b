"""A probed export says what the layout tables say, and what the dense export does, to the bit."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.delta import diff
from weightsync.reference.deployment import Deployment
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.reference.plan import TransferPlan
from weightsync.reference.probe import Probe, Probed, plan_of
from weightsync.reference.rowfind import Elements
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.testing.byhand import make_update
from weightsync.testing.gather_export import GatherExport, norms, padded
from weightsync.testing.states import examples
from weightsync.testing.strategies import DTYPES, checkpoints, deployments

SMALL = ModelShape(vocab=5, hidden=4, intermediate=6, layers=1, heads=4, kv_heads=2, head_dim=2, qk_norm=True)


def probed(deployment: Deployment, **more: object) -> Probed:
    """What a probe finds, knowing names, shapes and attributes only."""
    shards = [
        {
            name: attributes[name].stamp(torch.empty(one.local_shape, dtype=one.dtype, device="meta"))
            for name, one in maps.items()
        }
        for maps, attributes in zip(deployment.trainer_maps, deployment.attributes, strict=True)
    ]
    names = list(shards[0])
    export = GatherExport(deployment.model)
    return Probe(export, padded(names), norms(names), deployment.tensors, **more).of(shards)  # type: ignore[arg-type]


def check_same_told(found: Probed, deployment: Deployment) -> None:
    """The same rank tells the same elements; tables are not larger."""
    for maps, expected in zip(found.maps, deployment.trainer_maps, strict=True):
        assert list(maps) == list(expected)
        for name, one in maps.items():
            direct, read = Elements.of(expected[name]), Elements.of(one)
            assert torch.equal(direct.owned, read.owned), name
            assert torch.equal(direct.number[direct.owned], read.number[read.owned]), name
            assert torch.equal(direct.flat[direct.owned], read.flat[read.owned]), name
            assert len(one.tensor) <= len(expected[name].tensor), name


@examples(0.8)
@given(deployment=deployments(max_tp=8))
def test_a_probe_finds_the_layout_tables(deployment: Deployment) -> None:
    check_same_told(probed(deployment), deployment)


@given(data=st.data(), deployment=deployments())
def test_direct_maps_and_probe_and_full_diff_give_identical_patches(
    data: st.DataObject, deployment: Deployment
) -> None:
    old, new = (data.draw(checkpoints(model=deployment.model)) for _ in range(2))
    for name, tensor in new.items():  # most elements stay
        kept = torch.rand(tensor.numel(), generator=torch.Generator().manual_seed(len(name))) < 0.7
        int_view(tensor)[kept] = int_view(old[name])[kept]
    plans = [deployment.plan, plan_of(probed(deployment), deployment.bucket_bytes)]
    updates = []
    for plan in plans:
        live = [deployment.shards(rank, old) for rank in range(deployment.tp)]
        sources = [Source(plan, rank, params) for rank, params in enumerate(live)]
        full = make_update(plan, sources, slot=0, version=1)
        for rank, params in enumerate(live):
            for name, shard in deployment.shards(rank, new).items():
                int_view(params[name]).copy_(int_view(shard))
        updates.append((full, make_update(plan, sources, slot=1, version=2, base_slot=0, base=1)))
        found: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for source in sources:
            for piece, patch in run(source.diff(1, 0)).patches.items():
                found.setdefault(piece, []).append(patch[:2])
        dense = [dict(GatherExport(deployment.model)(one)) for one in _both(deployment, old, new)]
        for number, meta in enumerate(plan.tensors):
            expected = diff(meta, dense[1][meta.name], dense[0][meta.name])
            parts = found.get(
                number, [(torch.empty(0, dtype=torch.int32), int_view(torch.empty(0, dtype=meta.dtype)))]
            )
            positions, bits = (torch.cat(column) for column in zip(*parts, strict=True))
            positions, order = positions.sort()
            assert torch.equal(positions, expected.positions), meta.name
            assert torch.equal(bits[order], int_view(expected.values)), meta.name
    for left, right in zip(*updates, strict=True):
        assert left.digest == right.digest
        for one, other in zip(left.buckets, right.buckets, strict=True):
            assert one.header == other.header
            assert torch.equal(one.payload, other.payload)


def _both(deployment: Deployment, *checkpoints: Mapping[str, Tensor]) -> list[list[dict[str, Tensor]]]:
    return [[dict(deployment.shards(rank, one)) for rank in range(deployment.tp)] for one in checkpoints]


@settings(max_examples=10)
@given(deployment=deployments())
def test_one_call_per_parameter_finds_what_one_call_finds(deployment: Deployment) -> None:
    names = list(deployment.attributes[0])
    whole, parts = probed(deployment), probed(deployment, groups=[[name] for name in reversed(names)])
    assert (whole.tensors, whole.dropped, whole.replicas) == (parts.tensors, parts.dropped, parts.replicas)
    check_same_told(parts, deployment)
    assert (
        TransferPlan(parts.tensors, plan_of(parts, 1000).maps, 1000).fingerprint
        == deployment.plan.fingerprint
    )


class Gathering:
    """An export that runs on every rank at once, and gathers by itself; ranks are threads."""

    def __init__(self, model: ModelShape, world: int) -> None:
        self.export, self.barrier = GatherExport(model), threading.Barrier(world, timeout=60)
        self.given: list[Mapping[str, Tensor]] = [{}] * world

    def on(self, rank: int, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.given[rank] = params
        self.barrier.wait()
        result = dict(self.export(self.given))
        self.barrier.wait()
        return result


def test_an_export_that_gathers_by_itself_is_probed_on_all_ranks_at_once() -> None:
    deployment = Deployment(SMALL, 2, (), 1000, trainer_multiple=2)
    zeros = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
    ranks = [deployment.shards(rank, zeros) for rank in range(2)]
    names = list(ranks[0])
    gathering = Gathering(SMALL, 2)
    found: dict[int, Probed] = {}

    def probe(rank: int) -> None:
        def export(params: Any) -> Any:
            return gathering.on(rank, params)

        found[rank] = Probe(export, padded(names), norms(names), rank=rank).of(ranks)

    threads = [threading.Thread(target=probe, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in found.values():
        assert set(one.tensors) == set(deployment.tensors)
        assert list(one.maps[1]) == names
    assert plan_of(found[0], 1000).fingerprint == plan_of(found[1], 1000).fingerprint


@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_whatever_an_export_moves_is_found(data: st.DataObject, dtype: torch.dtype) -> None:
    """Slices, transposes and flips in any order, on one rank; the maps rebuild what the function gives."""
    rows, columns = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 5))
    moves = data.draw(st.lists(st.sampled_from(["t", "flip", "roll", "fold"]), max_size=4))
    split = data.draw(st.integers(0, rows))

    def export(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
        bits = int_view(params["w"]).view(rows, columns)
        for move in moves:
            if move == "t":
                bits = bits.t()
            elif move == "flip":
                bits = bits.flip(0)
            elif move == "roll":
                bits = bits.roll(1, 1)
            else:
                bits = bits.reshape(-1).view(columns, rows)
        first, second = bits.contiguous().view(dtype).reshape(-1).split([split, rows * columns - split])
        return {"a": first, "b": second, "n": params["n"]}

    params = {"w": torch.empty(rows, columns, dtype=dtype), "n": torch.empty((), dtype=dtype)}
    found = Probe(export).of(params)
    assert [meta.name for meta in found.tensors] == ["a", "b", "n"]
    plan_of(found, 1000)


def test_a_layout_is_probed_once() -> None:
    calls = []

    def export(params: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        calls.append(params)
        return params

    probe = Probe(export)
    params = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    first = probe.of(params)
    count = len(calls)
    assert probe.of({"w": torch.ones(3, dtype=torch.bfloat16, device="meta")}) is first
    assert len(calls) == count
    assert probe.of({"w": torch.zeros(4, dtype=torch.bfloat16)}) is not first
    assert all(one is not params for one in calls)


def test_a_tied_head_that_is_exported_twice_travels_once() -> None:
    found = Probe(lambda params: {"embed": params["e"], "head": params["e"].clone()}).of(
        {"e": torch.zeros(3, 2, dtype=torch.bfloat16)}
    )
    assert [meta.name for meta in found.tensors] == ["embed"]
    assert found.aliases == {"head": "embed"}


def test_padding_and_replicas_are_listed() -> None:
    deployment = Deployment(SMALL, 2, (), 1000, trainer_multiple=4)
    found = probed(deployment)
    assert found.dropped == {"embedding.word_embeddings.weight": (0, 3 * 4)}
    assert set(found.replicas) == set(norms(list(deployment.attributes[0])))
    assert found.replicas["decoder.final_layernorm.weight"] == (0, 4)


def test_a_declared_cast_travels_in_the_dtype_of_the_checkpoint() -> None:
    live = {"w": torch.tensor([1.0, 2.0 + 2**-20])}
    meta = ParamMeta("w", SMALL.dtype, (2,))
    found = Probe(lambda params: {"w": params["w"].to(torch.bfloat16)}, tensors=[meta]).of(live)
    assert found.maps[0]["w"].dtype == torch.bfloat16
    source = Source(plan_of(found, 1000), 0, live)
    run(source.snapshot(0))
    assert same_bits(source.held(0)["w"], torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
