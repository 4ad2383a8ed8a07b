"""One rank of a gloo run, in a process of its own: steps, updates, audits, and the record it leaves in a file.

The lead says when the others go on, so that process starts, optimizer steps and audits stand in no span.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.gloo import GlooWorld
from weightsync.cli import logs, parts, verify
from weightsync.cli.desk import Desk
from weightsync.cli.record import RankRecord
from weightsync.cli.scenario import Scenario
from weightsync.cli.telling import Tell, unheard
from weightsync.cli.workload import deployment, make_trainer
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.protocol import Outcome
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trace import Trace

PREFIX = "weightsync"
"""Of every key on a store that serves one run only."""

ASK_NS = 5_000_000_000
"""How long the lead waits, between two updates, for what the rollouts say of themselves."""


@dataclass(frozen=True)
class Errand:
    """What every rank of a run is told.

    Attributes:
        scenario: what to run.
        scratch: a folder that all ranks of the run see.
        checkpoint: the folder to train from, or None.
    """

    scenario: Scenario
    scratch: Path
    checkpoint: Path | None

    def record_file(self, rank: RankId) -> Path:
        """Where a rank leaves its record."""
        return self.scratch / f"{rank}.json"

    def export_file(self, version: int) -> Path:
        """Where the lead puts the trainer's export of a version for the audits."""
        return self.scratch / f"version-{version}.safetensors"


class RankRun:
    """Base of one rank's run.

    Args:
        me: the rank.
        world: its backend, not used yet.
        errand: what to run.
    """

    def __init__(self, me: RankId, world: GlooWorld, errand: Errand) -> None:
        self.me = me
        self.world = world
        self.errand = errand
        self.scenario = errand.scenario
        self.deployment = deployment(errand.scenario)
        self.lead = self.deployment.trainers[0]
        self.others = [rank for rank in self.deployment.ranks if rank != self.lead]
        self.trace = Trace()
        self.record = RankRecord(spans=self.trace.spans)
        self.desk = Desk(world.store, world.prefix, str(me))

    def run(self) -> None:
        """Take part to the end, and leave the record."""
        clock = AsyncioClock(rank_name=str(self.me))
        try:
            task = clock.spawn(self.program(self._verbs(clock)), "main")
            clock.run([task])
            task.result()
            text = json.dumps(self.record.to_dict())
            self.errand.record_file(self.me).write_text(text, encoding="utf-8")
        finally:
            self.world.close()
            clock.close()

    async def program(self, verbs: Verbs) -> None:
        """What this rank does."""
        raise NotImplementedError

    def local(self) -> Source | Target:
        """This rank's bytes."""
        raise NotImplementedError

    def _verbs(self, clock: AsyncioClock) -> Verbs:
        leads = self.me.role == "rollout" and self.me.rank == 0
        engine = parts.IdleEngine() if leads else None
        return self.world.verbs(self.me, self.local(), engine=engine, trace=self.trace, clock=clock)


class TrainerRun(RankRun):
    """A trainer rank; the lead also says when to go on, and has every committed version audited.

    Args:
        progress: told by the lead after each update.
        tell: told the status of all ranks by the lead after each update.
    """

    def __init__(
        self,
        me: RankId,
        world: GlooWorld,
        errand: Errand,
        progress: Callable[[int], None] = lambda done: None,
        tell: Tell = unheard,
    ) -> None:
        super().__init__(me, world, errand)
        self.progress = progress
        self.tell = tell
        self.trainer = make_trainer(self.scenario, me.rank, errand.checkpoint)
        self.peers = self.deployment.trainers[1:]

    def local(self) -> Source:
        """The shards of this rank."""
        return Source(self.deployment.plan, self.me.rank, self.trainer.params)

    async def program(self, verbs: Verbs) -> None:
        """Step, wait for the others, push, audit; then release the rollouts."""
        half = parts.trainer_half(self.scenario, self.deployment, verbs)
        if self.me == self.lead:
            heard = await asyncio.to_thread(self.desk.hear_all, self.others, "ready")
            absent = [str(rank) for rank in self.others if str(rank) not in heard]
            if absent:
                raise WeightSyncError(
                    f"{', '.join(absent)} ended before the first update; start the run anew"
                )
        else:
            self.desk.tell([self.lead], "ready")
        try:
            for done in range(self.scenario.workload.steps):
                self.trainer.step()
                await asyncio.to_thread(self._meet)
                await parts.push(half, self.record)
                if self.me == self.lead:
                    await asyncio.to_thread(self._audit, self.record.outcomes[-1])
                    self.tell((await half.status(half.deadline_ns(ASK_NS))).to_dict())
                    self.progress(done + 1)
        finally:
            await half.close()

    def _meet(self) -> None:
        if self.me == self.lead:
            self.desk.hear_all(self.peers, "stepped")
            self.desk.tell(self.peers, "go")
        else:
            self.desk.tell([self.lead], "stepped")
            self.desk.hear()

    def _audit(self, outcome: Outcome) -> None:
        if not outcome.committed or outcome.version is None:
            return
        file = self.errand.export_file(outcome.version)
        save_file(self.trainer.export(), file)
        members = [
            rank for number in sorted(outcome.members) for rank in self.deployment.rollouts[number].ranks
        ]
        self.desk.tell(members, "audit", version=outcome.version)
        words = self.desk.hear_all(members, "audited")
        file.unlink()
        for rank in (one for one in members if str(one) in words):
            found = words[str(rank)]["audit"]
            self.record.audits.append(verify.Audit(**{**found, "differences": tuple(found["differences"])}))


class RolloutRun(RankRun):
    """A rollout rank; a thread of it compares its bytes with the trainer's export when the lead asks."""

    def local(self) -> Target:
        """The weights of this rank, zero before the first update."""
        self.target = parts.blank_target(self.deployment, self.me)
        return self.target

    async def program(self, verbs: Verbs) -> None:
        """Serve until the trainer says bye or is lost."""
        half = parts.rollout_half(self.scenario, self.deployment, verbs)
        threading.Thread(target=self._answer, args=(half,), name=f"{self.me} audits", daemon=True).start()
        await half.run()

    def _answer(self, half: Any) -> None:
        self.desk.tell([self.lead], "ready")
        while True:
            version = self.desk.hear()["version"]
            if verify.is_flipped(self.scenario, self.me, version):
                verify.flip_bit(self.target.weights)
            export: dict[str, Tensor] = load_file(self.errand.export_file(version))
            expected = self.deployment.weights(self.me, export)
            audit = verify.audit(version, half, self.target, expected)
            logs.audited(audit, half.verbs)
            self.desk.tell([self.lead], "audited", audit=asdict(audit))


def rank_run(
    me: RankId, world: GlooWorld, errand: Errand, progress: Callable[[int], None], tell: Tell = unheard
) -> RankRun:
    """The run of one rank, whichever side it is on."""
    if me.role == "trainer":
        return TrainerRun(me, world, errand, progress, tell)
    return RolloutRun(me, world, errand)
