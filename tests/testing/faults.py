"""One run of the scenario ``tiny-fault`` on the simulated clock, with faults planted and every promise checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from weightsync.reference.baselines import make_baseline
from weightsync.reference.dirty import DirtyBits
from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.params import int_view
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.steps import Touched
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.sim.backend import SimCluster, SimEngine, SimVerbs
from weightsync.sim.clock import SimTask
from weightsync.sim.faults import AnyFault, FaultHooks, FaultPlan, Restart
from weightsync.sim.hardware import load_profile
from weightsync.sim.world import SimWorld
from weightsync.testing.history import History
from weightsync.testing.promises import Promises, Report
from weightsync.testing.tiny import (
    DENSITY,
    LIMIT_NS,
    MS,
    QUIET_NS,
    SETTINGS,
    STALL_NS,
    deployment_for,
    memo,
    tiny_shards,
)

ENDED_NS = 1 * MS
"""How long after a kill whoever restarts the rollout has ended the rest of it."""


class SimEffects:
    """Makes planned faults happen on a simulated cluster; implements ``sim.faults.Effects``."""

    def __init__(self, cluster: SimCluster, on_kill: Callable[[str], None]) -> None:
        self.cluster = cluster
        self.on_kill = on_kill

    async def kill(self, rank: str) -> None:
        """See ``sim.faults.Effects.kill``."""
        self.cluster.kill(rank)
        self.on_kill(rank)
        await self.cluster.clocks[rank].wait(self.cluster.world.future(), None)

    def now_ns(self) -> int:
        """See ``sim.faults.Effects.now_ns``."""
        return self.cluster.world.now_ns()

    async def stall(self, rank: str, verb: str, index: int) -> None:
        """See ``sim.faults.Effects.stall``."""
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
        density: share of the elements that a step changes; see ``tiny.tiny_shards``.
        source, target: what moves the bytes of each side; a wrong one is a subclass.
        verbs: changes each rank's verbs before it runs; how a test plants a wrong backend.
        baseline: what the trainer tells changes by; see ``reference.baselines``.
    """

    def __init__(
        self,
        faults: Sequence[AnyFault] = (),
        *,
        trainer: type[Trainer] = Trainer,
        rollout: type[Rollout] = Rollout,
        updates: int = 3,
        seed: int = 0,
        settings: ProtocolSettings = SETTINGS,
        detect_ns: int = 0,
        density: float = DENSITY,
        source: type[Source] = Source,
        target: type[Target] = Target,
        verbs: Callable[[SimVerbs], None] | None = None,
        baseline: str = "whole",
    ) -> None:
        self.baseline = baseline
        self.deployment = deployment_for(density)
        self.history = History(self.deployment, memo())
        self.step = 0
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
        self.tasks: dict[str, SimTask] = {}
        self.kind = rollout
        self.density = density
        self.bytes = source, target
        self.restarted: list[Restart] = []
        self.engines: dict[int, SimEngine] = {}
        self.promises = Promises(
            self.deployment, self.history, self.plan, self.report,
            self.cluster.alive, lambda number: self.engines[number].generating,
        )  # fmt: skip
        self.rollouts, self.targets = self.promises.rollouts, self.promises.targets
        self.times = self.promises.times
        self.params = [
            {name: torch.nn.Parameter(p.detach().clone(), requires_grad=False) for name, p in shards.items()}
            for shards in tiny_shards(seed, 0, density)
        ]
        for number, params in enumerate(self.params):
            for name, parameter in params.items():
                self.deployment.attributes[number][name].stamp(parameter)
        self.dirty = [DirtyBits(params) for params in self.params] if baseline == "dirty" else []
        self.change = verbs
        self.trainers = [self._trainer(trainer, rank) for rank in self.deployment.trainers]
        for ref in self.deployment.rollouts:
            for rank in ref.ranks:
                self.rollouts[rank] = self._rollout(rollout, ref, rank)

    def run(self) -> Report:
        """Run to the end and check every promise."""
        tasks = self.tasks
        for trainer in self.trainers:
            name = str(trainer.verbs.me)
            self.report.outcomes[name] = []
            tasks[name] = self.cluster.clocks[name].spawn(self._train(trainer), "main")
        for rank, rollout in self.rollouts.items():
            tasks[str(rank)] = self.cluster.clocks[str(rank)].spawn(rollout.run(), "main")
        with self.world:
            self.world.run(list(tasks.values()), limit_ns=LIMIT_NS)
            hung = self.world.run(list(tasks.values()), limit_ns=LIMIT_NS)  # those restarted meanwhile, too
            self._check(tasks, [name for name, task in tasks.items() if task in hung])
        self.report.awaits = {name: hooks.verbs for name, hooks in self.hooks.items()}
        return self.report

    # ---- building --------------------------------------------------------------------------------------------

    def _verbs(self, rank: RankId, local: Any, engine: SimEngine | None = None) -> SimVerbs:
        if str(rank) not in self.hooks:  # a rank that is started again counts its awaits on
            self.hooks[str(rank)] = FaultHooks(str(rank), self.plan, SimEffects(self.cluster, self._killed))
        hooks = self.hooks[str(rank)]
        verbs = self.cluster.verbs(rank, local, engine=engine, trace=self.report.trace, hooks=hooks)
        if self.change is not None:
            self.change(verbs)
        return verbs

    def _trainer(self, kind: type[Trainer], rank: RankId) -> Trainer:
        plan, dirty = self.deployment.plan, self.dirty[rank.rank] if self.dirty else None
        baseline = make_baseline(self.baseline, plan.maps[rank.rank], dirty)
        source = self.bytes[0](plan, rank.rank, self.params[rank.rank], baseline)
        lead = rank == self.deployment.trainers[0]
        return kind(
            self._verbs(rank, source), self.deployment.plan, self.deployment.trainers, self.deployment.rollouts,
            self.settings, self._on_version if lead else None, routes=self.deployment.routes(self.settings.route),
        )  # fmt: skip

    def _rollout(self, kind: type[Rollout], ref: RolloutRef, rank: RankId) -> Rollout:
        weights = self.deployment.blank(rank)
        maps = self.deployment.rollout_maps(rank)
        aliases = self.deployment.aliases(rank)
        target = self.bytes[1](self.deployment.tensors, maps, weights, aliases, self.settings.route)
        self.targets[rank] = target
        engine = None
        if rank == ref.leader:
            engine = SimEngine(
                self.cluster, ref.ranks, lambda: self.promises.check_bits(ref, "while it generates")
            )
            self.engines[ref.number] = engine
        verbs = self._verbs(rank, target, engine)
        return kind(
            verbs, self.deployment.plan.fingerprint, ref.ranks, self.deployment.trainers[0], self.settings
        )

    # ---- restarting ------------------------------------------------------------------------------------------

    def _killed(self, rank: str) -> None:
        """Plan what follows a kill, if a restart is."""
        now_ns = self.world.now_ns()
        for fault in self.plan.faults:
            if isinstance(fault, Restart) and fault.rank == rank and fault not in self.restarted:
                self.restarted.append(fault)
                ref = self.deployment.rollouts[RankId.parse(rank).rollout]
                after_ns = max(fault.after_ms * MS, self.cluster.detect_ns + 2 * ENDED_NS)
                self.world.call_at(now_ns + ENDED_NS, partial(self._end, ref))
                self.world.call_at(now_ns + after_ns, partial(self._restart, ref))

    def _end(self, ref: RolloutRef) -> None:
        for rank in ref.ranks:
            if self.cluster.alive(str(rank)):
                self.cluster.kill(str(rank))

    def _restart(self, ref: RolloutRef) -> None:
        for rank in ref.ranks:
            self.rollouts[rank] = self._rollout(self.kind, ref, rank)
        for rank in ref.ranks:
            self.tasks[str(rank)] = self.cluster.clocks[str(rank)].spawn(self.rollouts[rank].run(), "main")

    def _on_version(self, version: int, slot: int) -> None:
        self.history.record(version, self.params, key=(self.seed, self.step, self.density))

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
        for (key, parameter), new in zip(
            self.params[rank].items(), tiny_shards(self.seed, step, self.density)[rank].values(), strict=True
        ):
            if self.dirty:
                self.dirty[rank].mark(key, new, parameter)
            int_view(parameter.data).copy_(int_view(new.data))
        await self.cluster.clocks[name].sleep_until(self.world.now_ns() + 1000)
        ledger.end(interval)

    # ---- checking --------------------------------------------------------------------------------------------

    def _check(self, tasks: dict[str, SimTask], hung: list[str]) -> None:
        self.promises.check_end({name: _error(task) for name, task in tasks.items() if task.done()}, hung)
        for name, clock in self.cluster.clocks.items():
            for error in clock.unjoined() if self.cluster.alive(name) else ():
                self.report.violated(f"{name} dropped an error: {error!r}")
        for race in self.cluster.ledger.races:
            self.report.violated(str(race))


def _error(task: SimTask) -> BaseException | None:
    try:
        task.result()
    except BaseException as error:
        return error
    return None
