"""Fault case 027: each micro-batch is divided by its own tokens, so the loss depends on how the batch was cut."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.batching.scaling import share, step_divisors

SUMS, TOKENS = (6.0, 1.0), (2, 6)


def values() -> list[Tensor]:
    return [torch.full((n,), total / n, dtype=torch.float64) for total, n in zip(SUMS, TOKENS, strict=True)]


def masks_of(tensors: list[Tensor]) -> list[Tensor]:
    return [torch.ones_like(one, dtype=torch.bool) for one in tensors]


def test_two_micro_batches_give_seven_eighths() -> None:
    """Fault case 027: 7 over 8 tokens; the mean of means is 1.5833."""
    divisor = step_divisors("token", TOKENS, [range(2)])[0]
    shares = [share([one], masks_of([one]), divisor, tokens_in_loss=[len(one)]) for one in values()]
    assert float(sum(one.loss for one in shares)) == 0.875
    assert sum(one.tokens for one in shares) == divisor.amount == 8
    assert sum(total / n for total, n in zip(SUMS, TOKENS, strict=True)) / 2 == pytest.approx(
        1.5833, abs=1e-4
    )


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("per", ["token", "sample"])
def test_the_gradient_is_the_unsplit_one(chunks: int, per: str) -> None:
    """Fault case 027: for 1, 2 and 4 chunks of four samples, of 2, 6, 1 and 3 tokens."""
    weight = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    generator = torch.Generator().manual_seed(0)
    counts = [2, 6, 1, 3]
    inputs = [torch.randn(n, 2, generator=generator, dtype=torch.float64) for n in counts]
    losses = [torch.tanh(one @ weight) for one in inputs]
    whole = torch.cat(losses).mean() if per == "token" else torch.stack([one.mean() for one in losses]).mean()
    (expected,) = torch.autograd.grad(whole, weight, retain_graph=True)
    divisor = step_divisors("token" if per == "token" else "sample", counts, [range(4)])[0]
    total, size = torch.zeros_like(expected), 4 // chunks
    for first in range(0, 4, size):
        part = losses[first : first + size]
        found = share(part, masks_of(part), divisor, tokens_in_loss=counts[first : first + size])
        total += torch.autograd.grad(found.loss, weight, retain_graph=True)[0]
    assert torch.allclose(total, expected, rtol=0, atol=1e-14)
