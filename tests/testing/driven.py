"""A run on the simulated clock that a test drives push by push, and what it must look like between two of them."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from weightsync.reference.control import Message
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.status import TrainerStatus
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.sim.backend import SimCluster, SimEngine, SimMail, SimVerbs
from weightsync.sim.faults import AnyFault, FaultHooks, FaultPlan
from weightsync.sim.hardware import load_profile
from weightsync.sim.world import SimWorld
from weightsync.testing.faults import SimEffects
from weightsync.testing.history import History
from weightsync.testing.states import change, overwrite
from weightsync.testing.tiny import LIMIT_NS, MS, STALL_NS

LEASE_NS = 2 * STALL_NS


@lru_cache(maxsize=64)
def small_deployment(trainers: int, layouts: tuple[RolloutLayout, ...]) -> Deployment:
    """About two dozen elements on a few ranks, in buckets so small that an update has several."""
    model = ModelShape(vocab=3, hidden=1, intermediate=2, layers=1, heads=2, kv_heads=2, head_dim=1)
    return Deployment(model, trainers, layouts, bucket_bytes=192, trainer_multiple=2, rollout_multiple=4)


class _Mail(SimMail):
    """A rank's way out, which loses replies to commits when the run says so."""

    def __init__(self, run: DrivenRun, name: str) -> None:
        super().__init__(run.cluster, name)
        self.run = run

    def put(self, peer: str, message: Message) -> None:
        """See ``control.Transport.put``."""
        if message["kind"] == "request" and message["op"] == "commit":
            self.run.commits.add((peer, self.me, message["number"]))
        replies = message["kind"] == "reply" and (self.me, peer, message["number"]) in self.run.commits
        if replies and self.run.drops > 0:
            self.run.drops -= 1
            return
        super().put(peer, message)


class DrivenRun:
    """Every rank of a deployment on simulated time; between two calls everything stands still.

    Args:
        deployment: who holds what.
        settings: of the protocol.
        trainer, rollout: its two halves; a wrong protocol is a subclass of one.
        absent: numbers of the rollouts that are not there yet.
        detect_ns: how long after a kill its data groups break.
        seed: of the weights.

    Attributes:
        history: the bits of every version that left the trainer.
        damaged: numbers of the rollouts in whose weights ``flip`` wrote and nothing healed them yet.
        commits: (answers, asks, number) of every call of a commit.
        drops: how many replies to commits are still to be lost.
        broken: sentences about promises that were not kept while verbs ran.
    """

    def __init__(
        self,
        deployment: Deployment,
        settings: ProtocolSettings,
        *,
        trainer: type[Trainer] = Trainer,
        rollout: type[Rollout] = Rollout,
        absent: Sequence[int] = (),
        detect_ns: int = 0,
        seed: int = 0,
    ) -> None:
        self.deployment, self.settings = deployment, settings
        self.history = History(deployment)
        self.world = SimWorld()
        self.cluster = SimCluster(self.world, load_profile("laptop"), lease_ns=LEASE_NS, detect_ns=detect_ns)
        self.stream = torch.Generator().manual_seed(seed)
        self.state = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
        self.params = [deployment.shards(rank.rank, self.state) for rank in deployment.trainers]
        self.sources: list[Source] = []
        self.rollouts: dict[RankId, Rollout] = {}
        self.targets: dict[RankId, Target] = {}
        self.engines: dict[int, SimEngine] = {}
        self.tasks: list[Any] = []
        self.damaged: set[int] = set()
        self.commits: set[tuple[str, str, Any]] = set()
        self.drops = 0
        self.broken: list[str] = []
        self._kind = rollout
        self.trainers = [self._make_trainer(trainer, rank) for rank in deployment.trainers]
        for ref in deployment.rollouts:
            if ref.number not in absent:
                self.start(ref)

    # ---- what may happen -------------------------------------------------------------------------------------

    def step(self, kinds: Sequence[str]) -> None:
        """One optimizer step: per tensor, in turn, one of ``states.KINDS``."""
        for number, tensor in enumerate(self.state.values()):
            change(tensor, kinds[number % len(kinds)], self.stream)
        for rank, params in enumerate(self.params):
            overwrite(params, self.deployment.shards(rank, self.state))

    def push(self, faults: Sequence[AnyFault] = ()) -> list[Outcome]:
        """One update on every trainer rank under ``faults``, whose awaits count from here; their outcomes."""
        plan = FaultPlan(tuple(faults))
        for name, half in self._halves().items():
            half.verbs.hooks = FaultHooks(name, plan, SimEffects(self.cluster, lambda rank: None))
        found = self.drive({str(one.verbs.me): one.update() for one in self.trainers}, "update")
        plan.disarm()
        return list(found.values())

    def start(self, ref: RolloutRef) -> None:
        """New processes in the place of all ranks of a rollout; they hold nothing."""
        for rank in ref.ranks:
            if str(rank) in self.cluster.clocks and self.cluster.alive(str(rank)):
                self.cluster.kill(str(rank))
        self.damaged.discard(ref.number)
        self.wait(self.cluster.detect_ns // MS + 2)
        for rank in ref.ranks:
            self.rollouts[rank] = self._make_rollout(ref, rank)
        for rank in ref.ranks:
            self.tasks.append(self.cluster.clocks[str(rank)].spawn(self.rollouts[rank].run(), "main"))

    def lose(self, ref: RolloutRef) -> None:
        """All ranks of a rollout end."""
        for rank in ref.ranks:
            self.cluster.kill(str(rank))

    def flip(self, ref: RolloutRef, which: int) -> None:
        """One bit of one element that the rollout counts in its digest flips in memory."""
        owned = [
            (rank, name, position)
            for rank in ref.ranks
            for name, one in self.deployment.rollout_maps(rank).items()
            for position in one.owned.repeat_interleave(one.width).nonzero().flatten().tolist()
        ]
        rank, name, position = owned[which % len(owned)]
        int_view(self.targets[rank].weights[name])[position] ^= 1 << which % 8
        self.damaged.add(ref.number)

    def wait(self, for_ms: int) -> None:
        """Let time pass."""
        clock = self.cluster.clocks[str(self.deployment.trainers[0])]
        self.drive({clock.name: clock.sleep_until(self.world.now_ns() + for_ms * MS)}, "wait")

    def ask(self) -> TrainerStatus:
        """The lead's status, asked over the control network."""
        lead = self.trainers[0]
        name = str(lead.verbs.me)
        found: TrainerStatus = self.drive({name: lead.status(self.world.now_ns() + 50 * MS)}, "status")[name]
        return found

    def close(self) -> list[str]:
        """End the run; what did not end as it should."""
        for half in self._halves().values():
            half.verbs.hooks = None
        with self.world:
            self.drive({str(one.verbs.me): one.close() for one in self.trainers}, "close")
            self.world.run(self.tasks, limit_ns=self.world.now_ns() + LIMIT_NS)
            hung = self.world.run(self.tasks, limit_ns=self.world.now_ns() + LIMIT_NS)
        wrong = [f"{task.clock.name} hangs" for task in hung]
        for name, clock in self.cluster.clocks.items():
            wrong += [f"{name} dropped {error!r}" for error in (clock.unjoined() if not clock.dead else ())]
        return wrong + [str(race) for race in self.cluster.ledger.races]

    # ---- what must hold --------------------------------------------------------------------------------------

    def alive(self, ref: RolloutRef) -> bool:
        """True while every rank of the rollout is there."""
        return all(str(rank) in self.cluster.clocks and self.cluster.alive(str(rank)) for rank in ref.ranks)

    def live(self) -> list[RolloutRef]:
        """The rollouts of which every rank is there."""
        return [ref for ref in self.deployment.rollouts if self.alive(ref)]

    def problems(self) -> list[str]:
        """Broken promises, one sentence each: dirty rollouts pause, labels tell the bits, numbers are used once."""
        found = [*self.broken, *(f"version {version} was used twice" for version in self.history.reused)]
        for ref in self.live():
            if self.engines[ref.number].generating:
                found += self.torn(ref)
        return found

    def torn(self, ref: RolloutRef) -> list[str]:
        """Why a rollout must not generate now; empty when it may, or when bits were flipped behind its back."""
        leader = self.rollouts[ref.leader]
        found = [f"{ref.leader} generates although {leader.dirty}"] if leader.dirty is not None else []
        if ref.number in self.damaged:
            return found
        for rank in ref.ranks:
            if not self.cluster.alive(str(rank)):
                continue
            if self.rollouts[rank].version != leader.version:
                found.append(f"{rank} has label {self.rollouts[rank].version}, its leader {leader.version}")
            found += [f"{rank} generates: {one}" for one in self.differences(rank, leader.version)]
        return found

    def differences(self, rank: RankId, version: int) -> list[str]:
        """Where a rank's weights are not those of a version."""
        return self.history.differences(version, rank, self.targets[rank].weights)

    def baseline(self) -> list[str]:
        """Where the acknowledged snapshot of a trainer rank is not the version that it is taken for."""
        found = []
        for trainer, source in zip(self.trainers, self.sources, strict=True):
            slot = trainer.slots.acknowledged
            if slot is None:
                continue
            version = trainer.slots.version(slot)
            expected = self.deployment.shards(trainer.verbs.me.rank, self.history.versions[version])
            for name, tensor in source.held(slot).items():
                if not bool((int_view(tensor) == int_view(expected[name].data)).all()):
                    found.append(f"{trainer.verbs.me} holds other bits of {name} as version {version}")
        return found

    # ---- inner -----------------------------------------------------------------------------------------------

    def drive(self, work: Mapping[str, Coroutine[Any, Any, Any]], what: str) -> dict[str, Any]:
        """Run coroutines of ranks side by side, to their ends; what each returned. Their errors are raised."""
        tasks = [self.cluster.clocks[name].spawn(one, what) for name, one in work.items()]
        hung = self.world.run(tasks, limit_ns=self.world.now_ns() + LIMIT_NS)
        if hung:
            raise AssertionError(f"{', '.join(task.clock.name for task in hung)} hangs in {what}")
        return {name: task.result() for name, task in zip(work, tasks, strict=True)}

    def _halves(self) -> dict[str, Trainer | Rollout]:
        halves: list[Trainer | Rollout] = [*self.trainers, *self.rollouts.values()]
        return {str(half.verbs.me): half for half in halves if self.cluster.alive(str(half.verbs.me))}

    def _verbs(self, rank: RankId, local: Source | Target, engine: SimEngine | None = None) -> SimVerbs:
        verbs = self.cluster.verbs(rank, local, engine=engine)
        self.cluster.controls[str(rank)].transport = _Mail(self, str(rank))
        return verbs

    def _make_trainer(self, kind: type[Trainer], rank: RankId) -> Trainer:
        source = Source(self.deployment.plan, rank.rank, self.params[rank.rank])
        self.sources.append(source)
        told = self._record if rank == self.deployment.trainers[0] else None
        return kind(
            self._verbs(rank, source), self.deployment.plan, self.deployment.trainers, self.deployment.rollouts,
            self.settings, told, routes=self.deployment.routes(self.settings.route),
        )  # fmt: skip

    def _make_rollout(self, ref: RolloutRef, rank: RankId) -> Rollout:
        deployment = self.deployment
        blank, maps = deployment.blank(rank), deployment.rollout_maps(rank)
        self.targets[rank] = Target(
            deployment.tensors, maps, blank, deployment.aliases(rank), self.settings.route
        )
        engine = None
        if rank == ref.leader:
            engine = SimEngine(self.cluster, ref.ranks, lambda: self.broken.extend(self.torn(ref)))
            self.engines[ref.number] = engine
        verbs = self._verbs(rank, self.targets[rank], engine)
        return self._kind(
            verbs, deployment.plan.fingerprint, ref.ranks, deployment.trainers[0], self.settings
        )

    def _record(self, version: int, slot: int) -> None:
        self.history.record(version, self.params)


def same_state(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    """True when two checkpoints have the same bits."""
    return all(bool((int_view(left[name]) == int_view(right[name])).all()) for name in left)
