"""Fault case 002: shards that never received attributes are shipped as if each were the whole parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.errors import (
    MissingTPAttributes,
    PlanMismatch,
    UnsupportedCapability,
)
from weightsync.reference.layouts import Layout, RowMap, export, plain, row_maps
from weightsync.reference.params import (
    ParamMeta,
    TPAttributes,
    backfill,
    fresh_copy,
    read,
    require,
    same_bits,
)
from weightsync.reference.shards import split

WORLD = 2
FULL = torch.arange(24.0).reshape(4, 6)
META = ParamMeta("experts.fc2.weight", torch.float32, (4, 6))
MARKS = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1, "allreduce": False}
TABLE = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def shards(values: Mapping[str, Any], full: Tensor = FULL, dim: int = 0) -> list[Tensor]:
    return [TPAttributes(values).stamp(Parameter(split(full, WORLD, rank, dim))) for rank in range(WORLD)]


def planned(local: list[Tensor], layout: Layout | None = None) -> list[dict[str, RowMap]]:
    """What every rank's plan is made of, before any byte is sent."""
    layouts = {META.name: layout or plain(META)}
    return [
        row_maps(layouts, {META.name: tensor}, rank, WORLD, {META.name: 0})
        for rank, tensor in enumerate(local)
    ]


def sent(local: list[Tensor]) -> Tensor:
    maps = planned(local)
    return export(maps, [{META.name: tensor} for tensor in local], (META,))[META.name]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"allreduce": False},
        {"partition_dim": 0, "partition_stride": 1},
        TABLE,
        {**MARKS, "partition_dim": -1},
    ],
    ids=["no attribute", "those of experts only", "no mark", "defaults filled in", "no dimension"],
)
def test_a_shard_that_does_not_say_how_it_is_cut_is_an_error_with_both_shapes(values: dict[str, Any]) -> None:
    """Fault case 002: in whatever way the mark is missing, and before any byte is sent."""
    with pytest.raises(MissingTPAttributes) as caught:
        sent(shards(values))
    for part in ("'experts.fc2.weight'", "[2, 6]", "[4, 6]"):
        assert part in str(caught.value)


@pytest.mark.parametrize("rank", range(WORLD))
def test_one_rank_without_attributes_is_enough(rank: int) -> None:
    """Fault case 002: grouped experts of one rank were wrapped by another class."""
    local = shards(MARKS)
    local[rank] = local[rank].detach().clone()
    with pytest.raises(MissingTPAttributes):
        planned(local)


def test_with_the_attributes_the_result_is_the_whole_parameter() -> None:
    """Fault case 002: exactly arange(24), never half of it under the full name."""
    assert same_bits(sent(shards(MARKS)), FULL)
    assert same_bits(sent([fresh_copy(shard) for shard in shards(MARKS)]), FULL)


def test_a_square_cut_along_the_wrong_dimension_does_not_pass_for_another() -> None:
    """Fault case 002: the historic second expert linear, cut along 1 and marked with dimension 0."""
    wrong = shards(MARKS, dim=1)
    with pytest.raises(PlanMismatch, match=r"\[4, 3\]"):
        planned(wrong)


def test_a_replicated_parameter_may_be_without_attributes_only_when_declared() -> None:
    """Fault case 002: the rule by which missing metadata is recovered is written down, not guessed."""
    whole = [FULL.clone() for _ in range(WORLD)]
    with pytest.raises(MissingTPAttributes):
        planned(whole)
    maps = planned(whole, plain(META, replicated=True))
    assert [one[META.name].owned_elements(0) for one in maps] == [24, 0]


def test_filling_in_defaults_over_the_loss_is_refused_too() -> None:
    """Fault case 002: afterwards a shard of the same shape as the whole would pass as replicated."""
    bare = FULL.clone()
    with pytest.raises(MissingTPAttributes, match="not declared replicated"):
        backfill(fresh_copy(bare), bare, META.name)
    assert read(bare).values == {}


def test_the_fault_itself_is_not_seen_once_defaults_are_in_and_shapes_agree() -> None:
    """Fault case 002: why the order matters. What the ledger recorded still tells."""
    live = Parameter(FULL.clone())
    TPAttributes(MARKS).stamp(live)
    ledger = AttributeLedger({META.name: live})
    lost = TPAttributes(TABLE).stamp(live.detach().clone())
    assert not require(lost, META.name, full_shape=(4, 6)).sharded
    with pytest.raises(Exception, match=r"'send': tensor_model_parallel of parameter .* is False"):
        ledger.check("send", {META.name: lost})


def test_a_shard_that_is_cut_twice_is_not_taken_for_a_shard() -> None:
    """Fault case 002: a GTP shard carries every TP attribute, and is still no TP shard."""
    with pytest.raises(UnsupportedCapability, match="GTP shard"):
        planned(shards({**MARKS, "is_gtp_weight_remat": True}))
