"""Fault case 026: ranks have different numbers of micro-batches, so one waits for a collective that never comes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.batching.microbatch import MicroBatch, dynamic_microbatches
from weightsync.reference.batching.scaling import share, step_divisors
from weightsync.testing.batches import each_rank

LENGTHS = ([4, 4], [6, 2, 5, 3])
CAP = 8


def planned(rank: int, reduce: Any) -> tuple[MicroBatch, ...]:
    lengths = LENGTHS[rank]
    return dynamic_microbatches(lengths, [len(lengths)], max_tokens=CAP, max_reduce=reduce)[0]


def losses(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(length, generator=generator, dtype=torch.float64) for length in LENGTHS[rank]]


def test_both_ranks_run_two_forwards_each_sample_once() -> None:
    """Fault case 026: rank 0 alone would run one."""
    plans = each_rank(2, planned, max)
    assert [len(plan) for plan in plans] == [2, 2]
    for plan, lengths in zip(plans, LENGTHS, strict=True):
        assert all(one.samples for one in plan)  # no empty cat()
        real = [one.samples for one in plan if not one.dummy]
        assert sorted(item for one in real for item in one) == list(range(len(lengths)))
        assert all(sum(lengths[item] for item in one) <= CAP for one in real)


@pytest.mark.parametrize("per", ["sample", "token"])
def test_the_loss_is_that_of_the_unsplit_batch(per: Any) -> None:
    """Fault case 026: whatever is divided by."""
    divisor = each_rank(
        2, lambda rank, reduce: step_divisors(per, LENGTHS[rank], [range(len(LENGTHS[rank]))], reduce), sum
    )[0][0]
    total = 0.0
    for rank, plan in enumerate(each_rank(2, planned, max)):
        for one in plan:
            values = [losses(rank)[item] for item in one.samples]
            masks = [torch.ones_like(value, dtype=torch.bool) for value in values]
            tokens = [len(value) for value in values]
            total += float(share(values, masks, divisor, tokens_in_loss=tokens, dummy=one.dummy).loss)
    every = [value for rank in (0, 1) for value in losses(rank)]
    right = torch.cat(every).mean() if per == "token" else torch.stack([one.mean() for one in every]).mean()
    assert total == pytest.approx(float(right), abs=1e-14)


def test_a_rank_with_fewer_samples_than_forwards_runs_dummies() -> None:
    """Fault case 026: one sample beside four long ones."""

    def plan(rank: int, reduce: Any) -> Sequence[MicroBatch]:
        lengths = ([3], [8, 8, 8, 8])[rank]
        return dynamic_microbatches(lengths, [len(lengths)], max_tokens=8, max_reduce=reduce)[0]

    short, long = each_rank(2, plan, max)
    assert [one.dummy for one in short] == [False, True, True, True]
    assert [one.samples for one in short] == [(0,)] * 4
    assert not any(one.dummy for one in long)


def test_a_dummy_weighs_nothing_even_where_a_loss_is_infinite() -> None:
    """Fault case 026: 0 times infinity would be NaN."""
    values = [torch.tensor([float("inf"), float("nan"), 1.0])]
    divisor = step_divisors("token", [3], [range(1)])[0]
    masks = [torch.ones(3, dtype=torch.bool)]
    found = share(values, masks, divisor, tokens_in_loss=[3], dummy=True)
    assert (float(found.loss), found.samples, found.tokens) == (0.0, 0, 0)


def test_without_a_group_the_counts_differ() -> None:
    """Fault case 026: the fault itself, no process group passed."""
    alone = [dynamic_microbatches(lengths, [len(lengths)], max_tokens=CAP)[0] for lengths in LENGTHS]
    assert [len(plan) for plan in alone] == [1, 2]
