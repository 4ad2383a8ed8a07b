"""Gradients that are computed in parts are summed over the TP ranks, others averaged, the rest left alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.grad_norm import RankGrads, grad_norm, reduce_replicated
from weightsync.reference.params import TPAttributes, carry, same_bits
from weightsync.testing.grads import SHARD, entry, forget, whole_numbers


@given(st.data())
def test_parts_are_summed_means_are_averaged_and_the_rest_is_left_alone(data: st.DataObject) -> None:
    """Sequence-parallel: each rank saw some of the tokens, and the whole gradient is the sum over them."""
    world = data.draw(st.integers(1, 4))
    kinds = {
        "norm": TPAttributes({"sequence_parallel": True}),
        "mean": TPAttributes({"sequence_parallel": True, "average_gradients_across_tp_domain": True}),
        "replica": TPAttributes({"sequence_parallel": False}),
        "q_layernorm": TPAttributes({}),
        "shard": SHARD,
    }
    parts = {name: [data.draw(whole_numbers((3,))) for _ in range(world)] for name in kinds}
    ranks = [
        RankGrads(
            {name: entry(parts[name][rank], kinds[name]) for name in kinds} | {"frozen": entry(None)}, rank
        )
        for rank in range(world)
    ]
    before = {name: [part.clone() for part in parts[name]] for name in kinds}
    reduced = reduce_replicated(ranks, sequence_parallel=True, qk_layernorm=True)
    for rank, params in enumerate(reduced):
        got = {name: grad for name, (_, grad) in params.params.items() if grad is not None}
        assert got.keys() == kinds.keys()
        assert same_bits(got["norm"], sum(parts["norm"], torch.zeros(3)))
        assert same_bits(got["q_layernorm"], sum(parts["q_layernorm"], torch.zeros(3)))
        assert torch.allclose(got["mean"] * world, sum(parts["mean"], torch.zeros(3)))
        assert same_bits(got["replica"], parts["replica"][rank])
        assert same_bits(got["shard"], parts["shard"][rank])
        assert (params.tp_rank, params.expert_tp_rank) == (rank, None)
    assert all(
        same_bits(part, old) for name in kinds for part, old in zip(parts[name], before[name], strict=True)
    )
    plain = reduce_replicated(ranks, sequence_parallel=False)
    for rank in range(world):
        for name in ("norm", "q_layernorm"):
            assert plain[rank].params[name][1] is parts[name][rank]


WRONG: dict[str, Callable[[list[RankGrads]], list[RankGrads]]] = {
    "no reduction": lambda ranks: ranks,
    "the mark is lost": lambda ranks: reduce_replicated(
        forget(ranks, "sequence_parallel"), sequence_parallel=True
    ),
    "the mean of parts": lambda ranks: reduce_replicated(
        [
            replace(rank, params={n: (averaged(param), grad) for n, (param, grad) in rank.params.items()})
            for rank in ranks
        ],
        sequence_parallel=True,
    ),
}


def averaged(param: Tensor) -> Tensor:
    copied = carry(param, torch.zeros(1))
    copied.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
    return copied


def test_after_the_right_reduction_ranks_agree_and_give_the_whole_gradient() -> None:
    norm = TPAttributes({"sequence_parallel": True})
    parts = [torch.tensor([3.0, 1.0]), torch.tensor([0.0, 3.0])]
    ranks = [RankGrads({"norm": entry(part, norm)}, rank) for rank, part in enumerate(parts)]

    def right(reduced: Sequence[RankGrads]) -> bool:
        return all(torch.equal(rank.params["norm"][1], torch.tensor([3.0, 4.0])) for rank in reduced)

    reduced = reduce_replicated(ranks, sequence_parallel=True)
    assert right(reduced)
    assert grad_norm(reduced) == 5.0
    for wrong in WRONG.values():
        assert not right(wrong(ranks))
        assert grad_norm(wrong(ranks)) != 5.0


def test_ranks_that_do_not_agree_on_a_reduction_are_refused() -> None:
    """One rank lost the mark: a real collective would hang, or add unlike tensors."""
    norm = TPAttributes({"sequence_parallel": True})
    ranks = [
        RankGrads({"norm": entry(torch.ones(2), norm), "w": entry(torch.ones(2), SHARD)}, rank)
        for rank in (0, 1)
    ]
    lost = [ranks[0], *forget(ranks[1:], "sequence_parallel")]
    with pytest.raises(PlanMismatch, match=r"ranks 0 and 1 reduce the gradients of \['norm'\]"):
        reduce_replicated(lost, sequence_parallel=True)
    absent = [ranks[0], replace(ranks[1], params={"w": ranks[1].params["w"]})]
    with pytest.raises(PlanMismatch, match=r"\['norm'\]"):
        reduce_replicated(absent, sequence_parallel=True)
