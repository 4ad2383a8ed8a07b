"""Samples over the desk of a run: the lead asks the rollouts for them and hands them to the trainer's other ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from weightsync.cli.desk import Desk
from weightsync.cli.rl.sampling import Samples, joined, shares
from weightsync.cli.rl.task import Questions
from weightsync.reference.deployment import Deployment
from weightsync.reference.errors import WeightSyncError

GENERATE, SAMPLES = "generate", "samples"

ASKED = ("request", "step", "first", "questions", "answer_tokens", "group")
"""Keys of a GENERATE word that the leader of a rollout hands on to its other ranks."""


class LeadSamples:
    """The source of samples at the trainer's lead: deals each step's questions to the rollouts that hold weights.

    A rollout that is lost meanwhile, or refuses, is left out until it committed another update; the others answer
    its questions.

    Args:
        desk: the lead's.
        deployment: who is there.
        samples: per question.
        answer_tokens: of every answer.
        epoch: gives the trainer's present group epoch; ranks that meet under a new one meet anew.

    Attributes:
        able: numbers of the rollouts that are asked.
    """

    def __init__(
        self, desk: Desk, deployment: Deployment, samples: int, answer_tokens: int, epoch: Callable[[], int]
    ) -> None:
        self.able: set[int] = set()
        self._desk = desk
        self._deployment = deployment
        self._samples = samples
        self._answer_tokens = answer_tokens
        self._epoch = epoch
        self._requests = 0
        self._failures = 0
        self._why: dict[int, str] = {}

    def committed(self, members: Iterable[int]) -> None:
        """Take in that these rollouts hold the trainer's weights."""
        self.able = set(members)

    def __call__(self, step: int, questions: Questions) -> Samples:
        """The samples of a step, also handed to the trainer's other ranks. WeightSyncError when no rollout is left."""
        count = len(questions.tokens)
        samples = joined(self._ask(step, questions, 0, count), count * self._samples)
        self._desk.tell(self._deployment.trainers[1:], SAMPLES, samples=samples.to_json())
        return samples

    def _ask(self, step: int, questions: Questions, first: int, end: int) -> list[Samples]:
        if not self.able:
            words = "; ".join(f"rollout {number} {why}" for number, why in sorted(self._why.items()))
            raise WeightSyncError(
                f"no rollout is left to sample for step {step} ({words or 'none was ever updated'}); expected at least "
                "one that holds weights, so look at why they were lost"
            )
        self._requests += 1
        dealt = dict(zip(sorted(self.able), shares(end - first, len(self.able)), strict=True))
        asked = {number: (first + a, first + b) for number, (a, b) in dealt.items() if a < b}
        leaders = {number: self._deployment.rollouts[number].leader for number in asked}
        for number, (a, b) in asked.items():
            self._desk.tell(
                [leaders[number]], GENERATE, request=self._requests, step=step, first=a * self._samples,
                questions=questions.tokens[a:b].tolist(), answer_tokens=self._answer_tokens,
                group=f"tp/rollout{number}/{self._epoch()}.{self._failures}",
            )  # fmt: skip
        heard = self._desk.hear_all(leaders.values(), f"{SAMPLES} {self._requests}")
        found: list[Samples] = []
        failed: list[tuple[int, int]] = []
        for number, share in asked.items():
            word = heard.get(str(leaders[number]))
            if word is not None and word["samples"] is not None:
                found.append(Samples.of(word["samples"]))
            else:
                self.able.discard(number)
                self._why[number] = "is gone" if word is None else f"says: {word['reason']}"
                self._failures += 1
                failed.append(share)
        for a, b in failed:
            found += self._ask(step, questions, a, b)
        return found


class PeerSamples:
    """The source of samples at the trainer's other ranks: what the lead hands on.

    Args:
        desk: this rank's.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def __call__(self, step: int, questions: Questions) -> Samples:
        """The samples of a step; blocks until the lead has them."""
        return Samples.of(self._desk.hear()["samples"])
