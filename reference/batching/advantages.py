"""Advantages: of the whole batch, once, before it is cut into mini-batches."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from weightsync.reference.errors import BatchError

EPS = 1e-4
"""Added to a deviation, so that a group of equal rewards teaches nothing."""


def group_advantages(
    rewards: Tensor,
    samples_per_prompt: int,
    algorithm: Literal["grpo", "reinforce"] = "grpo",
    eps: float = EPS,
) -> Tensor:
    """How much better each sample is than its peers, (n,), of the rewards' dtype.

    ``grpo``: against the other samples of its prompt, in their deviations (DeepSeekMath, 2402.03300, equation 4.1);
    ``reinforce``: against the mean of the whole batch.

    Args:
        rewards: (n,), samples of a prompt next to each other.
        samples_per_prompt: how many those are; divides n. GRPO needs 2.
        algorithm: which peers.
        eps: added to the deviation.

    Raises:
        BatchError: the samples are no whole groups, or a group has one sample only.
    """
    if algorithm == "reinforce":
        return rewards - rewards.mean()
    if samples_per_prompt < 2 or len(rewards) % samples_per_prompt:
        raise BatchError(
            f"{len(rewards)} rewards in groups of {samples_per_prompt}; expected whole groups of 2 samples or more"
        )
    groups = rewards.view(-1, samples_per_prompt)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + eps)).view(-1)


def whitened(values: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """``values`` with mean 0 and deviation 1 over those in ``mask``; of both the shape (n,) or (n, T).

    Of the whole batch over all ranks: whitening pieces one by one changes signs, and makes a single value 0.
    """
    kept = values[mask]
    if len(kept) < 2:
        raise BatchError(
            f"{len(kept)} values are to be whitened; expected 2 or more, so whiten the whole batch at once"
        )
    return (values - kept.mean()) * torch.rsqrt(kept.var() + eps)
