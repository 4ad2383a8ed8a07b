"""What a run builds for each rank, on every backend: settings, bytes, both halves of the protocol, an engine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

from weightsync.cli.model.synthetic import SyntheticTrainer, SyntheticWorkload
from weightsync.cli.model.trainer import DemoTrainer
from weightsync.cli.rl.engine import TokenTurns
from weightsync.cli.scenario import Scenario
from weightsync.reference.baselines import make_baseline
from weightsync.reference.deployment import Deployment
from weightsync.reference.holdings import Holding
from weightsync.reference.issue_order import OrderedTrainer
from weightsync.reference.live_push import LiveBaseline, LiveTrainer
from weightsync.reference.members import RankId
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.rowmap import RowMap
from weightsync.reference.seams import Engine
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.sim.phantom import PhantomTarget

MS = 1_000_000
PATIENCE = 20
"""Deadlines of an update that a rank waits for a verdict whose decider is alive."""


class IdleEngine:
    """A rollout's engine with nothing to generate yet; implements ``reference.rank.Engine``.

    Attributes:
        generating: True between ``resume`` and ``pause``.
    """

    def __init__(self) -> None:
        self.generating = False

    async def pause(self) -> None:
        """Stop; no request is in flight."""
        self.generating = False

    async def resume(self) -> None:
        """Go on."""
        self.generating = True


def make_engine(scenario: Scenario) -> Engine:
    """The engine of a rollout's leader: one that generates, if the workload has anything to generate."""
    return TokenTurns() if scenario.workload.kind == "rl" else IdleEngine()


def settings(scenario: Scenario) -> ProtocolSettings:
    """What the scenario's policy tells the protocol."""
    policy = scenario.policy
    return ProtocolSettings(
        receive=policy.receive,
        route=policy.route,
        verify_every=policy.verify_every,
        history_bytes=policy.history_bytes,
        on_rollout_loss=policy.on_rollout_loss,
        connect_ns=policy.update_ms * MS,
        update_ns=policy.update_ms * MS,
        lease_ns=policy.lease_ms * MS,
        patience_ns=PATIENCE * policy.update_ms * MS,
    )


def seeded(scenario: Scenario, seed: int | None) -> Scenario:
    """The scenario with everything drawn from ``seed``; None leaves its own."""
    if seed is None:
        return scenario
    return scenario.model_copy(update={"workload": scenario.workload.model_copy(update={"seed": seed})})


def without_kill(scenario: Scenario) -> Scenario:
    """The scenario as a backend can run it that has no process per rank."""
    return scenario.model_copy(update={"faults": scenario.faults.model_copy(update={"kill": None})})


def optimizer_steps(scenario: Scenario, update: int) -> int:
    """Optimizer steps before an update, from 1: with ``rl`` none before the first, which seeds the rollouts."""
    work = scenario.workload
    if work.kind != "rl":
        return 1
    return work.rl.num_iters_per_train_update if update > 1 else 0


def piece_counts(scenario: Scenario, deployment: Deployment, step: int) -> tuple[int, ...]:
    """Elements of each of the plan's pieces that change in ``step``, from 1, drawn at ``workload.density``.

    Exact for a synthetic workload whose tensors are one piece each; a larger tensor's count is spread evenly.
    """
    work = scenario.workload
    counts = SyntheticWorkload(deployment.tensors, work.density, work.seed).counts(step)
    shares = []
    for piece in deployment.plan.pieces:
        total, numel = counts[piece.tensor], max(1, deployment.tensors[piece.tensor].numel)
        shares.append((piece.base + piece.count) * total // numel - piece.base * total // numel)
    return tuple(shares)


def make_source(
    scenario: Scenario, deployment: Deployment, rank: int, params: Mapping[str, Tensor], trainer: object
) -> Source:
    """A trainer rank's bytes, with the baseline of the scenario's policy; ``trainer`` is what changes ``params``."""
    name, maps = scenario.policy.baseline, deployment.plan.maps[rank]
    if scenario.policy.snapshot == "none":
        return Source(deployment.plan, rank, params, LiveBaseline(maps, params))
    marks = trainer.dirty if isinstance(trainer, (DemoTrainer, SyntheticTrainer)) else []
    return Source(deployment.plan, rank, params, make_baseline(name, maps, marks[rank] if marks else None))


def blank_target(scenario: Scenario, deployment: Deployment, rank: RankId) -> Target:
    """A rollout rank's bytes before the first update: allocated, zero."""
    maps, route = deployment.rollout_maps(rank), scenario.policy.route
    return Target(deployment.tensors, maps, deployment.blank(rank), deployment.aliases(rank), route)


def counted_target(scenario: Scenario, deployment: Deployment, rank: RankId) -> PhantomTarget:
    """A rollout rank's bytes, counted only."""
    maps = deployment.rollout_maps(rank)
    owned = scenario.policy.route == "owned"
    tensors = deployment.tensors
    return PhantomTarget(maps, Holding.of(tensors, maps.values()) if owned else Holding.whole(tensors))


def trainer_half(scenario: Scenario, deployment: Deployment, verbs: Verbs) -> Trainer:
    """The protocol's half of one trainer rank."""
    lead = verbs.me == deployment.trainers[0]
    routes = deployment.routes(scenario.policy.route) if lead else None
    kind = OrderedTrainer if scenario.policy.snapshot != "none" else LiveTrainer
    return kind(
        verbs, deployment.plan, deployment.trainers, deployment.rollouts, settings(scenario), routes=routes
    )


def rollout_half(scenario: Scenario, deployment: Deployment, verbs: Verbs) -> Rollout:
    """The protocol's half of one rollout rank."""
    ranks = deployment.rollouts[verbs.me.rollout].ranks
    return Rollout(verbs, deployment.plan.fingerprint, ranks, deployment.trainers[0], settings(scenario))


def priced(scenario: Scenario) -> dict[str, str]:
    """Verb -> the name under which it is priced on simulated time, where that is another one."""
    return {"snapshot": "snapshot_on_device"} if scenario.policy.snapshot == "device" else {}


def local_bytes(row_map: RowMap) -> int:
    """Bytes of one runtime parameter on its rank."""
    return math.prod(row_map.local_shape) * row_map.dtype.itemsize
