"""What each loss is divided by, so that gradients do not depend on how a step's samples were cut.

The divisor is that of the whole optimizer step: its samples or its tokens over all ranks, counted before micro-batches
are made. The mean over micro-batches of their own means is another number.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weightsync.reference.batching.collective import Reduce, alone
from weightsync.reference.errors import BatchError

Per = Literal["sample", "token"]
"""``sample``: each sample's mean over its tokens weighs the same. ``token``: each token weighs the same."""


@dataclass(frozen=True, slots=True)
class Divisor:
    """What the losses of one optimizer step are divided by; equal on all ranks.

    Attributes:
        per: what weighs the same.
        amount: samples of the step (``sample``) or its tokens in the loss (``token``), over all data-parallel ranks.
    """

    per: Per
    amount: int


@dataclass(frozen=True, slots=True)
class Share:
    """What one micro-batch adds to its step, on one rank; shares are added up.

    Attributes:
        loss: a scalar; the sum over all micro-batches of all ranks, context-parallel ones too, is the step's loss.
        samples: how many of the step's samples this was.
        tokens: how many tokens, as ``token_counts`` has them.
    """

    loss: Tensor
    samples: int
    tokens: int


def token_counts(tokens_in_loss: Sequence[int]) -> list[int]:
    """Tokens of each whole sample that count, 1 for a sample without any, as Megatron-based stacks have it."""
    return [max(1, count) for count in tokens_in_loss]


def step_divisors(
    per: Per, tokens_in_loss: Sequence[int], steps: Sequence[Sequence[int]], sum_reduce: Reduce = alone
) -> tuple[Divisor, ...]:
    """The divisor of each optimizer step. A collective of the data-parallel group, one for all steps.

    Args:
        per: what weighs the same.
        tokens_in_loss: of each whole sample of this rank, also where context parallelism cuts it.
        steps: the sample numbers of each step, as ``minibatch.ranges`` gives them; without dummies.
        sum_reduce: the sum over the data-parallel ranks; context-parallel ranks hold the same samples and count once.

    >>> step_divisors("token", [2, 6, 3], [range(0, 2), range(2, 3)])
    (Divisor(per='token', amount=8), Divisor(per='token', amount=3))
    """
    counts = token_counts(tokens_in_loss) if per == "token" else [1] * len(tokens_in_loss)
    amounts = sum_reduce([sum(counts[number] for number in step) for step in steps])
    if any(amount < 1 for amount in amounts):
        raise BatchError(
            f"the steps have {list(amounts)} {per}s; expected 1 at least in each, so leave no step empty"
        )
    return tuple(Divisor(per, amount) for amount in amounts)


def rollout_denominators(tokens_in_loss: Sequence[int], rollout_ids: Sequence[Hashable]) -> list[int]:
    """Per sample the tokens of all samples of its rollout, as the denominator of a mean over the rollout.

    To be called with a whole step, before micro-batches are made: they would see a part of a rollout.

    >>> rollout_denominators([2, 3, 4], ["a", "a", "b"])
    [5, 5, 4]
    """
    totals: dict[Hashable, int] = {}
    for rollout, count in zip(rollout_ids, tokens_in_loss, strict=True):
        totals[rollout] = totals.get(rollout, 0) + count
    return [totals[rollout] for rollout in rollout_ids]


def share(
    values: Sequence[Tensor],
    masks: Sequence[Tensor],
    divisor: Divisor,
    *,
    tokens_in_loss: Sequence[int],
    denominators: Sequence[int] | None = None,
    dummy: bool = False,
    first_cp: bool = True,
) -> Share:
    """What a micro-batch adds to its step.

    Args:
        values: per sample the loss of each token, (T,), differentiable; with context parallelism those of this rank,
            which may be none.
        masks: per sample which of them count, (T,) bool.
        divisor: of the whole step.
        tokens_in_loss: per sample how many of its tokens count: of the whole sample, whatever this rank holds of it.
        denominators: with ``divisor.per == "sample"``, what the sum over a sample's tokens is divided by, or 1 if that
            is 0; by default ``tokens_in_loss``; for means over rollouts, ``rollout_denominators``.
        dummy: the micro-batch is a dummy: everything is 0, and gradients are zeros, not absent, so that collectives of
            the backward pass happen on this rank as well.
        first_cp: this is context-parallel rank 0, which alone counts samples and tokens.

    Raises:
        BatchError: not one of everything per sample.
    """
    denominators = tokens_in_loss if denominators is None else denominators
    if not len(values) == len(masks) == len(tokens_in_loss) == len(denominators) > 0:
        raise BatchError(
            f"{len(values)} values, {len(masks)} masks, {len(tokens_in_loss)} token counts and {len(denominators)} "
            "denominators; expected one of each per sample of the micro-batch"
        )
    total = values[0].new_zeros(())
    for value, mask, denominator in zip(values, masks, denominators, strict=True):
        # Filled, not multiplied: what does not count may be infinite or NaN, and 0 * inf is NaN.
        kept = value.masked_fill(torch.ones_like(mask) if dummy else ~mask, 0.0).sum()
        total = total + (kept / max(1, denominator) if divisor.per == "sample" else kept)
    counts = not dummy and first_cp
    return Share(
        total / divisor.amount,
        len(values) if counts else 0,
        sum(token_counts(tokens_in_loss)) if counts else 0,
    )


def for_megatron(loss: Tensor, divisor: Divisor, *, microbatches: int, dp: int, cp: int = 1) -> Tensor:
    """The loss of a micro-batch as Megatron's schedule wants it, from ``Share.loss``.

    With ``per = "sample"`` Megatron divides a loss by the step's number of micro-batches and averages gradients over
    ``dp * cp`` ranks; this undoes both. With ``per = "token"`` (``calculate_per_token_loss``) it adds gradients up and
    divides them by the tokens that all ``dp * cp`` ranks report, so the sum comes back, times ``cp``, since each
    context-parallel rank reports a sample's tokens.

    Args:
        loss: ``Share.loss``.
        divisor: it was divided by this.
        microbatches: of the step on this rank, dummies included.
        dp: data-parallel ranks, context-parallel ones not counted.
        cp: context-parallel ranks.
    """
    return loss * (microbatches * dp * cp if divisor.per == "sample" else divisor.amount * cp)


def step_weights(divisors: Sequence[Divisor]) -> tuple[float, ...]:
    """The weight of each step's gradient in that of the unsplit batch, if the weights did not change in between.

    >>> step_weights([Divisor("sample", 2), Divisor("sample", 6)])
    (0.25, 0.75)
    """
    total = sum(one.amount for one in divisors)
    return tuple(one.amount / total for one in divisors)
