"""One trainer rank's pushes in a run: when, in the foreground or not, and what is recorded of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from weightsync.cli import logs
from weightsync.cli.record import RankRecord
from weightsync.cli.scenario import Scenario
from weightsync.reference.protocol import Outcome
from weightsync.reference.push import Correction, Pushed, PushSchedule, PushSettings
from weightsync.reference.trainer import Trainer


def push_settings(scenario: Scenario) -> PushSettings:
    """What the scenario's policy tells the schedule."""
    policy, work = scenario.policy, scenario.workload
    correction: Correction = work.rl.correction if work.kind == "rl" else "no-samples"
    return PushSettings(
        mode=policy.push,
        interval=policy.publish_interval,
        correction=correction,
        snapshot=policy.snapshot != "none",
    )


def audits(ended: Iterable[Pushed], exports: dict[int, Any]) -> Iterator[tuple[Outcome, int, Any]]:
    """Outcome, version and export of each push that committed, among those that ended; its export is taken out."""
    for one in ended:
        export = exports.pop(one.step, None)
        if export is not None and one.outcome.committed and one.outcome.version is not None:
            yield one.outcome, one.outcome.version, export


class Pushes:
    """A schedule whose outcomes and waits go into a record. The first push is waited for: nobody generates before.

    Args:
        scenario: what is run.
        half: this rank's half of the protocol.
        record: gets ``outcomes`` and ``inside``, one each per push, once it is joined.

    Attributes:
        schedule: what decides.
    """

    def __init__(self, scenario: Scenario, half: Trainer, record: RankRecord) -> None:
        self.schedule = PushSchedule(half, push_settings(scenario))
        self.half = half
        self.record = record
        self._last = scenario.workload.steps
        self._began_ns: dict[int, int] = {}
        self._waited_ns: dict[int, int] = {}

    def publishes(self, step: int) -> bool:
        """True when optimizer step ``step``, from 1, is published."""
        return self.schedule.settings.publishes(step, last=self._last, evaluates=step == 1)

    async def publish(self, step: int) -> tuple[Pushed, ...]:
        """See ``PushSchedule.publish``; join before, so that what was pushed can be audited in between."""
        logs.step(self.half, self.record)
        self._began_ns[step] = began_ns = self.half.verbs.now_ns()
        ended = await self.schedule.publish(step, last=self._last, evaluates=step == 1)
        self._waited_ns[step] = self.half.verbs.now_ns() - began_ns
        return self._recorded(ended)

    async def join(self) -> tuple[Pushed, ...]:
        """The push that was under way, which is over now; see ``PushSchedule.join``."""
        step, began_ns = self.schedule.under_way, self.half.verbs.now_ns()
        ended = await self.schedule.join()
        if step is not None:
            self._waited_ns[step] += self.half.verbs.now_ns() - began_ns
        return self._recorded(ended)

    async def close(self) -> None:
        """See ``PushSchedule.close``."""
        self._recorded(await self.schedule.close())

    def _recorded(self, ended: tuple[Pushed, ...]) -> tuple[Pushed, ...]:
        for one in ended:
            self.record.outcomes.append(one.outcome)
            began_ns = self._began_ns.pop(one.step)
            self.record.inside.append((began_ns, began_ns + self._waited_ns.pop(one.step)))
        return ended
