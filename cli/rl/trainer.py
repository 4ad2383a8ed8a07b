"""RlTrainer: one trainer rank of the RL job as every workload's trainer is run: collect, step, export."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor
from torch.nn import Parameter

from weightsync.cli.rl.learner import Learner
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.rl.task import Questions

SampleSource = Callable[[int, Questions], Samples]
"""From the number of an optimizer step, from 1, and its questions to the samples that the rollouts drew for it."""


class RlTrainer:
    """A Learner with its samples. The first ``step`` learns nothing: its update seeds the rollouts.

    Args:
        learner: this rank's learner.
        source: gives every rank the same samples; may block until they are drawn.
    """

    def __init__(self, learner: Learner, source: SampleSource) -> None:
        self.learner = learner
        self.steps = 0
        self._source = source
        self._batch: tuple[Questions, Samples] | None = None

    @property
    def params(self) -> Mapping[str, Parameter]:
        """Runtime name -> this rank's live parameter with real TP attributes; changed in place by ``step``."""
        return self.learner.params

    def collect(self) -> None:
        """Get the samples of the next step; blocks."""
        if self.steps:
            questions = self.learner.task.questions(self.steps)
            self._batch = questions, self._source(self.steps, questions)

    def step(self) -> dict[str, float]:
        """Take one optimizer step, a collective of the trainer's ranks; see ``Learner.learn`` for what comes back."""
        self.steps += 1
        if self._batch is None:
            return {}
        batch, self._batch = self._batch, None
        return self.learner.learn(self.steps - 1, *batch)

    def export(self) -> dict[str, Tensor] | None:
        """Hugging Face name -> whole tensor, at rank 0; None elsewhere. A collective of the trainer's ranks."""
        return self.learner.export()
