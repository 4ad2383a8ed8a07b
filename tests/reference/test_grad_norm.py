"""Norm and zeros over TP ranks are those of the unsharded model; every lost attribute makes them wrong.

Gradients are small whole numbers, so every sum of squares is exact and equality is too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.grad_norm import (
    RankGrads,
    clip_factor,
    count_zeros,
    grad_norm,
    is_not_duplicate,
)
from weightsync.reference.params import TPAttributes, read
from weightsync.reference.shards import split
from weightsync.testing.grads import SHARD, entry, forget, whole_numbers
from weightsync.testing.strategies import TPLayout, tp_layouts

EXPERT = TPAttributes({**SHARD.values, "allreduce": False})


def squares(grads: Sequence[Tensor]) -> float:
    return sum(float(grad.square().sum()) for grad in grads)


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Tensor], list[RankGrads]]:
    """The gradients of an unsharded model, and the TP ranks that hold it: shards, replicas, frozen ones."""
    world = draw(st.integers(1, 4))
    full, ranks = {}, [RankGrads({}, rank) for rank in range(world)]
    for number in range(draw(st.integers(1, 4))):
        layout: TPLayout | None = draw(st.none() | tp_layouts().map(lambda one: fit(one, world)))
        shape = layout.shape if layout else draw(st.lists(st.integers(0, 3), max_size=2))
        full[f"w{number}"] = grad = draw(whole_numbers(shape))
        sequence_parallel = TPAttributes({"sequence_parallel": True} if draw(st.booleans()) else {})
        for rank, params in enumerate(ranks):
            made = (
                entry(split(grad, world, rank, layout.dim, layout.stride, layout.sizes), layout.attributes)
                if layout
                else entry(grad.clone(), sequence_parallel)
            )
            ranks[rank] = replace(
                params, params={**params.params, f"w{number}": made, f"frozen{number}": entry(None)}
            )
    return full, ranks


def fit(layout: TPLayout, world: int) -> TPLayout:
    """The same kind of cut for ``world`` ranks."""
    shape = list(layout.shape)
    shape[layout.dim] = shape[layout.dim] // layout.world * world
    return replace(layout, shape=tuple(shape), world=world)


@given(model=models())
def test_the_norm_over_the_ranks_is_that_of_the_unsharded_model(
    model: tuple[dict[str, Tensor], list[RankGrads]],
) -> None:
    full, ranks = model
    assert grad_norm(ranks) == math.sqrt(squares(list(full.values())))
    assert grad_norm(ranks, 1.0) == sum(float(grad.abs().sum()) for grad in full.values())
    assert grad_norm(ranks, math.inf) == max(
        (float(grad.abs().max()) for grad in full.values() if grad.numel()), default=0
    )
    assert count_zeros(ranks) == sum(int(grad.eq(0).sum()) for grad in full.values())


@given(model=models())
def test_without_the_mark_the_norm_is_exactly_that_of_rank_0(
    model: tuple[dict[str, Tensor], list[RankGrads]],
) -> None:
    """The fault: a bare copy of every shard. Only the first rank speaks, and nothing fails."""
    _, ranks = model
    bare = forget(ranks, "tensor_model_parallel")
    first = [grad for _, grad in ranks[0].params.values() if grad is not None]
    assert grad_norm(bare) == math.sqrt(squares(first)) <= grad_norm(ranks)
    assert count_zeros(bare) == sum(int(grad.eq(0).sum()) for grad in first)
    assert clip_factor(grad_norm(bare), 1.0) >= clip_factor(grad_norm(ranks), 1.0)


@given(model=models())
def test_the_norm_of_copies_that_carry_attributes_is_that_of_the_live_parameters(
    model: tuple[dict[str, Tensor], list[RankGrads]],
) -> None:
    _, ranks = model
    assert grad_norm(forget(ranks)) == grad_norm(ranks)


def test_a_shard_lost_on_four_ranks_halves_the_norm_and_doubles_the_step() -> None:
    ranks = [RankGrads({"w": entry(torch.tensor([3.0, 4.0]), SHARD)}, rank) for rank in range(4)]
    assert (grad_norm(ranks), grad_norm(forget(ranks, "tensor_model_parallel"))) == (10.0, 5.0)
    assert clip_factor(10.0, 1.0) == pytest.approx(0.1)
    assert clip_factor(0.5, 1.0) == 1.0


def test_a_duplicated_parameter_counts_once_whatever_its_mark_says() -> None:
    marked = TPAttributes({**SHARD.values, "parallel_mode": "duplicated"})
    ranks = [RankGrads({"w": entry(torch.tensor([3.0, 4.0]), marked)}, rank) for rank in range(2)]
    assert grad_norm(ranks) == 5.0
    assert grad_norm(forget(ranks, "parallel_mode")) == math.sqrt(50)


@given(st.data())
def test_a_tied_embedding_is_counted_once(data: st.DataObject) -> None:
    """First and last pipeline stage hold it, cut over TP, with the same gradient after their reduction."""
    tp = data.draw(st.integers(1, 3))
    embedding = data.draw(whole_numbers((2 * tp, 2)))
    other = data.draw(whole_numbers((3,)))
    first = TPAttributes({**SHARD.values, "shared_embedding": True})
    last = TPAttributes({**first.values, "shared": True})
    ranks = [
        RankGrads(
            {
                "e": entry(split(embedding, tp, rank, 0), marks),
                **({"n": entry(other)} if marks is last else {}),
            },
            rank,
        )
        for marks in (first, last)
        for rank in range(tp)
    ]
    assert grad_norm(ranks) == math.sqrt(squares([embedding, other]))
    assert count_zeros(ranks) == int(embedding.eq(0).sum() + other.eq(0).sum())
    assert grad_norm(forget(ranks, "shared")) == math.sqrt(2 * squares([embedding]) + squares([other]))


@given(st.data())
def test_expert_parameters_go_by_the_expert_group(data: st.DataObject) -> None:
    """Dense TP 4 is expert TP 2 times expert parallel 2: each pair of ranks has experts of its own."""
    expert_tp = data.draw(st.sampled_from([1, 2, 4]))
    dense, norm = data.draw(whole_numbers((4, 2))), data.draw(whole_numbers((2,)))
    experts = [data.draw(whole_numbers((4, 3))) for _ in range(4 // expert_tp)]
    biases = [data.draw(whole_numbers((3,))) for _ in experts]
    bias = TPAttributes({"allreduce": False})
    ranks = []
    for rank in range(4):
        number, inside = divmod(rank, expert_tp)
        params = {
            "dense": entry(split(dense, 4, rank, 0), SHARD),
            "norm": entry(norm),
            "expert": entry(split(experts[number], expert_tp, inside, 0), EXPERT if expert_tp > 1 else bias),
            "expert bias": entry(biases[number], bias),
        }
        ranks.append(RankGrads(params, rank, inside))
    right = math.sqrt(squares([dense, norm, *experts, *biases]))
    assert grad_norm(ranks) == right
    lost = math.sqrt(squares([dense, norm, *(experts if expert_tp > 1 else experts[:1]), biases[0]]))
    assert grad_norm(forget(ranks, "allreduce")) == lost
    assert grad_norm([replace(rank, expert_tp_rank=None) for rank in ranks]) == lost


def test_a_norm_group_has_a_norm_of_its_own() -> None:
    own = TPAttributes({**SHARD.values, "grad_norm_group": "mtp"})
    params = {"w": entry(torch.tensor([3.0, 0.0]), SHARD), "head": entry(torch.tensor([4.0, 0.0]), own)}
    ranks = [RankGrads(params, 0)]
    assert (grad_norm(ranks), grad_norm(ranks, group="mtp")) == (3.0, 4.0)
    assert grad_norm(forget(ranks, "grad_norm_group")) == 5.0
    assert count_zeros(ranks) == 2


def test_a_nan_gradient_makes_every_norm_nan() -> None:
    ranks = [RankGrads({"w": entry(torch.tensor([math.nan, 1.0]), SHARD)}, 0)]
    assert all(math.isnan(grad_norm(ranks, kind)) for kind in (1.0, 2.0, math.inf))


def rank_zero_only(param: Tensor, tp_rank: int, expert_tp_rank: int | None = None) -> bool:
    return tp_rank == 0


def dense_group_only(param: Tensor, tp_rank: int, expert_tp_rank: int | None = None) -> bool:
    return read(param).sharded or tp_rank == 0


def flag_only(param: Tensor, tp_rank: int, expert_tp_rank: int | None = None) -> bool:
    return bool(read(param).values.get("tensor_model_parallel")) or tp_rank == 0


def every_rank(param: Tensor, tp_rank: int, expert_tp_rank: int | None = None) -> bool:
    return True


CASES: Mapping[str, tuple[TPAttributes, int, int | None, bool]] = {
    "shard, first rank": (SHARD, 0, None, True),
    "shard, other rank": (SHARD, 1, None, True),
    "replica, first rank": (TPAttributes({}), 0, None, True),
    "replica, other rank": (TPAttributes({"tensor_model_parallel": False}), 1, None, False),
    "duplicated": (TPAttributes({**SHARD.values, "parallel_mode": "duplicated"}), 1, None, False),
    "expert shard": (EXPERT, 3, 1, True),
    "expert replica, first of its group": (TPAttributes({"allreduce": False}), 2, 0, True),
    "expert replica, other of its group": (TPAttributes({"allreduce": False}), 2, 1, False),
    "expert replica without a group": (TPAttributes({"allreduce": False}), 2, None, False),
    "dense replica in a world with expert groups": (TPAttributes({"allreduce": True}), 2, 0, False),
}


def broken(rule: Callable[[Tensor, int, int | None], bool]) -> list[str]:
    return [
        name
        for name, (attributes, tp_rank, expert_tp_rank, counts) in CASES.items()
        if rule(attributes.stamp(torch.zeros(1)), tp_rank, expert_tp_rank) != counts
    ]


def test_the_rule_for_duplicates_and_four_wrong_ones() -> None:
    assert broken(is_not_duplicate) == []
    assert "shard, other rank" in broken(rank_zero_only)
    assert broken(dense_group_only) == ["expert replica, first of its group"]
    assert "duplicated" in broken(flag_only)
    assert "replica, other rank" in broken(every_rank)
