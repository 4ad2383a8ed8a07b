"""The RL job with all ranks in one process: each rank is a thread, its collectives are those of separate processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import Tensor
from torch.nn import Parameter

from weightsync.backends.store import local_store
from weightsync.cli.model.trainer import one_thread
from weightsync.cli.rl.engine import Generator
from weightsync.cli.rl.learner import Learner
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.sampling import Samples, joined, shares
from weightsync.cli.rl.task import Questions
from weightsync.cli.rl.trainer import RlTrainer
from weightsync.cli.scenario_tables import Workload
from weightsync.reference.deployment import Deployment
from weightsync.reference.members import RankId

T = TypeVar("T")


class LocalJob:
    """The trainer's ranks and the rollouts' engines; a trainer of a workload, for a process that holds all ranks.

    Args:
        folder: the checkpoint to start from.
        deployment: who holds what.
        work: the scenario's workload.
        weights: gives a rollout rank's live weights by runtime name; asked when samples are drawn.
    """

    def __init__(
        self,
        folder: Path,
        deployment: Deployment,
        work: Workload,
        weights: Callable[[RankId], Mapping[str, Tensor]],
    ) -> None:
        self._deployment = deployment
        self._work = work
        self._weights = weights
        self._drawn: tuple[int, Samples] | None = None
        self._trainers = groups(deployment.tp)
        self._groups = {rollout.number: groups(len(rollout.ranks)) for rollout in deployment.rollouts}
        self.ranks = [
            RlTrainer(Learner(folder, tp.rank, deployment, work, tp), self._samples) for tp in self._trainers
        ]

    def params_of(self, rank: int) -> Mapping[str, Parameter]:
        """Runtime name -> live parameter of one trainer rank."""
        return self.ranks[rank].params

    def collect(self) -> None:
        """Have every rollout draw its share of the next step's samples."""
        for rank in self.ranks:
            rank.collect()

    def step(self) -> dict[str, float]:
        """One optimizer step on all trainer ranks; what it says of itself."""
        return at_once([rank.step for rank in self.ranks], self._trainers)[0]

    def export(self) -> dict[str, Tensor]:
        """Hugging Face name -> whole tensor of the present weights."""
        whole = at_once([rank.export for rank in self.ranks], self._trainers)[0]
        if whole is None:
            raise TypeError("trainer rank 0 gave no export")
        return whole

    def _samples(self, step: int, questions: Questions) -> Samples:
        """The step's samples, drawn at the first call, for every trainer rank."""
        if self._drawn is None or self._drawn[0] != step:
            dealt = shares(len(questions.tokens), len(self._groups))
            parts = [
                self._draw(number, step, questions, first, end)
                for number, (first, end) in zip(self._groups, dealt, strict=True)
                if first < end
            ]
            self._drawn = step, joined(parts, len(questions.tokens) * self._work.rl.samples)
        return self._drawn[1]

    def _draw(self, number: int, step: int, questions: Questions, first: int, end: int) -> Samples:
        learner = self.ranks[0].learner
        place = first * self._work.rl.samples
        engines = [
            Generator(learner.config, self._weights(rank), self._work, tp)
            for rank, tp in zip(self._deployment.rollouts[number].ranks, self._groups[number], strict=True)
        ]
        tokens = learner.task.answer_tokens
        calls = [partial(one.generate, step, place, questions.tokens[first:end], tokens) for one in engines]
        answers, logprobs = at_once(calls, self._groups[number])[0]
        return Samples(place, answers, logprobs, version=step)


def at_once(calls: Sequence[Callable[[], T]], tps: Sequence[TensorParallel] = ()) -> list[T]:
    """The results of ``calls``, each in a thread of its own, as they wait for each other.

    Each computes with one thread, and afterwards new threads have as many as before, whoever ends last.

    Args:
        calls: one per rank.
        tps: per rank its place in the group in which they wait; closed where a call fails, so that none waits on.

    Raises:
        Exception: what the first call to fail raised.
    """
    if len(calls) == 1:
        return [calls[0]()]
    failures: list[Exception] = []

    def run(number: int) -> T:
        try:
            return calls[number]()
        except Exception as error:
            failures.append(error)
            for tp in tps[number : number + 1]:
                tp.close()
            raise

    with one_thread(), ThreadPoolExecutor(len(calls)) as threads:
        running = [threads.submit(run, number) for number in range(len(calls))]
    if failures:
        raise failures[0]
    return [one.result() for one in running]


def groups(size: int) -> list[TensorParallel]:
    """A tensor-parallel group of ``size`` ranks of this process, each rank's place in it, in order."""
    store = local_store()
    return at_once([partial(TensorParallel.over_gloo, store, "tp", rank, size) for rank in range(size)])
