"""One run of the scenario ``tiny-fault`` on the simulated clock, with faults planted and every promise checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weightsync.reference.errors import PeerLost
from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.params import int_view
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.steps import Touched
from weightsync.reference.target import Target
from weightsync.reference.trace import Trace
from weightsync.reference.trainer import Trainer
from weightsync.sim.backend import SimCluster, SimEngine, SimVerbs
from weightsync.sim.clock import SimTask
from weightsync.sim.faults import Fault, FaultHooks, FaultPlan, describe
from weightsync.sim.hardware import load_profile
from weightsync.sim.world import SimWorld
from weightsync.testing.history import History
from weightsync.testing.tiny import (
    LIMIT_NS,
    MS,
    QUIET_NS,
    SETTINGS,
    STALL_NS,
    memo,
    tiny_deployment,
    tiny_shards,
)


@dataclass
class Report:
    """What one run showed.

    Attributes:
        faults: the plan.
        violations: broken promises, one sentence each; empty when the run was right.
        awaits: per rank, the verbs that began, in order.
        outcomes: per trainer rank that lived, its updates.
        trace: every span.
        hit: the faults that happened, with the verb that each hit.
    """

    faults: tuple[Fault, ...]
    violations: list[str] = field(default_factory=list)
    awaits: dict[str, list[str]] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    hit: list[tuple[Fault, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{describe(self.faults, self.hit)}\n  " + "\n  ".join(
            self.violations or ["every promise was kept"]
        )


class _SimEffects:
    def __init__(self, cluster: SimCluster) -> None:
        self.cluster = cluster

    async def kill(self, rank: str) -> None:
        self.cluster.kill(rank)
        await self.cluster.clocks[rank].wait(self.cluster.world.future(), None)

    def now_ns(self) -> int:
        return self.cluster.world.now_ns()

    async def stall(self, rank: str, verb: str, index: int) -> None:
        clock = self.cluster.clocks[rank]
        if verb == "post":
            late_ns = (10 + 7 * index % 41) * MS
            self.cluster.controls[rank].transport.late_ns = late_ns  # type: ignore[attr-defined]
        else:
            await clock.sleep_until(clock.now_ns() + STALL_NS)


class FaultRun:
    """One run: build it, ``run`` it, read its report.

    Args:
        faults: what goes wrong.
        trainer, rollout: the protocol's two halves; a wrong protocol is a subclass of one.
        updates: how many updates the faults may hit; one more, without faults, follows.
        seed: of the weights.
        settings: of the protocol.
        detect_ns: how long after a kill its data groups break.
        verbs: changes each rank's verbs before it runs; how a test plants a wrong backend.
    """

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        trainer: type[Trainer] = Trainer,
        rollout: type[Rollout] = Rollout,
        updates: int = 3,
        seed: int = 0,
        settings: ProtocolSettings = SETTINGS,
        detect_ns: int = 0,
        verbs: Callable[[SimVerbs], None] | None = None,
    ) -> None:
        self.deployment = tiny_deployment()
        self.history = History(self.deployment, memo())
        self.step = 0
        self.times: list[tuple[int, int]] = []
        self.plan = FaultPlan(tuple(faults))
        self.report = Report(tuple(faults), hit=self.plan.hit)
        self.updates = updates
        self.seed = seed
        self.settings = settings
        self.world = SimWorld()
        self.cluster = SimCluster(
            self.world, load_profile("laptop"), lease_ns=2 * STALL_NS, detect_ns=detect_ns
        )
        self.hooks: dict[str, FaultHooks] = {}
        self.targets: dict[RankId, Target] = {}
        self.engines: dict[int, SimEngine] = {}
        self.params = [
            {name: torch.nn.Parameter(p.detach().clone(), requires_grad=False) for name, p in shards.items()}
            for shards in tiny_shards(seed, 0)
        ]
        for params in self.params:
            for name, parameter in params.items():
                self.deployment.attributes[name].stamp(parameter)
        self.change = verbs
        self.trainers = [self._trainer(trainer, rank) for rank in self.deployment.trainers]
        self.rollouts = {
            rank: self._rollout(rollout, ref, rank) for ref in self.deployment.rollouts for rank in ref.ranks
        }
        self.final: Outcome | None = None

    def run(self) -> Report:
        """Run to the end and check every promise."""
        tasks: dict[str, SimTask] = {}
        for trainer in self.trainers:
            name = str(trainer.verbs.me)
            self.report.outcomes[name] = []
            tasks[name] = self.cluster.clocks[name].spawn(self._train(trainer), "main")
        for rank, rollout in self.rollouts.items():
            tasks[str(rank)] = self.cluster.clocks[str(rank)].spawn(rollout.run(), "main")
        with self.world:
            hung = self.world.run(list(tasks.values()), limit_ns=LIMIT_NS)
            self._check(tasks, [name for name, task in tasks.items() if task in hung])
        self.report.awaits = {name: hooks.verbs for name, hooks in self.hooks.items()}
        return self.report

    # ---- building --------------------------------------------------------------------------------------------

    def _verbs(self, rank: RankId, local: Any, engine: SimEngine | None = None) -> SimVerbs:
        hooks = FaultHooks(str(rank), self.plan, _SimEffects(self.cluster))
        self.hooks[str(rank)] = hooks
        verbs = self.cluster.verbs(rank, local, engine=engine, trace=self.report.trace, hooks=hooks)
        if self.change is not None:
            self.change(verbs)
        return verbs

    def _trainer(self, kind: type[Trainer], rank: RankId) -> Trainer:
        source = Source(self.deployment.plan, rank.rank, self.params[rank.rank])
        lead = rank == self.deployment.trainers[0]
        return kind(
            self._verbs(rank, source), self.deployment.plan, self.deployment.trainers, self.deployment.rollouts,
            self.settings, self._on_version if lead else None,
        )  # fmt: skip

    def _rollout(self, kind: type[Rollout], ref: RolloutRef, rank: RankId) -> Rollout:
        weights = self.deployment.blank(rank)
        maps = self.deployment.rollout_maps(rank)
        target = Target(self.deployment.tensors, maps, weights, self.deployment.aliases())
        self.targets[rank] = target
        engine = None
        if rank == ref.leader:
            engine = SimEngine(self.cluster, ref.ranks, lambda: self._check_bits(ref, "while it generates"))
            self.engines[ref.number] = engine
        verbs = self._verbs(rank, target, engine)
        return kind(
            verbs, self.deployment.plan.fingerprint, ref.ranks, self.deployment.trainers[0], self.settings
        )

    def _on_version(self, version: int, slot: int) -> None:
        self.history.record(version, self.params, key=(self.seed, self.step))

    # ---- driving ---------------------------------------------------------------------------------------------

    async def _train(self, trainer: Trainer) -> None:
        name, clock = str(trainer.verbs.me), self.cluster.clocks[str(trainer.verbs.me)]
        try:
            for step in range(self.updates + 1):
                if step == self.updates:
                    await clock.sleep_until(QUIET_NS)
                    self.plan.disarm()
                await self._optimize(trainer.verbs.me.rank, step)
                began = clock.now_ns()
                self.report.outcomes[name].append(await trainer.update())
                if trainer.lead:
                    self.times.append((began, clock.now_ns()))
        finally:
            await trainer.close()

    async def _optimize(self, rank: int, step: int) -> None:
        name, ledger = str(self.deployment.trainers[rank]), self.cluster.ledger
        self.step = step
        interval = ledger.begin(name, "optimizer", Touched(0, writes=("live",)), self.world.now_ns())
        for parameter, new in zip(
            self.params[rank].values(), tiny_shards(self.seed, step)[rank].values(), strict=True
        ):
            int_view(parameter.data).copy_(int_view(new.data))
        await self.cluster.clocks[name].sleep_until(self.world.now_ns() + 1000)
        ledger.end(interval)

    # ---- checking --------------------------------------------------------------------------------------------

    def _check_bits(self, ref: RolloutRef, when: str) -> None:
        label = self.rollouts[ref.leader].version
        if self.rollouts[ref.leader].dirty is not None:
            self._violated(f"rollout {ref.number} generates {when} although it is dirty")
        for rank in ref.ranks:
            if not self.cluster.alive(str(rank)):
                continue
            if self.rollouts[rank].version != label:
                self._violated(f"{rank} has label {self.rollouts[rank].version}, its leader {label}, {when}")
            for difference in self.history.differences(label, rank, self.targets[rank].weights):
                self._violated(f"torn: {rank} under label {label}, {when}: {difference}")

    def _check(self, tasks: dict[str, SimTask], hung: list[str]) -> None:
        dead = [name for name in tasks if not self.cluster.alive(name)]
        for name in hung:
            self._violated(f"{name} hangs")
        for name, task in tasks.items():
            if name not in dead and task.done():
                self._check_end(name, task, dead)
        for name, clock in self.cluster.clocks.items():
            for error in clock.unjoined() if name not in dead else ():
                self._violated(f"{name} dropped an error: {error!r}")
        for version in self.history.reused:
            self._violated(f"version {version} was used twice")
        for race in self.cluster.ledger.races:
            self._violated(str(race))
        self._check_quiet_updates()
        trainers_live = not any(name.startswith("trainer") for name in dead)
        for ref in self.deployment.rollouts:
            if all(str(rank) not in dead for rank in ref.ranks):
                if self.engines[ref.number].generating:
                    self._check_bits(ref, "at the end")
                if trainers_live and not hung:
                    self._check_last(ref)

    def _check_end(self, name: str, task: SimTask, dead: list[str]) -> None:
        try:
            task.result()
        except PeerLost as lost:
            if not (name.startswith("trainer") and lost.peer.startswith("trainer") and lost.peer in dead):
                self._violated(f"{name} ended because of {lost.peer}: {lost}")
        except BaseException as error:
            self._violated(f"{name} died: {error!r}")
        else:
            killed = [peer for peer in dead if peer.startswith("trainer")]
            if name.startswith("trainer") and killed:
                self._violated(
                    f"{name} ended as if nothing had happened, although {', '.join(killed)} was killed"
                )

    def _check_last(self, ref: RolloutRef) -> None:
        outcomes = [found[-1] for found in self.report.outcomes.values() if found]
        for outcome in outcomes:
            if not outcome.committed:
                self._violated(f"the update after the last fault did not commit: {outcome.reason}")
                return
        version = outcomes[0].version
        for rank in ref.ranks:
            rollout = self.rollouts[rank]
            if rollout.version != version or rollout.dirty is not None:
                held = f"version {rollout.version} ({rollout.dirty or 'clean'})"
                self._violated(f"{rank} ended at {held}, not at {version}")
        if not self.engines[ref.number].generating:
            self._violated(f"rollout {ref.number} does not generate at the end")

    def _check_quiet_updates(self) -> None:
        """With failures only, an update that none of them falls into commits, and sends nothing whole in vain."""
        if any(not fault.kind.startswith("fail") and verb != "post" for fault, verb in self.plan.hit):
            return
        holds: dict[int, bool] = {}
        outcomes = self.report.outcomes[str(self.trainers[0].verbs.me)]
        for (began, ended), outcome in zip(self.times, outcomes, strict=True):
            quiet = not any(began <= at <= ended for at in self.plan.times_ns)
            if quiet and not outcome.committed:
                self._violated(
                    f"update {outcome.update}, into which no fault fell, did not commit: {outcome.reason}"
                )
            for number in outcome.full:
                if holds.get(number, False):
                    self._violated(
                        f"update {outcome.update} was sent whole to rollout {number}, which held its base"
                    )
            if outcome.committed:
                holds = dict.fromkeys(outcome.members, True)

    def _violated(self, sentence: str) -> None:
        if sentence not in self.report.violations:
            self.report.violations.append(sentence)
