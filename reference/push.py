"""When and how versions are pushed: after which steps, in the foreground or behind the next steps.

Every trainer rank makes a ``PushSchedule`` with equal settings and calls it in step order. In the background a push
is the very ``update()`` of the foreground, as a task: the caller goes on once the snapshot is taken, and the next
publication joins the task before it starts another one. So at most one push is under way, and the slot that it reads
is never the one that a snapshot writes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

from weightsync.reference.clock import Task
from weightsync.reference.devices import Announce
from weightsync.reference.errors import PlanMismatch, WeightSyncError
from weightsync.reference.events import TRAINER, log_of
from weightsync.reference.protocol import Outcome
from weightsync.reference.trainer import Trainer

Correction = Literal["none", "tis", "rollout-logprobs", "old-actor", "no-samples"]
"""How training corrects for samples of older weights; ``no-samples`` when it uses none of the rollouts'."""


@dataclass(frozen=True, slots=True)
class PushSettings:
    """What a schedule is told; equal on every trainer rank.

    Attributes:
        mode: ``"sync"``: a publication returns when the version is committed, or failed; ``"async"``: when its
            snapshot is taken.
        interval: every how many steps a version is published.
        correction: the off-policy correction that training makes; an interval above 1 demands one.
        snapshot: False when there is no copy of the weights to send from, so that a push reads the live ones.
        old_actor: True when old-actor tags are in use, whose queue reads what a push in the background reads.
    """

    mode: Literal["sync", "async"] = "sync"
    interval: int = 1
    correction: Correction = "none"
    snapshot: bool = True
    old_actor: bool = False

    def __post_init__(self) -> None:
        """Refuse what no run could keep."""
        if self.interval <= 0:
            raise PlanMismatch(f"publish interval is {self.interval}; expected 1 (every step) or more")
        if self.interval > 1 and self.correction == "none":
            raise PlanMismatch(
                f"publish interval is {self.interval} without an off-policy correction; samples are up to "
                f"{self.interval - 1} steps older than the weights they train, so declare one, or publish every step"
            )

    @property
    def fallback(self) -> str:
        """Why a push that was to be asynchronous is synchronous; "" when it is what it was to be."""
        if self.mode == "sync":
            return ""
        if not self.snapshot:
            return "there is no snapshot to send from, and the live weights change while a push runs"
        if self.old_actor or self.correction == "old-actor":
            return "old-actor tags are in use, and their queue would race with what a push reads"
        return ""

    def publishes(self, step: int, *, last: int | None, evaluates: bool = False) -> bool:
        """True when the version of optimizer step ``step``, from 1, is published.

        Every ``interval`` steps; whatever the interval, after the last step, before an evaluation, and when the
        number of the last step is unknown (None).
        """
        return evaluates or last is None or step >= last or step % self.interval == 0


@dataclass(frozen=True, slots=True)
class Pushed:
    """A push that is over.

    Attributes:
        step: the optimizer step whose weights it was.
        outcome: what it came to.
    """

    step: int
    outcome: Outcome


class PushSchedule:
    """One trainer rank's pushes. All methods belong to the task that trains.

    Args:
        trainer: this rank's half of the protocol; nobody else may call its ``update`` and ``close``.
        settings: equal on every rank.
        announce: told why a push that was to be asynchronous is not; by default the log is.

    Attributes:
        asynchronous: True when pushes run in the background.
        pushed: every push that is over and joined, in order.
        step: the last optimizer step that ``publish`` heard of; 0 before the first.
        committed_step: the step whose weights every member was last known to hold; 0 before the first.
        publishing: the step whose weights were published last, or are being published; 0 before the first.
        oldest: the largest ``staleness`` that a ``publish`` left.
    """

    def __init__(self, trainer: Trainer, settings: PushSettings, announce: Announce | None = None) -> None:
        self.trainer = trainer
        self.settings = settings
        self.asynchronous = settings.mode == "async" and not settings.fallback
        self.pushed: list[Pushed] = []
        self.step = 0
        self.committed_step = 0
        self.oldest = 0
        self._task: Task | None = None
        self.publishing = 0
        self._closed = False
        if settings.fallback:
            why = f"push is asynchronous by its settings, and synchronous by necessity: {settings.fallback}"
            log_of(trainer.verbs, TRAINER, logging.WARNING, "push_falls_back", why=why)
            if announce is not None:
                announce(why)

    @property
    def staleness(self) -> int:
        """Optimizer steps since the weights that every member is known to hold."""
        return self.step - self.committed_step

    @property
    def under_way(self) -> int | None:
        """The step whose push is not joined yet, or None."""
        return self.publishing if self._task is not None else None

    async def publish(
        self, step: int, *, last: int | None = None, evaluates: bool = False
    ) -> tuple[Pushed, ...]:
        """Optimizer step ``step``, from 1, is done: push its weights, if it is their turn.

        The live parameters may be mutated once this returns, and must not be before.

        Args:
            step: its number; every step is told, in order.
            last: number of the last step, or None when it is unknown.
            evaluates: True when an evaluation follows, which needs these weights: it waits until they are there.

        Returns:
            The pushes that ended since the last call. A failed one is an outcome that says so; the next one heals.

        Raises:
            Exception: what a push in the background ended with, at the first call after it.
            PlanMismatch: the step is not the next one.
            WeightSyncError: the schedule is closed.
        """
        if self._closed:
            raise WeightSyncError("publish() was called on a closed schedule, expected an open one; make one")
        if step != self.step + 1:
            raise PlanMismatch(
                f"step {step} follows step {self.step}, expected step {self.step + 1}; tell every step, in order"
            )
        self.step = step
        ended: tuple[Pushed, ...] = ()
        if self.settings.publishes(step, last=last, evaluates=evaluates):
            ended, self.publishing = await self.join(), step
            if self.asynchronous:
                await self._start(step)
                ended += await self.join() if evaluates else ()
            else:
                ended += (self._over(step, await self.trainer.update()),)
        self.oldest = max(self.oldest, self.staleness)
        return ended

    async def join(self) -> tuple[Pushed, ...]:
        """Return once no push is under way; the one that was. Raises what it ended with, once."""
        task = self._task
        if task is None:
            return ()
        try:
            await self.trainer.verbs.clock.join([task], None)
        finally:
            if task.done():
                self._task = None
        return (self._over(self.publishing, task.result()),)

    async def close(self) -> tuple[Pushed, ...]:
        """Join what is under way, then release the rollouts and drop every group. Repeatable.

        Returns the push that ended. Raises what it ended with, after the trainer is closed: no error is lost because
        no publication follows.
        """
        if self._closed:
            return ()
        self._closed = True
        try:
            return await self.join()
        finally:
            await self.trainer.fanout.stop(self._task)  # only a cancel leaves one
            await self.trainer.close()

    def _over(self, step: int, outcome: Outcome) -> Pushed:
        self.pushed.append(Pushed(step, outcome))
        if outcome.committed:
            self.committed_step = step
        return self.pushed[-1]

    async def _start(self, step: int) -> None:
        """Start a push, and return when its snapshot is taken or it is over."""
        verbs = self.trainer.verbs
        taken = verbs.clock.future()
        self.trainer.on_snapshot = lambda: taken.set_result(None)
        self._task = verbs.spawn(self._push(taken), f"push {step}")
        await verbs.clock.wait(taken, None)

    async def _push(self, taken: Any) -> Outcome:
        try:
            return await self.trainer.update()
        finally:
            taken.set_result(None)
