"""One rank of a gloo run, in a process of its own: steps, updates, audits, and the record it leaves in a file.

The lead says when the others go on, so that process starts, optimizer steps and audits stand in no span.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.gloo import GlooWorld
from weightsync.backends.store import client_of
from weightsync.cli import logs, parts, verify
from weightsync.cli.desk import READY, Desk
from weightsync.cli.pushing import Pushes, audits
from weightsync.cli.record import RankRecord
from weightsync.cli.returns import await_returns
from weightsync.cli.rl.engine import TokenTurns
from weightsync.cli.rl.learner import Learner
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.requests import GENERATE, LeadSamples, PeerSamples
from weightsync.cli.rl.rollout import SamplingRank
from weightsync.cli.rl.trainer import RlTrainer
from weightsync.cli.scenario import Scenario
from weightsync.cli.telling import Tell, unheard
from weightsync.cli.workload import WorkloadTrainer, deployment, make_trainer
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.protocol import Outcome
from weightsync.reference.push import Pushed
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.seams import Engine
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trace import Span, Trace

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
        self.engine: Engine | None = None

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
        self.engine = parts.make_engine(self.scenario) if leads else None
        return self.world.verbs(self.me, self.local(), engine=self.engine, trace=self.trace, clock=clock)

    @contextmanager
    def job_span(self, what: str, update: int) -> Iterator[None]:
        """Record what goes on inside as a span of the job."""
        start, ok = time.monotonic_ns(), False
        try:
            yield
            ok = True
        finally:
            span = Span(str(self.me), what, what, start, time.monotonic_ns(), update=update, ok=ok)
            self.record.job.append(span)


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
        self.peers = self.deployment.trainers[1:]
        self.epoch = 0
        self.exports: dict[int, dict[str, Tensor]] = {}
        self.samples: LeadSamples | PeerSamples | None = None
        self.trainer = self._make_trainer()

    def local(self) -> Source:
        """The shards of this rank."""
        return parts.make_source(
            self.scenario, self.deployment, self.me.rank, self.trainer.params, self.trainer
        )

    async def program(self, verbs: Verbs) -> None:
        """Step, wait for the others, push, audit; then release the rollouts."""
        half = parts.trainer_half(self.scenario, self.deployment, verbs)
        if self.me == self.lead:
            await asyncio.to_thread(self.desk.hear_all, self.others, READY)
            await asyncio.to_thread(self.desk.all_back)
            if self.desk.gone:
                raise WeightSyncError(
                    f"{', '.join(sorted(self.desk.gone))} ended before the first update; start the run anew"
                )
        else:
            self.desk.tell([self.lead], READY)
        pushes = Pushes(self.scenario, half, self.record)
        try:
            for done in range(self.scenario.workload.steps):
                if self.me == self.lead and done == self.scenario.workload.steps - 1:
                    await asyncio.to_thread(self._audit, await pushes.join())
                    await await_returns(self.scenario, self.desk, half)
                await asyncio.to_thread(self._step, done + 1, pushes.publishes(done + 1))
                await asyncio.to_thread(self._audit, await pushes.join())
                await asyncio.to_thread(self._meet)
                ended = await pushes.publish(done + 1)
                self.epoch = half.epoch
                await asyncio.to_thread(self._audit, ended)
                if self.me == self.lead:
                    self.tell((await half.status(half.deadline_ns(ASK_NS))).to_dict())
                    self.progress(done + 1)
            await asyncio.to_thread(self._audit, await pushes.join())
        finally:
            await pushes.close()

    def _make_trainer(self) -> WorkloadTrainer:
        work, folder, layout = self.scenario.workload, self.errand.checkpoint, self.deployment
        if work.kind != "rl" or folder is None:
            return make_trainer(self.scenario, self.me.rank, folder)
        store = client_of(self.world.store)
        tp = TensorParallel.over_gloo(store, f"{self.world.prefix}/tp/trainer", self.me.rank, layout.tp)
        learner = Learner(folder, self.me.rank, layout, work, tp)
        if self.me == self.lead:
            tokens = learner.task.answer_tokens
            self.samples = LeadSamples(self.desk, layout, work.rl.samples, tokens, lambda: self.epoch)
        else:
            self.samples = PeerSamples(self.desk)
        return RlTrainer(learner, self.samples)

    def _step(self, number: int, publishes: bool) -> None:
        self.trainer.collect()
        with self.job_span("train", number):
            said = self.trainer.step()
        self.record.curve.append({"step": number, **said})
        if publishes and (self.me == self.lead or self.samples is not None):
            export = self.trainer.export()  # only an RL trainer's is a collective
            if export is not None:
                self.exports[number] = export

    def _meet(self) -> None:
        if self.me == self.lead:
            self.desk.hear_all(self.peers, "stepped")
            self.desk.tell(self.peers, "go")
        else:
            self.desk.tell([self.lead], "stepped")
            self.desk.hear()

    def _audit(self, ended: Sequence[Pushed]) -> None:
        for outcome, version, export in audits(ended, self.exports):
            self._audit_one(outcome, version, export)

    def _audit_one(self, outcome: Outcome, version: int, export: dict[str, Tensor]) -> None:
        if isinstance(self.samples, LeadSamples):
            self.samples.committed(outcome.members)
        file = self.errand.export_file(version)
        save_file(export, file)
        members = [
            rank for number in sorted(outcome.members) for rank in self.deployment.rollouts[number].ranks
        ]
        self.desk.catch_up()
        self.desk.tell(members, "audit", version=version)
        words = self.desk.hear_all(members, "audited")
        file.unlink()
        for rank in (one for one in members if str(one) in words):
            found = words[str(rank)]["audit"]
            if not words[str(rank)]["took_part"] and str(rank) in self.desk.ever_gone:
                continue  # the process that committed this version has ended
            self.record.audits.append(verify.Audit(**{**found, "differences": tuple(found["differences"])}))


class RolloutRun(RankRun):
    """A rollout rank; a thread of it compares its bytes with the trainer's export when the lead asks."""

    def local(self) -> Target:
        """The weights of this rank, zero before the first update."""
        self.target = parts.blank_target(self.scenario, self.deployment, self.me)
        # Said before its lease begins, so that whoever finds it there has been told: its mail waits meanwhile.
        self.desk.tell([self.lead], READY)
        return self.target

    async def program(self, verbs: Verbs) -> None:
        """Serve until the trainer says bye or is lost."""
        half = parts.rollout_half(self.scenario, self.deployment, verbs)
        threading.Thread(target=self._desk_work, args=(half,), name=f"{self.me} desk", daemon=True).start()
        await half.run()

    def _desk_work(self, half: Rollout) -> None:
        try:
            self._answer(half)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # else the lead waits for an answer that nobody works for

    def _answer(self, half: Rollout) -> None:
        sampling = self._sampling(half)
        while True:
            word = self.desk.hear()
            if sampling is not None and word["op"] == GENERATE:
                with self.job_span("generate", word["step"] + 1):
                    sampling.answer(self.desk, self.lead, word)
                continue
            version = word["version"]
            if verify.is_flipped(self.scenario, self.me, version):
                verify.flip_bit(self.target.weights)
            export: dict[str, Tensor] = load_file(self.errand.export_file(version))
            expected = self.deployment.weights(self.me, export)
            audit = verify.audit(version, half, self.target, expected)
            took_part = half.highest >= version
            if took_part:  # else the process that did has ended, and the lead counts no audit
                logs.audited(audit, half.verbs)
            self.desk.tell([self.lead], "audited", audit=asdict(audit), took_part=took_part)

    def _sampling(self, half: Rollout) -> SamplingRank | None:
        work, folder, world = self.scenario.workload, self.errand.checkpoint, self.world
        if work.kind != "rl" or folder is None:
            return None
        turns = self.engine if isinstance(self.engine, TokenTurns) else None
        return SamplingRank(half, world.store, world.prefix, folder, self.target.weights, work, turns)


def rank_run(
    me: RankId, world: GlooWorld, errand: Errand, progress: Callable[[int], None], tell: Tell = unheard
) -> RankRun:
    """The run of one rank, whichever side it is on."""
    if me.role == "trainer":
        return TrainerRun(me, world, errand, progress, tell)
    return RolloutRun(me, world, errand)
