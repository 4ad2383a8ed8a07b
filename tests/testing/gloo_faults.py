"""One run of the scenario ``tiny-fault`` over gloo, ranks as threads, with faults planted: the same promises."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.reference.errors import PeerLost, UnsupportedCapability, WeightSyncError
from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.params import int_view
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import AnyFault, FaultHooks, FaultPlan
from weightsync.testing.history import History
from weightsync.testing.promises import Promises, Report
from weightsync.testing.ranks import GlooRanks
from weightsync.testing.tiny import MS, SETTINGS, memo, tiny_deployment, tiny_shards
from weightsync.testing.worlds import Program

LEASE_NS = 1_000 * MS
LIMIT_S = 45.0
"""A run that takes longer hangs."""

GLOO_SETTINGS = replace(
    SETTINGS, connect_ns=2_500 * MS, update_ns=2_500 * MS, lease_ns=5_000 * MS, patience_ns=20_000 * MS
)
LOSS_KNOWN_NS = 10 * LEASE_NS
"""By then every rank that lives knows of every loss, or the run is wrong."""


class GlooCase(NamedTuple):
    """One run to make; what a sweep hands to its processes."""

    faults: tuple[AnyFault, ...]
    receive: str = "stage"


class GlooFaultRun:
    """One run: build it, ``run`` it, read its report. See ``faults.FaultRun``, its twin in simulated time.

    Args:
        faults: what goes wrong; kill and fail only.
        updates: how many updates the faults may hit; one more, without faults, follows.
        receive: ``stage`` or ``stream``.
        seed: of the weights.
    """

    def __init__(
        self, faults: Sequence[AnyFault] = (), *, updates: int = 3, receive: str = "stage", seed: int = 0
    ) -> None:
        self.settings = replace(GLOO_SETTINGS, receive=receive)  # type: ignore[arg-type]
        self.deployment = tiny_deployment()
        self.history = History(self.deployment, memo())
        self.plan = FaultPlan(tuple(faults))
        self.report = Report(tuple(faults), hit=self.plan.hit)
        self.updates = updates
        self.seed = seed
        self.step = 0
        self.engines = {ref.number: _Engine(self, ref) for ref in self.deployment.rollouts}
        self.promises = Promises(
            self.deployment, self.history, self.plan, self.report,
            self._alive, lambda number: self.engines[number].generating,
        )  # fmt: skip
        self.params = [
            {name: torch.nn.Parameter(p.detach().clone(), requires_grad=False) for name, p in shards.items()}
            for shards in tiny_shards(seed, 0)
        ]
        for number, params in enumerate(self.params):
            for name, parameter in params.items():
                self.deployment.attributes[number][name].stamp(parameter)
        self.clocks: dict[str, AsyncioClock] = {}
        self.ended_ns: dict[str, int] = {}
        self.hooks = {
            rank: FaultHooks(str(rank), self.plan, _ThreadEffects(self, rank))
            for rank in self.deployment.ranks
        }
        self.ranks = GlooRanks(hooks=self.hooks, trace=self.report.trace, lease_ns=LEASE_NS, limit_s=LIMIT_S)

    def run(self) -> Report:
        """Run to the end and check every promise."""
        holdings: dict[RankId, Any] = {}
        programs: dict[RankId, Program] = {}
        for rank in self.deployment.trainers:
            holdings[rank] = Source(self.deployment.plan, rank.rank, self.params[rank.rank])
            programs[rank] = self._train
            self.report.outcomes[str(rank)] = []
        for ref in self.deployment.rollouts:
            for rank in ref.ranks:
                maps, weights = self.deployment.rollout_maps(rank), self.deployment.blank(rank)
                aliases = self.deployment.aliases(rank)
                target = Target(self.deployment.tensors, maps, weights, aliases, self.settings.route)
                holdings[rank] = self.promises.targets[rank] = target
                programs[rank] = partial(self._serve, ref)
        engines = {ref.leader: self.engines[ref.number] for ref in self.deployment.rollouts}
        hung: list[str] = []
        ends: dict[RankId, Any] = {}
        try:
            ends = self.ranks.run(programs, holdings, engines)
        except WeightSyncError as error:
            self.report.violated(str(error))
            hung = [str(rank) for rank in programs if str(rank) in str(error)]
        self._check(ends, hung)
        self.report.awaits = {str(rank): hooks.verbs for rank, hooks in self.hooks.items()}
        return self.report

    # ---- programs --------------------------------------------------------------------------------------------

    async def _train(self, verbs: Verbs) -> None:
        deployment, lead = self.deployment, verbs.me == self.deployment.trainers[0]
        self.clocks[str(verbs.me)] = verbs.clock  # type: ignore[assignment]
        trainer = Trainer(
            verbs, deployment.plan, deployment.trainers, deployment.rollouts, self.settings,
            self._on_version if lead else None, routes=deployment.routes(self.settings.route),
        )  # fmt: skip
        try:
            for step in range(self.updates + 1):
                if step == self.updates:
                    await self._quiet(verbs)
                for name, new in tiny_shards(self.seed, step)[verbs.me.rank].items():
                    int_view(self.params[verbs.me.rank][name].data).copy_(int_view(new.data))
                if lead:
                    self.step = step
                began = verbs.now_ns()
                self.report.outcomes[str(verbs.me)].append(await trainer.update())
                if lead:
                    self.promises.times.append((began, verbs.now_ns()))
        finally:
            self.ended_ns[str(verbs.me)] = verbs.now_ns()
            await trainer.close()

    async def _serve(self, ref: RolloutRef, verbs: Verbs) -> None:
        self.clocks[str(verbs.me)] = verbs.clock  # type: ignore[assignment]
        fingerprint, lead = self.deployment.plan.fingerprint, self.deployment.trainers[0]
        rollout = Rollout(verbs, fingerprint, ref.ranks, lead, self.settings)
        self.promises.rollouts[verbs.me] = rollout
        await rollout.run()

    async def _quiet(self, verbs: Verbs) -> None:
        """The last fault is over, and its losses are known to this rank."""
        self.plan.disarm()
        until_ns = verbs.now_ns() + LOSS_KNOWN_NS
        while any(not verbs.is_lost(rank) for rank in self.ranks.killed) and verbs.now_ns() < until_ns:
            await verbs.clock.sleep_until(verbs.now_ns() + 20 * MS)

    def _on_version(self, version: int, slot: int) -> None:
        self.history.record(version, self.params, key=(self.seed, self.step))

    # ---- checking --------------------------------------------------------------------------------------------

    def _alive(self, name: str) -> bool:
        return RankId.parse(name) not in self.ranks.killed

    def _check(self, ends: dict[RankId, Any], hung: Sequence[str]) -> None:
        errors = {str(rank): end if isinstance(end, BaseException) else None for rank, end in ends.items()}
        self.promises.check_end(errors, hung)
        for name, clock in self.clocks.items():
            for error in clock.unjoined() if self._alive(name) else ():
                if error is not errors.get(name):
                    self.report.violated(f"{name} dropped an error: {error!r}")
        if self.ranks.left_over:
            self.report.violated(f"threads are left over: {', '.join(self.ranks.left_over)}")
        budget_ns = LEASE_NS + self.settings.connect_ns + 2 * self.settings.update_ns
        for name, end in errors.items():
            if isinstance(end, PeerLost) and self.plan.times_ns:
                took_ns = self.ended_ns.get(name, 0) - self.plan.times_ns[0]
                if took_ns > budget_ns:
                    self.report.violated(f"{name} heard of the loss of {end.peer} after {took_ns // MS} ms")


class _ThreadEffects:
    """Implements ``sim.faults.Effects`` for a rank that is a thread."""

    def __init__(self, run: GlooFaultRun, rank: RankId) -> None:
        self.run = run
        self.rank = rank

    async def kill(self, rank: str) -> None:
        self.run.ranks.kill(self.rank)
        clock = self.run.clocks[rank]
        await clock.wait(clock.future(), None)

    async def stall(self, rank: str, verb: str, index: int) -> None:
        raise UnsupportedCapability(
            f"{rank} cannot be stalled at await {index}: a real clock is not; plan kill or fail"
        )

    def now_ns(self) -> int:
        return time.monotonic_ns()


class _Engine:
    """What generates on one rollout: whenever that begins or ends, the bits are compared."""

    def __init__(self, run: GlooFaultRun, ref: RolloutRef) -> None:
        self.run = run
        self.ref = ref
        self.generating = False

    async def pause(self) -> None:
        """Stop; the requests read what must have been whole until now."""
        if self.generating:
            self.run.promises.check_bits(self.ref, "while it generates")
        self.generating = False

    async def resume(self) -> None:
        """Begin to read."""
        if not self.generating:
            self.generating = True
            self.run.promises.check_bits(self.ref, "while it generates")


def gloo_violations(case: GlooCase) -> tuple[str, ...]:
    """The promises that one run broke, with the verbs that its faults hit."""
    report = GlooFaultRun(case.faults, receive=case.receive).run()
    return (str(report),) if report.violations else ()


def gloo_awaits(receive: str = "stage") -> dict[str, list[str]]:
    """Each rank's verbs in a run without faults. What it broke is raised."""
    report = GlooFaultRun(receive=receive).run()
    if report.violations:
        raise WeightSyncError(f"a run without faults is wrong: {report}")
    return report.awaits
