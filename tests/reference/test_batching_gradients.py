"""However a batch is cut, over iterations, ranks and micro-batches, its gradient is that of the whole.

Tolerance: sums of at most a few hundred float64 terms in another order, so 1e-12 relative to the gradient's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis.errors import NoSuchExample
from torch import Tensor

from weightsync.reference.batching import microbatch, scaling
from weightsync.reference.batching.minibatch import ranges, rechunked
from weightsync.reference.batching.scaling import Share, for_megatron, share, step_weights
from weightsync.testing.batches import Job, divisors, jobs, microbatches, parameters, plain_loss, shares_of

CLOSE = 1e-12


def gradient(loss: Tensor, params: Sequence[Tensor]) -> Tensor:
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(params))])


def close(a: Tensor, b: Tensor, scale: float = 1.0) -> bool:
    return bool((a - b).norm() <= CLOSE * (1 + b.norm() + scale))


def steps_of(job: Job) -> tuple[range, ...]:
    return ranges(rechunked(job.each, job.iterations))


def step_gradients(
    job: Job, params: Sequence[Tensor], of: Callable[..., Share] = share, only: int | None = None
) -> list[Tensor]:
    """Per optimizer step, or of the ``only`` one, its gradient, summed over ranks and micro-batches."""
    plan, parts = microbatches(job), divisors(job, steps_of(job))
    found = []
    for number, divisor in enumerate(parts):
        if only not in (None, number):
            continue
        shares = [
            added
            for rank in range(job.dp)
            for one in plan[rank][number]
            for added in shares_of(job, params, rank, one, divisor, of)
        ]
        found.append(gradient(torch.stack([added.loss for added in shares]).sum(), params))
    return found


def wrong_pieces(job: Job, of: Callable[..., Share] = share) -> bool:
    """True unless the steps' gradients, weighted, are the whole batch's."""
    params = parameters()
    weights = step_weights(divisors(job, steps_of(job)))
    pieces = step_gradients(job, params, of)
    found = torch.stack([weight * piece for weight, piece in zip(weights, pieces, strict=True)]).sum(0)
    return not close(found, gradient(plain_loss(params, job.samples, job.per), params))


@given(jobs())
def test_the_weighted_gradients_of_the_pieces_are_that_of_the_whole_batch(job: Job) -> None:
    assert not wrong_pieces(job)


@given(jobs())
def test_each_piece_has_the_gradient_of_its_own_samples(job: Job) -> None:
    params = parameters()
    for step, found in zip(steps_of(job), step_gradients(job, params), strict=True):
        own = [job.local(rank)[number] for number in step for rank in range(job.dp)]
        assert close(found, gradient(plain_loss(params, own, job.per), params))


@given(jobs())
def test_shares_count_each_sample_and_token_once_and_dummies_not_at_all(job: Job) -> None:
    params, plan, parts = parameters(), microbatches(job), divisors(job, steps_of(job))
    for number, divisor in enumerate(parts):
        samples = tokens = 0
        for rank in range(job.dp):
            for one in plan[rank][number]:
                for added in shares_of(job, params, rank, one, divisor):
                    samples, tokens = samples + added.samples, tokens + added.tokens
                    if one.dummy:
                        assert float(added.loss.detach()) == 0.0
                        assert not gradient(added.loss, params).any()
        assert samples == len(steps_of(job)[number]) * job.dp
        assert divisor.amount == (samples if job.per == "sample" else tokens)


@given(jobs())
def test_megatron_gets_the_same_gradient_through_its_own_averages(job: Job) -> None:
    """Megatron: loss / microbatches, mean over DP and CP; per token: sums, divided by the tokens that ranks report."""
    params, plan, parts = parameters(), microbatches(job), divisors(job, steps_of(job))
    right = step_gradients(job, params)
    for number, divisor in enumerate(parts):
        losses, ranks = [], job.dp * job.cp
        for rank in range(job.dp):
            count = len(plan[rank][number])
            for one in plan[rank][number]:
                for added in shares_of(job, params, rank, one, divisor):
                    loss = for_megatron(added.loss, divisor, microbatches=count, dp=job.dp, cp=job.cp)
                    losses.append(loss / count / ranks if job.per == "sample" else loss)
        total = gradient(torch.stack(losses).sum(), params)
        if job.per == "token":
            total /= divisor.amount * job.cp
        assert close(total, right[number])


@given(jobs())
@settings(max_examples=20)
def test_adamw_goes_where_a_plain_loop_goes(job: Job) -> None:
    """Plain: one loss per step, no ranks. Ours: the gradients of all ranks' micro-batches added up."""
    ours, plain = parameters(), parameters()
    optimizers = [torch.optim.AdamW(params, lr=0.05, weight_decay=0.1) for params in (ours, plain)]
    for number, step in enumerate(steps_of(job)):
        flat = step_gradients(job, ours, only=number)[0]
        for param, grad in zip(ours, flat.split([param.numel() for param in ours]), strict=True):
            param.grad = grad.view_as(param)
        own = [job.local(rank)[one] for one in step for rank in range(job.dp)]
        loss = plain_loss(plain, own, job.per)
        for param, grad in zip(plain, torch.autograd.grad(loss, plain), strict=True):
            param.grad = grad
        for optimizer in optimizers:
            optimizer.step()
        for a, b in zip(ours, plain, strict=True):
            # AdamW divides by sqrt(v) + 1e-8: where a gradient is rounding noise alone, so is its step.
            assert torch.allclose(a, b, rtol=1e-7, atol=1e-6)


@given(jobs())
def test_one_iteration_is_no_split_at_all(job: Job) -> None:
    job = replace(job, iterations=1)
    assert steps_of(job) == (range(job.each),)
    weights = step_weights(divisors(job, steps_of(job)))
    assert weights == (1.0,)


# ---- wrong ways, each of which the first property sees ----------------------------------------------------------


def whole_divisor(values: Any, masks: Any, divisor: scaling.Divisor, **more: Any) -> Share:
    """The divisor stays that of the unsplit batch: here, of twice as much."""
    return share(values, masks, replace(divisor, amount=2 * divisor.amount), **more)


def dummies_weigh(*args: Any, **more: Any) -> Share:
    return share(*args, **{**more, "dummy": False})


def chunk_means(values: Any, masks: Any, divisor: scaling.Divisor, **more: Any) -> Share:
    """Each micro-batch is divided by its own tokens, so that cuts weigh as much as tokens."""
    return share(
        values, masks, replace(divisor, amount=sum(scaling.token_counts(more["tokens_in_loss"]))), **more
    )


def partial_denominators(values: Any, masks: Any, divisor: scaling.Divisor, **more: Any) -> Share:
    """Context-parallel ranks divide by what they hold of a sample."""
    return share(values, masks, divisor, **{**more, "denominators": [int(mask.sum()) for mask in masks]})


@pytest.mark.parametrize("wrong", [whole_divisor, dummies_weigh, chunk_means, partial_denominators])
def test_a_wrong_way_is_seen(wrong: Callable[..., Share]) -> None:
    found = find(
        jobs(), lambda job: wrong_pieces(job, wrong), settings=settings(max_examples=500, database=None)
    )
    assert not wrong_pieces(found)


def test_a_dropped_tail_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = microbatch._exactly
    monkeypatch.setattr(microbatch, "_exactly", lambda *args: good(*args)[:1])
    find(jobs(), wrong_pieces, settings=settings(max_examples=500, database=None))


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    with pytest.raises(NoSuchExample):
        find(jobs(), wrong_pieces, settings=settings(max_examples=30, database=None))
