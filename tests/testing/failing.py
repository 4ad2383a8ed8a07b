"""A few updates of the tiny deployment on any backend, with one verb of one rank going wrong in one update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.params import int_view
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trace import Span, Trace
from weightsync.reference.trainer import Trainer
from weightsync.testing.history import History
from weightsync.testing.tiny import MS, memo, tiny_deployment, tiny_shards
from weightsync.testing.worlds import Program, world_of

SETTINGS = ProtocolSettings(
    verify_every=2, on_rollout_loss="continue",
    connect_ns=2_000 * MS, update_ns=2_000 * MS, lease_ns=6_000 * MS, patience_ns=30_000 * MS,
)  # fmt: skip
STALL_NS = 2_500 * MS
"""Longer than an update may take, shorter than the lease."""


class Unwatched(Trace):
    """Forgets every span, so that what a long run keeps is its own."""

    def add(self, span: Span) -> None:
        """Nothing."""


@dataclass(frozen=True)
class Wrong:
    """What goes wrong: the ``nth`` call of a verb in an update, counted from 1.

    Attributes:
        rank: name of the rank.
        update: number of the update; 0 for every one that 3 does not divide.
        verb: name of the verb.
        nth: which call of it.
        kind: as of ``sim.faults.Fault``.
        times: how many calls in a row go wrong.
    """

    rank: str
    update: int
    verb: str
    nth: int = 1
    kind: Literal["fail", "fail-after", "stall", "kill"] = "fail"
    times: int = 1


class WrongHooks:
    """Makes it go wrong; implements ``reference.rank.Hooks``."""

    def __init__(self, verbs: Verbs, wrong: Wrong, kill: Callable[[RankId], None]) -> None:
        self.verbs, self.wrong, self.kill = verbs, wrong, kill
        self.seen: dict[int, int] = {}
        self.hits = 0

    async def before(self, verb: str) -> int:
        """See ``reference.rank.Hooks``; returns 1 for the call that fails after it took effect."""
        wrong, update, clock = self.wrong, self.verbs.update, self.verbs.clock
        if verb != wrong.verb or not (update == wrong.update or (not wrong.update and update % 3)):
            return 0
        self.seen[update] = self.seen.get(update, 0) + 1
        if not wrong.nth <= self.seen[update] < wrong.nth + wrong.times:
            return 0
        self.hits += 1
        if wrong.kind == "fail":
            raise OSError("planted")
        if wrong.kind == "stall":
            await clock.sleep_until(clock.now_ns() + STALL_NS)
        if wrong.kind == "kill":
            self.kill(self.verbs.me)
            await clock.wait(clock.future(), None)
        return int(wrong.kind == "fail-after")

    async def after(self, verb: str, ordinal: int) -> None:
        """See ``reference.rank.Hooks``."""
        if ordinal:
            raise OSError("planted, too late")


class FailingRun:
    """Run it with ``run``, then look.

    Args:
        backend: name of a world.
        wrong: what goes wrong, or None.
        updates: how many updates; the weights change in each, in a circle of four.
        settings: of the protocol.
        each: called on the lead after each update.
        change: changes each rank's verbs before it runs.

    Attributes:
        outcomes: the lead's.
        torn: where a rollout generated anything but what its label says.
        rollouts, targets: the ranks' halves and bytes.
        generating: per rollout, whether it does.
        ends: what each rank's program returned or raised.
    """

    def __init__(
        self,
        backend: str,
        wrong: Wrong | None = None,
        *,
        updates: int = 4,
        settings: ProtocolSettings = SETTINGS,
        trace: Trace | None = None,
        each: Callable[[Outcome], None] = lambda outcome: None,
        change: Callable[[Verbs], None] = lambda verbs: None,
    ) -> None:
        self.wrong, self.updates, self.settings, self.each = wrong, updates, settings, each
        self.change = change
        self.deployment = tiny_deployment()
        self.history = History(self.deployment, memo())
        self.world = world_of(backend)(self._plant, trace=trace)
        self.outcomes: list[Outcome] = []
        self.torn: list[str] = []
        self.rollouts: dict[RankId, Rollout] = {}
        self.targets: dict[RankId, Target] = {}
        self.trainers: dict[RankId, Trainer] = {}
        self.generating: dict[int, bool] = {}
        self.hooks: WrongHooks | None = None
        self.step = 0
        self.killed: set[RankId] = set()
        self.params = [
            {name: torch.nn.Parameter(p.detach().clone(), requires_grad=False) for name, p in shards.items()}
            for shards in tiny_shards(0, 0)
        ]
        for number, params in enumerate(self.params):
            for name, parameter in params.items():
                self.deployment.attributes[number][name].stamp(parameter)

    def run(self) -> FailingRun:
        """Run to the end."""
        holdings: dict[RankId, Any] = {}
        programs: dict[RankId, Program] = {}
        engines: dict[RankId, Any] = {}
        for rank in self.deployment.trainers:
            holdings[rank], programs[rank] = self.source(rank), self.train
        for ref in self.deployment.rollouts:
            engines[ref.leader] = _Checked(self, ref)
            for rank in ref.ranks:
                holdings[rank] = self.targets[rank] = self.target(rank)
                programs[rank] = partial(self.serve, ref)
        self.ends = self.world.run(programs, holdings, engines)
        return self

    def source(self, rank: RankId) -> Source:
        """The bytes of a trainer rank."""
        return Source(self.deployment.plan, rank.rank, self.params[rank.rank])

    def target(self, rank: RankId) -> Target:
        """The bytes of a rollout rank, all zero."""
        deployment = self.deployment
        maps, weights = deployment.rollout_maps(rank), deployment.blank(rank)
        return Target(deployment.tensors, maps, weights, deployment.aliases(rank))

    async def train(self, verbs: Verbs) -> None:
        """What a trainer rank does."""
        deployment, lead = self.deployment, verbs.me == self.deployment.trainers[0]
        trainer = self.trainers[verbs.me] = Trainer(
            verbs, deployment.plan, deployment.trainers, deployment.rollouts, self.settings,
            self._record if lead else None,
        )  # fmt: skip
        try:
            for number in range(self.updates):
                for name, new in tiny_shards(0, number % 4)[verbs.me.rank].items():
                    int_view(self.params[verbs.me.rank][name].data).copy_(int_view(new.data))
                if lead:
                    self.step = number % 4
                outcome = await trainer.update()
                if lead:
                    self.outcomes.append(outcome)
                    self.each(outcome)
        finally:
            await trainer.close()

    async def serve(self, ref: RolloutRef, verbs: Verbs) -> None:
        """What a rollout rank does."""
        plan, lead = self.deployment.plan, self.deployment.trainers[0]
        self.rollouts[verbs.me] = Rollout(verbs, plan.fingerprint, ref.ranks, lead, self.settings)
        await self.rollouts[verbs.me].run()

    def look(self, ref: RolloutRef) -> None:
        """A rollout that generates holds what its label says, on every rank that lives."""
        label = self.rollouts[ref.leader].version
        for rank in (one for one in ref.ranks if one not in self.killed):
            for difference in self.history.differences(label, rank, self.targets[rank].weights):
                self.torn.append(f"{rank} under label {label}: {difference}")

    def holds(self, version: int) -> bool:
        """True when every rollout that lives has this label, is clean and generates."""
        return all(
            (self.rollouts[ref.leader].version, self.rollouts[ref.leader].dirty) == (version, None)
            and self.generating[ref.number]
            for ref in self.deployment.rollouts
            if not self.killed.intersection(ref.ranks)
        )

    def _plant(self, verbs: Verbs) -> None:
        self.change(verbs)
        if self.wrong is not None and str(verbs.me) == self.wrong.rank:
            verbs.hooks = self.hooks = WrongHooks(verbs, self.wrong, self._kill)

    def _kill(self, rank: RankId) -> None:
        self.killed.add(rank)
        self.world.kill(rank)

    def _record(self, version: int, slot: int) -> None:
        self.history.record(version, self.params, key=(0, self.step))


class _Checked:
    """An engine whose requests must find what the label says whenever they begin and end to be served."""

    def __init__(self, run: FailingRun, ref: RolloutRef) -> None:
        self.run, self.ref = run, ref
        run.generating[ref.number] = False

    async def pause(self) -> None:
        """Stop."""
        if self.run.generating[self.ref.number]:
            self.run.look(self.ref)
        self.run.generating[self.ref.number] = False

    async def resume(self) -> None:
        """Go on."""
        self.run.generating[self.ref.number] = True
        self.run.look(self.ref)


def streaming(settings: ProtocolSettings = SETTINGS) -> ProtocolSettings:
    """The same, buckets written as they come."""
    return replace(settings, receive="stream")
