"""One update of one trainer rank, watched from its start to its end: logged, and told to whoever asked for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from weightsync.reference.errors import PeerLost
from weightsync.reference.events import TRAINER, log_of
from weightsync.reference.members import RankId
from weightsync.reference.metrics import UpdateMetrics, deliver, update_metrics
from weightsync.reference.protocol import Outcome

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer


class Watched:
    """An update that begins now. The lead logs; every rank tells its callback.

    Args:
        trainer: the rank whose update it is.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.start_ns = trainer.verbs.now_ns()
        self.first = len(trainer.verbs.trace.spans)
        self.gone = set(trainer.gone)
        self._log(logging.DEBUG, "update_started", highest=trainer.highest)

    def end(self, outcome: Outcome, error: Exception | None = None) -> None:
        """The update is over; ``error`` is what it ended with, if it did. Raises what the callback raises."""
        trainer = self.trainer
        trainer.last = outcome
        metrics = self.metrics(outcome)
        self._log_end(metrics, outcome.digest, error)
        if trainer.on_update is not None:
            deliver(trainer.on_update, metrics, error)

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
            history_bytes=trainer.history.nbytes,
        )

    def _log_end(self, metrics: UpdateMetrics, digest: int | None, error: Exception | None) -> None:
        trainer = self.trainer
        seen = trainer.rejoined | trainer.gone  # one that is back may have been lost in this very update
        lost = {number: why for number, why in seen.items() if number not in self.gone}
        if isinstance(error, PeerLost) and (rank := RankId.parse(error.peer)).role == "rollout":
            lost.setdefault(rank.rollout, str(error))
        for number, why in lost.items():
            self._log(logging.WARNING, "rollout_lost", rollout=number, why=why)
        for number in metrics.rejoined:
            self._log(logging.INFO, "rollout_back", rollout=number, full=number in metrics.full)
        event = (
            (logging.INFO, "update_committed") if metrics.committed else (logging.WARNING, "update_aborted")
        )
        row = {key: value for key, value in metrics.row().items() if key not in ("update", "committed")}
        self._log(*event, **row, digest=hex_digest(digest), exposed_ns=metrics.exposed_ns)

    def _log(self, level: int, event: str, **data: Any) -> None:
        if self.trainer.lead:
            log_of(self.trainer.verbs, TRAINER, level, event, **data)


def hex_digest(digest: int | None) -> str | None:
    """A signed 64-bit digest as 16 hex digits."""
    return None if digest is None else f"{digest & 0xFFFF_FFFF_FFFF_FFFF:016x}"
