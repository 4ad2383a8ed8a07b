"""One update of one trainer rank, watched from its start to its end, and told to whoever asked for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weightsync.reference.metrics import UpdateMetrics, deliver, update_metrics
from weightsync.reference.protocol import Outcome

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer


class Watched:
    """An update that begins now.

    Args:
        trainer: the rank whose update it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.start_ns = trainer.verbs.now_ns()
        self.first = len(trainer.verbs.trace.spans)

    def end(self, outcome: Outcome, error: Exception | None = None) -> None:
        """The update is over; ``error`` is what it ended with, if it did. Raises what the callback raises."""
        self.trainer.last = outcome
        if self.trainer.on_update is not None:
            deliver(self.trainer.on_update, self.metrics(outcome), error)

    def metrics(self, outcome: Outcome) -> UpdateMetrics:
        """The numbers of this update on this rank, now."""
        trainer, verbs = self.trainer, self.trainer.verbs
        return update_metrics(
            outcome,
            sum(meta.numel for meta in trainer.plan.tensors),
            spans=verbs.trace.spans[self.first :],
            inside=[(self.start_ns, verbs.now_ns())],
            rank=str(verbs.me),
            sends=trainer.lead,
            highest=trainer.highest,
            lost=trainer.gone,
        )
