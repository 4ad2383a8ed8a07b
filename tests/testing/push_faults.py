"""Runs of ``tiny-fault`` with pushes in the background, every promise checked, and that versions come one step late.

A push in the background sends what a push in the foreground would. So each version's bits, the numbers, and the
outcomes in order are checked as they are there, and what a rollout may hold when a step is done is the last committed
version, or the one before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from weightsync.reference.issue_order import OrderedTrainer
from weightsync.reference.push import PushSchedule, PushSettings
from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import AnyFault, drawn, exhaustive, returning
from weightsync.testing.faults import FaultRun
from weightsync.testing.fuzz import Case, Protocol
from weightsync.testing.promises import Report
from weightsync.testing.tiny import MS, QUIET_NS, SETTINGS, tiny_shards

ASYNC = PushSettings(mode="async")


class PushRun(FaultRun):
    """One run whose trainer ranks push by a schedule.

    Args:
        schedule: the kind of schedule; a wrong one is a subclass.
        push: its settings.
        disarm: False leaves faults possible in the last push, which is then not looked at as the one that heals.
        more: see ``FaultRun``.

    Attributes:
        schedules: of each trainer rank.
        held: per step of the lead, the step whose weights each rollout that is clean holds when ``publish`` returned.
    """

    def __init__(
        self,
        faults: Iterable[AnyFault] = (),
        *,
        schedule: type[PushSchedule] = PushSchedule,
        push: PushSettings = ASYNC,
        disarm: bool = True,
        trainer: type[Trainer] = OrderedTrainer,
        **more: Any,
    ) -> None:
        super().__init__(tuple(faults), trainer=trainer, **more)
        self.schedules = [schedule(one, push) for one in self.trainers]
        self.disarm = disarm
        self.steps_of: dict[int, int] = {0: 0}
        self.held: list[dict[int, int]] = []

    def _on_version(self, version: int, slot: int) -> None:
        step = self.schedules[0].publishing
        self.steps_of[version] = step
        self.history.record(version, tiny_shards(self.seed, step - 1), key=(self.seed, step - 1))

    async def _train(self, trainer: Trainer) -> None:
        name, clock = str(trainer.verbs.me), self.cluster.clocks[str(trainer.verbs.me)]
        schedule = self.schedules[trainer.verbs.me.rank]
        outcomes = self.report.outcomes[name]
        if trainer.lead:
            self._time(trainer)
        last = self.updates + 1
        try:
            for step in range(1, last + 1):
                if step == last and self.disarm:
                    outcomes += [one.outcome for one in await schedule.join()]
                    await clock.sleep_until(QUIET_NS)
                    self.plan.disarm()
                await self._optimize(trainer.verbs.me.rank, step - 1)
                outcomes += [one.outcome for one in await schedule.publish(step, last=last)]
                if trainer.lead:
                    self._look(schedule)
        finally:
            outcomes += [one.outcome for one in await schedule.close()]
        if len(outcomes) != last:
            self.report.violated(f"{name} has {len(outcomes)} outcomes of {last} pushes: one was lost")
        if [one.step for one in schedule.pushed] != list(range(1, last + 1)):
            self.report.violated(f"{name} pushed steps {[one.step for one in schedule.pushed]}")
        numbers = [one.version for one in outcomes if one.version is not None]
        if numbers != sorted(set(numbers)):
            self.report.violated(f"{name} numbered its versions {numbers}")

    def _time(self, trainer: Trainer) -> None:
        """Note when each of the lead's updates begins and ends, wherever it runs."""
        update = trainer.update

        async def timed() -> Any:
            began = self.world.now_ns()
            outcome = await update()
            self.times.append((began, self.world.now_ns()))
            return outcome

        trainer.update = timed  # type: ignore[method-assign]

    def _look(self, schedule: PushSchedule) -> None:
        """What the rollouts hold now is what the foreground would have left there, or the version before it."""
        committed = [0] + [one.step for one in schedule.pushed if one.outcome.committed]
        here = {
            ref.number: self.steps_of[self.rollouts[ref.leader].version]
            for ref in self.deployment.rollouts
            if self.rollouts[ref.leader].dirty is None and self.cluster.alive(str(ref.leader))
        }
        self.held.append(here)
        if schedule.staleness > schedule.step - committed[-1]:
            self.report.violated(f"staleness {schedule.staleness} after step {schedule.step}, {committed}")
        if schedule.pushed and schedule.pushed[-1].step != schedule.step - schedule.asynchronous:
            self.report.violated(f"after step {schedule.step} the last joined push is {schedule.pushed[-1]}")
        if not schedule.pushed or not schedule.pushed[-1].outcome.committed:
            return
        newest = schedule.pushed[-1]
        for number in set(here) & set(newest.outcome.members):
            if not newest.step <= here[number] <= schedule.step:
                self.report.violated(
                    f"rollout {number} holds step {here[number]} after step {schedule.step}, more than one step late"
                )


@dataclass(frozen=True, slots=True)
class PushCase(Case):
    """As ``fuzz.Case``, with pushes in the background.

    Attributes:
        schedule: the kind of schedule.
    """

    schedule: type[PushSchedule] = PushSchedule

    def run(self, protocol: Protocol) -> Report:
        """Make the run."""
        settings = replace(SETTINGS, receive=self.receive)  # type: ignore[arg-type]
        trainer = OrderedTrainer if protocol.trainer is Trainer else protocol.trainer
        return PushRun(
            self.faults, schedule=self.schedule, trainer=trainer, rollout=protocol.rollout, updates=self.updates,
            seed=self.seed, settings=settings, detect_ns=self.detect_ms * MS,
            baseline=self.baseline,
        ).run()  # fmt: skip


def push_awaits(receive: str = "stage") -> dict[str, int]:
    """How many awaits each rank makes in a run without faults."""
    report = PushCase((), receive=receive).run(Protocol(Trainer, Rollout))
    return {rank: len(verbs) for rank, verbs in report.awaits.items()}


def exhaustive_pushes(receive: str = "stage") -> list[PushCase]:
    """Every await of every rank times every kind of fault; a killed rollout also with a restart."""
    counts = push_awaits(receive)
    return [
        PushCase(faults, receive=receive) for faults in (*exhaustive(counts), *returning(counts, (20, 700)))
    ]


def seeded_pushes(seeds: Iterable[int], schedule: type[PushSchedule] = PushSchedule) -> Iterable[PushCase]:
    """One case per seed, as ``fuzz.seeded_cases``."""
    counts = push_awaits()
    for seed in seeds:
        receive = "stream" if seed % 2 else "stage"
        detect_ms = 40 if seed % 4 > 1 else 0
        yield PushCase(
            drawn(counts, seed), seed=seed, receive=receive, detect_ms=detect_ms, schedule=schedule
        )
