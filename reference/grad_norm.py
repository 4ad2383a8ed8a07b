"""What gradients must be worth under tensor parallelism: oracles that read the attributes, as a trainer does.

Plain functions over the lists of all ranks, in one process: nothing here communicates. A rank's list is what
that rank holds; the sums over ranks are those of Megatron's model-parallel group. Sums run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import read

CLIP_EPSILON = 1e-6
"""Megatron's addition to the norm before it divides by it."""


@dataclass(frozen=True, slots=True)
class RankGrads:
    """The parameters of one model-parallel rank and their gradients.

    Attributes:
        params: name -> (parameter, its gradient or None). Only the parameter's attributes are read.
        tp_rank: rank in its tensor-parallel group.
        expert_tp_rank: rank in its expert-tensor-parallel group; None when experts use the same group.
    """

    params: Mapping[str, tuple[Tensor, Tensor | None]]
    tp_rank: int
    expert_tp_rank: int | None = None


def is_not_shared(param: Tensor) -> bool:
    """False for the copy of a tied embedding that another stage speaks for."""
    return not read(param).values.get("shared", False)


def is_not_duplicate(param: Tensor, tp_rank: int, expert_tp_rank: int | None = None) -> bool:
    """True when this rank speaks for ``param``: always for a shard, otherwise on the group's first rank.

    An expert parameter (``allreduce`` False) goes by its rank in the expert group, when there is one. A tensor
    that is marked as a shard and as duplicated is a duplicate; Megatron would look at the mark alone.
    """
    attributes = read(param)
    if attributes.sharded:
        return True
    expert = not attributes.values.get("allreduce", True)
    rank = expert_tp_rank if expert and expert_tp_rank is not None else tp_rank
    return rank == 0


def counted(rank: RankGrads) -> Iterator[tuple[Tensor, Tensor]]:
    """Every parameter that has a gradient and for which this rank speaks, with the gradient."""
    for param, grad in rank.params.values():
        if (
            grad is not None
            and is_not_shared(param)
            and is_not_duplicate(param, rank.tp_rank, rank.expert_tp_rank)
        ):
            yield param, grad.detach()


def grad_norm(ranks: Sequence[RankGrads], norm_type: float = 2.0, group: str | None = None) -> float:
    """The norm of the whole model's gradient, every element counted once; 0.0 without any.

    Args:
        ranks: all model-parallel ranks.
        norm_type: p of the p-norm; ``math.inf`` for the largest magnitude.
        group: the ``grad_norm_group`` to measure; None for all parameters that name none.
    """
    sizes = [
        grad.to("cpu", torch.float64).abs().flatten()
        for rank in ranks
        for param, grad in counted(rank)
        if read(param).values.get("grad_norm_group") == group
    ]
    every = torch.cat([torch.zeros(1, dtype=torch.float64), *sizes])
    if norm_type == math.inf:
        return every.max().item()
    total = every.pow(norm_type).sum().item()
    return math.sqrt(total) if norm_type == 2.0 else float(total ** (1.0 / norm_type))


def clip_factor(norm: float, max_norm: float) -> float:
    """What every gradient is multiplied by, so that the norm is at most ``max_norm``; never above 1."""
    return min(1.0, max_norm / (norm + CLIP_EPSILON))


def count_zeros(ranks: Sequence[RankGrads]) -> int:
    """Elements of the whole model's gradient that are zero, of either sign, each counted once."""
    return sum(grad.numel() - int(grad.count_nonzero()) for rank in ranks for _, grad in counted(rank))


def reduce_replicated(
    ranks: Sequence[RankGrads], *, sequence_parallel: bool, qk_layernorm: bool = False
) -> list[RankGrads]:
    """The gradients of one TP group after the reduction of those that are replicated but computed in parts.

    A parameter with ``average_gradients_across_tp_domain`` gets the mean over the ranks. Otherwise one with
    ``sequence_parallel`` gets the sum, when the model runs sequence-parallel, and so do norms on heads. All
    others keep theirs.

    Args:
        ranks: one per TP rank, in rank order.
        sequence_parallel: whether the model runs sequence-parallel.
        qk_layernorm: whether it has norms on heads; they go by name, since they carry no attribute.

    Returns:
        As many ranks; reduced gradients are new tensors of their old dtype, summed in float64.

    Raises:
        PlanMismatch: the ranks do not agree on how a parameter is reduced, so that a collective would hang or
            add unlike tensors.
    """
    rules = [
        {
            name: _reduction(name, param, sequence_parallel, qk_layernorm)
            for name, (param, grad) in rank.params.items()
            if grad is not None
        }
        for rank in ranks
    ]
    for number, rule in enumerate(rules):
        if rule != rules[0]:
            names = sorted(name for name in {**rules[0], **rule} if rule.get(name) != rules[0].get(name))
            raise PlanMismatch(
                f"ranks 0 and {number} reduce the gradients of {names} in different ways, expected the same; "
                "carry sequence_parallel and average_gradients_across_tp_domain on every rank"
            )
    reduced = [dict(rank.params) for rank in ranks]
    for name, how in rules[0].items() if rules else ():
        if how == "keep":
            continue
        grads = [grad for rank in ranks if (grad := rank.params[name][1]) is not None]
        total = torch.stack([grad.detach().double() for grad in grads]).sum(0)
        result = total / len(grads) if how == "mean" else total
        for number, rank in enumerate(ranks):
            reduced[number][name] = (rank.params[name][0], result.to(grads[number].dtype, copy=True))
    return [
        RankGrads(new, rank.tp_rank, rank.expert_tp_rank) for new, rank in zip(reduced, ranks, strict=True)
    ]


def _reduction(name: str, param: Tensor, sequence_parallel: bool, qk_layernorm: bool) -> str:
    values = read(param).values
    if values.get("average_gradients_across_tp_domain", False):
        return "mean"
    if sequence_parallel and values.get("sequence_parallel", False):
        return "sum"
    if qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name):
        return "sum"
    return "keep"
