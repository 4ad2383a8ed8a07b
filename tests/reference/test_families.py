"""Every family on every layout: told once by the trainer, held by every rollout, and cut as the attributes say."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.params import TPAttributes, int_view, read, same_bits
from weightsync.reference.rowmap import export
from weightsync.reference.shards import join
from weightsync.testing.families import family_deployments, whole_range
from weightsync.testing.states import examples


def checkpoint(deployment: Deployment, seed: int) -> dict[str, Tensor]:
    """Random bits, NaN payloads among them."""
    stream = torch.Generator().manual_seed(seed)
    return {
        meta.name: torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=stream)
        .view(meta.dtype)
        .reshape(meta.shape)
        for meta in deployment.tensors
    }


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert same_bits(found[name], tensor), name


@examples(0.6)
@given(deployment=whole_range(), seed=st.integers(0, 2**32 - 1))
def test_shards_of_a_checkpoint_export_it_again_and_each_element_has_one_teller(
    deployment: Deployment, seed: int
) -> None:
    expected = checkpoint(deployment, seed)
    shards = [deployment.shards(rank.rank, expected) for rank in deployment.trainers]
    check_equal(deployment.export(shards), expected)  # refuses an element told by none or by two
    plan = deployment.plan
    for number, piece in enumerate(plan.pieces):  # the plan agrees
        assert sum(plan.owned(rank, number) for rank in range(len(plan.maps))) == piece.count


@examples(0.6)
@given(deployment=whole_range(), seed=st.integers(0, 2**32 - 1))
def test_every_rollout_holds_every_element_and_counts_it_once(deployment: Deployment, seed: int) -> None:
    expected = checkpoint(deployment, seed)
    for rollout in deployment.rollouts:
        maps = [deployment.rollout_maps(rank) for rank in rollout.ranks]
        weights = [deployment.weights(rank, expected) for rank in rollout.ranks]
        check_equal(export(maps, weights, deployment.tensors), expected)
        for one in (one for held in maps for one in held.values()):
            for output, number in enumerate(one.outputs):
                assert one.dtype == deployment.tensors[number].dtype
                assert one.elements(output) >= one.owned_elements(output)


@examples(0.8)
@given(deployment=family_deployments(), seed=st.integers(0, 2**32 - 1))
def test_live_parameters_say_themselves_how_they_are_cut(deployment: Deployment, seed: int) -> None:
    """Equal parts along ``partition_dim`` by stride or sizes give the whole parameter back, whatever the family."""
    expected = checkpoint(deployment, seed)
    shards = [deployment.shards(rank.rank, expected) for rank in deployment.trainers]
    for rank, params in enumerate(shards):
        assert deployment.live_maps(rank, params) == deployment.trainer_maps[rank]
    layout = deployment.trainer_layout
    for name, held in deployment.tables[0].items():
        attributes = held.param.attributes
        if not attributes.sharded or "num_query_groups" in attributes.values:
            continue
        world = layout.expert_tp if held.param.expert else layout.tp
        parts = [shards[rank][name].detach() for rank in range(world)]
        whole = join(parts, attributes.partition_dim, attributes.partition_stride, attributes.partition_sizes)
        rows = int_view(whole).reshape(len(held.param.layout.row), -1)
        for output, number in enumerate(held.row_map.outputs):
            told = held.param.layout.tensor == output
            bits = int_view(expected[deployment.tensors[number].name]).reshape(-1, rows.shape[1])
            assert torch.equal(rows[told], bits[held.param.layout.row[told]]), name


@examples(0.5)
@given(data=st.data(), deployment=family_deployments(), seed=st.integers(0, 2**32 - 1))
def test_attributes_that_are_lost_or_wrong_are_errors(
    data: st.DataObject, deployment: Deployment, seed: int
) -> None:
    expected = checkpoint(deployment, seed)
    rank = data.draw(st.integers(0, len(deployment.trainers) - 1))
    layout = deployment.trainer_layout
    cut = [
        name
        for name, held in deployment.tables[rank].items()
        if held.param.attributes.sharded and (layout.expert_tp if held.param.expert else layout.tp) > 1
    ]
    if not cut:
        return
    name = data.draw(st.sampled_from(cut))
    params = deployment.shards(rank, expected)
    params[name] = torch.nn.Parameter(params[name].detach().clone(), requires_grad=False)
    with pytest.raises(MissingTPAttributes, match="carries no tensor_model_parallel"):
        deployment.live_maps(rank, params)
    values = dict(deployment.attributes[rank][name].values)
    values["partition_stride"] = 3
    TPAttributes(values).stamp(params[name])
    with pytest.raises(PlanMismatch, match="'partition_stride': 3"):
        deployment.live_maps(rank, params)
    del params[name]
    with pytest.raises(PlanMismatch, match=f"{name!r} has no live tensor"):
        deployment.live_maps(rank, params)
    params = deployment.shards(rank, expected)
    params["decoder.layers.0.adapter.weight"] = params[name]
    with pytest.raises(PlanMismatch, match=r"no module that declares it; .*reference.modules.Module"):
        deployment.live_maps(rank, params)


@examples(0.6)
@given(data=st.data(), deployment=family_deployments())
def test_gathers_and_buckets_are_a_function_of_the_counts_and_ranks_without_a_share_bring_nothing(
    data: st.DataObject, deployment: Deployment
) -> None:
    """The promise of the sparse gather: one sequence of collectives on all ranks, whatever each of them holds."""
    plan = deployment.plan
    matrix = [
        [data.draw(st.integers(0, min(2, plan.owned(rank, number)))) for number in range(len(plan.pieces))]
        for rank in range(len(plan.maps))
    ]
    total = [sum(column) for column in zip(*matrix, strict=True)]
    groups = plan.groups(total)
    again = Deployment(
        deployment.model, deployment.trainer, deployment.layouts, deployment.bucket_bytes, 2, 4
    )
    assert again.plan.groups(total) == groups  # each rank makes its own plan, and all are equal
    assert [number for group in groups for number in group.pieces] == [
        number for number, count in enumerate(total) if count
    ]
    for group in groups:
        for rank, counts in enumerate(matrix):
            nothing = not any(
                plan.owned(rank, number) if dense else counts[number]
                for number, dense in zip(group.pieces, group.dense, strict=True)
            )
            assert (plan.part_bytes(group, rank, counts) == 0) == nothing


@examples(0.6)
@given(deployment=family_deployments())
def test_replicas_are_silent_and_a_tied_copy_is_marked_as_shared(deployment: Deployment) -> None:
    layout = deployment.trainer_layout
    copies = 0
    for rank in deployment.trainers:
        at = deployment.at(rank.rank)
        for name, held in deployment.tables[rank.rank].items():
            tells = bool(held.row_map.owned.any())
            speaks = at.expert_speaks if held.param.expert else at.speaks
            shared = held.param.attributes.values.get("shared", False)
            copies += shared
            assert not (tells and (not speaks or shared)), name
            if shared:
                assert name.endswith("output_layer.weight")
                assert at.stage == layout.pp - 1 > 0
    tied = bool(deployment.model.aliases())
    assert copies == (layout.stage_ranks if tied and layout.pp > 1 else 0)


@examples(0.4)
@given(deployment=family_deployments())
def test_fp32_buffers_stay_fp32_among_bf16_weights(deployment: Deployment) -> None:
    for meta in deployment.tensors:
        fp32 = meta.name.endswith("e_score_correction_bias")
        assert (meta.dtype == torch.float32) == fp32
    shards = deployment.shards(len(deployment.trainers) - 1, checkpoint(deployment, 0))
    for name, tensor in shards.items():
        assert (tensor.dtype == torch.float32) == name.endswith("router.expert_bias")
        assert read(tensor) == deployment.attributes[-1][name]
