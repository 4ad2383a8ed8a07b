"""Megatron's own layers, a whole GPT model, its optimizer's functions: our attributes, joins and norms agree."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.attributes import ATTRIBUTES
from weightsync.reference.grad_norm import (
    RankGrads,
    count_zeros,
    grad_norm,
    is_not_duplicate,
    reduce_replicated,
)
from weightsync.reference.params import TPAttributes, compare, fresh_copy, read, same_bits
from weightsync.reference.shards import join

Said = dict[str, Any]
SCRIPT = Path(__file__).with_name("megatron_rank.py")
NEWER = {"qkv_split_shapes"}
"""In Megatron's table after the pinned release."""
MINUTES = 5


def run_ranks(world: int, folder: Path) -> list[Said]:
    """What every rank wrote down; one process per rank."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(world), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=60 * MINUTES)
            assert process.returncode == 0, f"rank {rank} of {world}:\n{output}"
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(world)]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Said]]:
    return {world: run_ranks(world, tmp_path_factory.mktemp(f"tp{world}")) for world in (1, 2, 4)}


@pytest.fixture(params=[1, 2, 4], ids=lambda world: f"TP {world}")
def ranks(worlds: dict[int, list[Said]], request: pytest.FixtureRequest) -> list[Said]:
    return worlds[request.param]


def whole(ranks: list[Said], which: str, name: str) -> Tensor:
    """One parameter of all ranks of its group, joined by nothing but its attributes."""
    attributes = read(ranks[0][which][name])
    shards = [said[which][name].detach() for said in ranks]
    if not attributes.values.get("allreduce", True):
        shards = shards[: ranks[0]["expert tp"]]
    if not attributes.sharded:
        return shards[0]
    return join(shards, attributes.partition_dim, attributes.partition_stride, attributes.partition_sizes)


def grads_of(ranks: list[Said]) -> list[RankGrads]:
    return [
        RankGrads({name: (said["copies"][f"gpt.{name}"], grad) for name, grad in said["grads"].items()}, rank)
        for rank, said in enumerate(ranks)
    ]


def test_our_defaults_are_megatrons_table(worlds: dict[int, list[Said]]) -> None:
    theirs = worlds[1][0]["table"]
    ours = {one.name: one.default for one in ATTRIBUTES if one.backfilled}
    assert {name: value for name, value in ours.items() if name in theirs} == theirs
    assert set(ours) - set(theirs) <= NEWER


def test_every_attribute_that_megatron_stamps_is_in_our_table_or_a_handle(ranks: list[Said]) -> None:
    for said in ranks:
        assert said["unknown"] == []


def test_attributes_are_the_live_ones_after_every_hop(ranks: list[Said]) -> None:
    """The ledger looked in the rank's own process; these are what it saw."""
    for said in ranks:
        seen = said["attributes"]
        assert list(seen) == ["live", "snapshot", "fp32 master", "move"]
        for values in seen.values():
            assert values == seen["live"]
        for name, param in said["live"].items():
            assert compare(param, said["copies"][name]) == ()


def test_a_row_bias_has_no_mark_at_all_and_a_gated_linear_has_stride_2(ranks: list[Said]) -> None:
    for said in ranks:
        values = said["attributes"]["live"]
        assert set(values["row.bias"]) == {"allreduce", "sequence_parallel"}
        assert values["gpt.decoder.layers.0.mlp.linear_fc1.weight"]["partition_stride"] == 2
        assert values["embedding.weight"]["partition_dim"] == 0


@pytest.mark.parametrize("which", ["live", "copies"])
def test_joining_shards_by_attributes_gives_the_whole_weight(
    worlds: dict[int, list[Said]], ranks: list[Said], which: str
) -> None:
    """Against Megatron's master weights, and for all parameters against the model at TP 1; bit for bit."""
    for name, master in ranks[0]["masters"].items():
        assert same_bits(whole(ranks, which, name), master.to(ranks[0][which][name].dtype))
    for name in ranks[0][which]:
        assert same_bits(whole(ranks, which, name), worlds[1][0]["live"][name].detach()), name


@pytest.mark.parametrize("world", [2, 4])
def test_joining_in_rank_order_scrambles_the_gated_weights(worlds: dict[int, list[Said]], world: int) -> None:
    """The fault: stride taken for 1. Only stride 2 tells, so the check above can fail."""
    wrong = set()
    for name, param in worlds[world][0]["live"].items():
        if read(param).partition_stride == 2 and not name.endswith("bias"):
            naive = join([said["live"][name].detach() for said in worlds[world]], read(param).partition_dim)
            if not same_bits(naive, worlds[1][0]["live"][name].detach()):
                wrong.add(name.removeprefix("gpt.decoder.layers."))
    assert wrong == {"gated.weight", "0.mlp.linear_fc1.weight", "1.mlp.linear_fc1.weight"}


def test_our_backfill_fills_in_what_megatrons_helper_does(ranks: list[Said]) -> None:
    for said in ranks:
        assert said["filled differently"] == []
        assert said["setter refuses"]


def test_the_ledger_finds_what_megatrons_own_master_copy_leaves_behind(ranks: list[Said]) -> None:
    """Its helper carries its table and ``shared`` only: expert and sequence-parallel marks are gone."""
    for said in ranks:
        carried = {*said["table"], "shared"}
        expected = {
            (name, attribute)
            for name, values in said["attributes"]["live"].items()
            for attribute in values
            if attribute not in carried
        }
        assert {tuple(found[:2]) for found in said["lost"]} == expected
        assert ("row.bias", "sequence_parallel") in expected
        assert ("expert row.bias", "allreduce") in expected


def test_the_same_ranks_speak_for_a_parameter(ranks: list[Said]) -> None:
    for rank, said in enumerate(ranks):
        ours = {
            name: is_not_duplicate(copy, rank, said["expert rank"]) for name, copy in said["copies"].items()
        }
        assert ours == said["speaks"]


def test_some_rule_is_needed_for_experts(worlds: dict[int, list[Said]]) -> None:
    """The fault: experts counted by the dense group, as a copy without ``allreduce`` would be."""
    said = worlds[4][2]
    bias = fresh_copy(said["copies"]["expert row.bias"])
    assert is_not_duplicate(bias, 2, said["expert rank"]) == said["speaks"]["expert row.bias"] is True
    del bias.allreduce  # type: ignore[attr-defined]
    assert not is_not_duplicate(bias, 2, said["expert rank"])


@pytest.mark.parametrize(("key", "norm_type"), [("norm 1.0", 1.0), ("norm 2.0", 2.0), ("norm inf", math.inf)])
def test_our_norm_of_real_gradients_is_megatrons(ranks: list[Said], key: str, norm_type: float) -> None:
    """One batch through the model; Megatron sums in float32."""
    for said in ranks:
        assert grad_norm(grads_of(ranks), norm_type) == pytest.approx(said["statistics"][key], rel=1e-6)
        assert count_zeros(grads_of(ranks)) == said["statistics"]["zeros"]


@pytest.mark.parametrize("world", [2, 4])
def test_the_norm_over_tp_is_the_unsharded_models(worlds: dict[int, list[Said]], world: int) -> None:
    right = grad_norm(grads_of(worlds[1]))
    assert grad_norm(grads_of(worlds[world])) == pytest.approx(right, rel=1e-5)


@pytest.mark.parametrize("world", [2, 4])
def test_without_the_mark_the_norm_is_too_small(worlds: dict[int, list[Said]], world: int) -> None:
    """The fault, on real gradients."""
    bare = [
        RankGrads(
            {
                name: (TPAttributes({}).stamp(fresh_copy(param)), grad)
                for name, (param, grad) in rank.params.items()
            },
            rank.tp_rank,
        )
        for rank in grads_of(worlds[world])
    ]
    first = grads_of(worlds[world])[0].params.values()
    assert grad_norm(bare) == pytest.approx(
        math.sqrt(sum(float(g.double().square().sum()) for _, g in first))
    )
    assert grad_norm(bare) < 0.95 * grad_norm(grads_of(worlds[world]))


def test_our_reduction_of_replicated_gradients_is_megatrons(ranks: list[Said]) -> None:
    before = [said["reduction"] for said in ranks]
    given = [
        RankGrads({name: (param, said["before"][name]) for name, param in said["params"].items()}, rank)
        for rank, said in enumerate(before)
    ]
    reduced = reduce_replicated(given, sequence_parallel=True)
    for said, ours in zip(before, reduced, strict=True):
        after: Mapping[str, Tensor] = said["after"]
        for name, (_, grad) in ours.params.items():
            assert torch.allclose(grad, after[name], rtol=1e-6, atol=1e-6), name
        if len(ranks) > 1:
            changed = {name for name in after if not same_bits(after[name], said["before"][name])}
            assert changed == {"row.bias", "helper"}
