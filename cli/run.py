"""A scenario on a backend: every rank built, every version pushed and audited, one record of it all."""

from __future__ import annotations

import asyncio
import difflib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from weightsync.backends.inprocess import InprocessWorld
from weightsync.backends.registry import Registry
from weightsync.cli import logs, parts, verify
from weightsync.cli.launch import run_gloo
from weightsync.cli.pushing import Pushes, audits
from weightsync.cli.record import RankRecord, RunRecord
from weightsync.cli.rl.local import LocalJob
from weightsync.cli.scenario import Scenario, ScenarioError
from weightsync.cli.status import look
from weightsync.cli.telling import Tell, unheard
from weightsync.cli.workload import WholeTrainer, deployment, make_trainer, prepare
from weightsync.reference.errors import BackendUnavailable, DeadlineExceeded
from weightsync.reference.members import RankId
from weightsync.reference.protocol import Outcome
from weightsync.reference.push import Pushed
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trace import Span, Trace
from weightsync.sim.backend import SimCluster, SimEngine
from weightsync.sim.costs import cost_ns
from weightsync.sim.hardware import load_profile
from weightsync.sim.phantom import PhantomSource, PhantomTarget
from weightsync.sim.world import SimWorld

BACKENDS = ("inprocess", "gloo", "sim")

Progress = Callable[[int], None]
"""Called with the number of updates that are over."""

MakeVerbs = Callable[[RankId, Any, bool], Verbs]
"""The verbs of a rank from its name, its bytes, and whether it leads a rollout."""


def run(
    scenario: Scenario,
    backend: str,
    seed: int | None = None,
    progress: Progress = lambda done: None,
    tell: Tell = unheard,
) -> RunRecord | None:
    """Run a scenario and audit every version it commits.

    Args:
        scenario: what to run.
        backend: one of ``BACKENDS``.
        seed: replaces ``workload.seed``; None leaves it.
        progress: told after each update.
        tell: told the status of all ranks after each update.

    Returns:
        The record; None in a process that ``torchrun`` started and that is not the first of its run.

    Raises:
        BackendUnavailable: no such backend, or it cannot be imported here.
        ScenarioError: the backend cannot do what the scenario asks.
        WeightSyncError: a rank was lost or hangs, named.
    """
    if backend not in BACKENDS:
        near = difflib.get_close_matches(backend, BACKENDS) or BACKENDS
        raise BackendUnavailable(f"backend {backend!r} is none to run on; near names: {', '.join(near)}")
    if backend != "sim":
        Registry().load(backend)
        if not scenario.values:
            raise ScenarioError(
                f"values = false counts bytes without moving them, but {backend} moves them; take sim"
            )
    if backend != "sim" and scenario.policy.snapshot == "device":
        raise ScenarioError(
            f'policy.snapshot = "device" needs a device beside the host, which {backend} has not; take "host", or sim'
        )
    if backend != "gloo" and scenario.faults.kill is not None:
        raise ScenarioError(f"faults.kill needs --backend gloo; on {backend} there is no process to kill")
    scenario = parts.seeded(scenario, seed)
    if backend == "gloo":
        return run_gloo(scenario, progress, tell=tell)
    with tempfile.TemporaryDirectory(prefix="weightsync-") as scratch:
        if backend == "sim":
            return run_sim(scenario, Path(scratch), progress, tell)
        return asyncio.run(run_inprocess(scenario, Path(scratch), progress, tell))


class Ranks:
    """Every rank of a run in one process, with one workload trainer that holds all shards.

    Args:
        scenario: what to run.
        scratch: a folder of the run's own.
        make_verbs: the backend.

    Attributes:
        trainers, rollouts: the protocol's halves, in rank order.
        records: one per trainer rank.
        audits: what the rollouts held after each committed version.
    """

    def __init__(self, scenario: Scenario, scratch: Path, make_verbs: MakeVerbs) -> None:
        self.scenario = scenario
        self.deployment = deployment(scenario)
        self.workload = self._make_workload(prepare(scenario, scratch)) if scenario.values else None
        self.steps = 0
        self.exports: dict[int, Mapping[str, Tensor]] = {}
        self.records = [RankRecord() for _ in self.deployment.trainers]
        self.audits: list[verify.Audit] = []
        self.targets: dict[RankId, Target] = {}
        self.trainers = []
        for rank in self.deployment.trainers:
            verbs = make_verbs(rank, self._source(rank), False)
            self.trainers.append(parts.trainer_half(scenario, self.deployment, verbs))
        pairs = zip(self.trainers, self.records, strict=True)
        self.pushes = [Pushes(scenario, half, record) for half, record in pairs]
        self.rollouts = {}
        for ref in self.deployment.rollouts:
            for rank in ref.ranks:
                verbs = make_verbs(rank, self._target(rank), rank == ref.leader)
                self.rollouts[rank] = parts.rollout_half(scenario, self.deployment, verbs)

    def step(self) -> None:
        """Change the weights once on all trainer ranks."""
        self.steps += 1
        if self.workload is not None:
            self.workload.collect()
            self.records[0].curve.append({"step": self.steps, **self.workload.step()})
            if self.pushes[0].publishes(self.steps):
                self.exports[self.steps] = self.workload.export() or {}

    def audit(self, ended: Sequence[Pushed]) -> None:
        """Compare every rank of each committed push's members with the trainer's export of that step."""
        for outcome, version, export in audits(ended, self.exports):
            self._audit(outcome, version, export)

    def _audit(self, outcome: Outcome, version: int, export: Mapping[str, Tensor]) -> None:
        for number in sorted(outcome.members):
            for rank in self.deployment.rollouts[number].ranks:
                if verify.is_flipped(self.scenario, rank, version):
                    verify.flip_bit(self.targets[rank].weights)
                expected = self.deployment.weights(rank, export)
                half = self.rollouts[rank]
                self.audits.append(verify.audit(version, half, self.targets[rank], expected))
                logs.audited(self.audits[-1], half.verbs)

    def _make_workload(self, folder: Path | None) -> WholeTrainer:
        work = self.scenario.workload
        if work.kind != "rl" or folder is None:
            return make_trainer(self.scenario, 0, folder)
        return LocalJob(folder, self.deployment, work, lambda rank: self.targets[rank].weights)

    def _source(self, rank: RankId) -> Source | PhantomSource:
        plan = self.deployment.plan
        if self.workload is not None:
            return parts.make_source(
                self.scenario, self.deployment, rank.rank, self.workload.params_of(rank.rank), self.workload
            )

        def counts() -> tuple[int, ...]:
            step = self.pushes[rank.rank].schedule.publishing
            return parts.piece_counts(self.scenario, self.deployment, step)

        return PhantomSource(plan, rank.rank, counts, self.scenario.policy.baseline)

    def _target(self, rank: RankId) -> Target | PhantomTarget:
        if self.workload is None:
            return parts.counted_target(self.scenario, self.deployment, rank)
        self.targets[rank] = parts.blank_target(self.scenario, self.deployment, rank)
        return self.targets[rank]

    def record(self, backend: str, trace: Trace, **more: Any) -> RunRecord:
        """The record of the run."""
        return RunRecord(backend, self.scenario.workload.seed, trace, self.records, self.audits, **more)


async def run_inprocess(
    scenario: Scenario, scratch: Path, progress: Progress, tell: Tell = unheard
) -> RunRecord:
    """All ranks on this loop."""
    world, trace = InprocessWorld(), Trace()

    def make_verbs(me: RankId, local: Any, leads: bool) -> Verbs:
        return world.verbs(me, local, engine=parts.IdleEngine() if leads else None, trace=trace)

    ranks = Ranks(scenario, scratch, make_verbs)
    async with asyncio.TaskGroup() as serving:
        for rollout in ranks.rollouts.values():
            serving.create_task(rollout.run())
        for done in range(scenario.workload.steps):
            ranks.step()
            ranks.audit((await asyncio.gather(*(one.join() for one in ranks.pushes)))[0])
            ranks.audit((await asyncio.gather(*(one.publish(done + 1) for one in ranks.pushes)))[0])
            tell(look(ranks.trainers[0], ranks.rollouts).to_dict())
            progress(done + 1)
        ranks.audit((await asyncio.gather(*(one.join() for one in ranks.pushes)))[0])
        await asyncio.gather(*(one.close() for one in ranks.pushes))
    return ranks.record("inprocess", trace, conditions="one process")


def run_sim(scenario: Scenario, scratch: Path, progress: Progress, tell: Tell = unheard) -> RunRecord:
    """All ranks on simulated time. Steps and audits happen between two simulated instants."""
    profile, trace, job = load_profile(scenario.hardware), Trace(), Trace()
    limit_ns = 2 * parts.settings(scenario).patience_ns
    with SimWorld() as world:
        cluster = SimCluster(
            world, profile, lease_ns=scenario.policy.lease_ms * parts.MS, priced=parts.priced(scenario)
        )
        layout = deployment(scenario)

        def make_verbs(me: RankId, local: Any, leads: bool) -> Verbs:
            engine = SimEngine(cluster, layout.rollouts[me.rollout].ranks) if leads else None
            return cluster.verbs(me, local, engine=engine, trace=trace)

        def settle(programs: Mapping[RankId, Any], name: str, also: Any = ()) -> list[Any]:
            tasks = [cluster.clocks[str(rank)].spawn(program, name) for rank, program in programs.items()]
            hung = world.run([*tasks, *also], limit_ns=world.now_ns() + limit_ns)
            for task in (*tasks, *also):
                if task.done():
                    task.result()
            if hung:
                raise DeadlineExceeded(f"{name} on simulated time: {', '.join(map(str, hung))}")
            return [task.result() for task in tasks]

        ranks = Ranks(scenario, scratch, make_verbs)
        serving = [cluster.clocks[str(r)].spawn(half.run(), "serve") for r, half in ranks.rollouts.items()]

        async def optimize(index: int) -> tuple[Pushed, ...]:
            half = ranks.trainers[index]
            nbytes = sum(parts.local_bytes(row_map) for row_map in layout.trainer_maps[index].values())
            clock = cluster.clocks[str(half.verbs.me)]
            start, update = clock.now_ns(), ranks.steps
            times = parts.optimizer_steps(scenario, update)
            await clock.sleep_until(start + max(1, times) * cost_ns("optimizer", nbytes, profile))
            if times and scenario.workload.kind == "rl":
                job.add(Span(str(half.verbs.me), "train", "train", start, clock.now_ns(), update=update))
            return await ranks.pushes[index].join()

        def everywhere(program: Callable[[int], Any]) -> dict[RankId, Any]:
            return {half.verbs.me: program(index) for index, half in enumerate(ranks.trainers)}

        for done in range(scenario.workload.steps):
            ranks.step()
            ranks.audit(settle(everywhere(optimize), "step")[0])
            publish = everywhere(lambda index, step=done + 1: ranks.pushes[index].publish(step))  # type: ignore[misc]
            ranks.audit(settle(publish, "update")[0])
            tell(look(ranks.trainers[0], ranks.rollouts).to_dict())
            progress(done + 1)
        ranks.audit(settle(everywhere(lambda index: ranks.pushes[index].join()), "join")[0])
        settle(everywhere(lambda index: ranks.pushes[index].close()), "close", serving)
        races = [str(race) for race in cluster.ledger.races]
    guesses = "every number a guess" if len(profile.of_kind("guess")) == len(profile.quantities) else ""
    conditions = ", ".join(filter(None, (f"sim, profile {profile.name}", guesses)))
    return ranks.record("sim", trace, races=races, conditions=conditions, job=job)
