"""Samples: what rollouts generate, how they are drawn, and the form in which they travel to the learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightsync.cli.rl.policy import Cache, Policy
from weightsync.reference.errors import WeightSyncError


@dataclass(frozen=True, eq=False)
class Samples:
    """Answers to a run of prompts, one row per sample.

    Attributes:
        first: number of the first sample within its step; sample i answers prompt ``(first + i) // samples``.
        tokens: (n, answer tokens) int64.
        logprobs: (n, answer tokens) float32, in nats, under the policy that drew them.
        version: the version that the rollout held.
    """

    first: int
    tokens: Tensor
    logprobs: Tensor
    version: int

    def to_json(self) -> dict[str, Any]:
        """JSON-ready, exactly; ``of`` is the inverse."""
        return {
            "first": self.first,
            "tokens": self.tokens.tolist(),
            "logprobs": self.logprobs.tolist(),
            "version": self.version,
        }

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Samples:
        """The samples that ``to_json`` wrote."""
        tokens = torch.tensor(data["tokens"], dtype=torch.int64)
        return cls(
            data["first"], tokens, torch.tensor(data["logprobs"], dtype=torch.float32), data["version"]
        )


def joined(parts: Sequence[Samples], total: int) -> Samples:
    """The samples of a whole step, in order, from ``parts`` in any order; the oldest version counts.

    Raises WeightSyncError when the parts are not exactly samples 0 to ``total`` - 1.
    """
    ordered = sorted(parts, key=lambda part: part.first)
    place = 0
    for part in ordered:
        if part.first != place:
            wrong = "missing" if part.first > place else "there twice"
            first, last = sorted((part.first, place))
            raise WeightSyncError(
                f"samples {first} to {last - 1} of a step are {wrong}; expected each once, so look at what the "
                "rollouts were asked and what they answered"
            )
        place += len(part.tokens)
    if place != total:
        raise WeightSyncError(
            f"the rollouts gave {place} samples of a step; expected {total}, so look at what they were asked"
        )
    return Samples(
        0,
        torch.cat([part.tokens for part in ordered]),
        torch.cat([part.logprobs for part in ordered]),
        min(part.version for part in ordered),
    )


def uniforms(seed: int, step: int, first: int, count: int, tokens: int) -> Tensor:
    """One number in [0, 1) per sample and token, (count, tokens) float64: the same wherever a sample is drawn."""
    rows = [np.random.default_rng([seed, step, 1, first + row]).random(tokens) for row in range(count)]
    return torch.from_numpy(np.stack(rows))


def draw(
    turn: Callable[[], AbstractContextManager[Policy]], prompts: Tensor, uniform: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Sample one answer per prompt; every tensor-parallel rank calls it and gets the same.

    Args:
        turn: entered before each token, where it may wait, and left when no rank of the group reads a weight any more;
            gives the token's policy, whose weights may be newer than the last's.
        prompts: (n, P) int64.
        uniform: (n, answer tokens) float64 in [0, 1); token t is the first whose cumulated probability exceeds it.
        temperature: divides the scores.

    Returns:
        Tokens (n, answer tokens) int64 and their log-probabilities in nats, float32, at that temperature.
    """
    cache, tokens, logprobs = Cache(), [prompts], []
    for number in range(uniform.shape[1]):
        with turn() as policy:
            scores = policy.whole(policy.logits(tokens[-1], cache, last=1))[:, -1]
        log_p = (scores.double() / temperature).log_softmax(-1)
        cumulated = log_p.exp().cumsum(-1)
        chosen = torch.searchsorted(
            cumulated, uniform[:, number : number + 1] * cumulated[:, -1:], right=True
        )
        chosen = chosen.clamp_max(scores.shape[-1] - 1)
        tokens.append(chosen)
        logprobs.append(log_p.gather(-1, chosen).float())
    return torch.cat(tokens[1:], dim=-1), torch.cat(logprobs, dim=-1)


def shares(count: int, parts: int) -> list[tuple[int, int]]:
    """``count`` things dealt to ``parts`` takers: (first, end) of each, in order; sizes differ by one at most."""
    each, more = divmod(count, parts)
    bounds = [number * each + min(number, more) for number in range(parts + 1)]
    return list(pairwise(bounds))
