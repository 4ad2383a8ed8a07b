"""The verbs on a modelled cluster: local steps cost time half-way, messages a latency, buckets a shared link."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.reference.control import Control, Message
from weightsync.reference.members import RankId
from weightsync.reference.rank import Engine, Hooks, Verbs
from weightsync.reference.rendezvous import Meeting, MeetingFabric, Meetings, Rendezvous
from weightsync.reference.steps import Step, Touched
from weightsync.reference.trace import Trace
from weightsync.sim.clock import SimClock
from weightsync.sim.costs import cost_ns
from weightsync.sim.fluid import FluidNet
from weightsync.sim.hardware import Profile
from weightsync.sim.ledger import Interval, Ledger
from weightsync.sim.world import SimWorld

T = TypeVar("T")

BEATS_PER_LEASE = 4
"""How often within a lease a rank looks at the leases of the others."""


class SimCluster:
    """Every rank of one simulated run: one world, one shared link, one control network, one ledger.

    Args:
        world: the simulated time.
        profile: the hardware, with a provenance for each number.
        lease_ns: how long after a kill the control plane of the others knows of it.
        detect_ns: how long after a kill its data groups break.
        priced: verb -> the name under which it is priced, where that is another one.
    """

    def __init__(
        self,
        world: SimWorld,
        profile: Profile,
        *,
        lease_ns: int,
        detect_ns: int = 0,
        priced: Mapping[str, str] | None = None,
    ) -> None:
        self.world = world
        self.profile = profile
        self.lease_ns = lease_ns
        self.detect_ns = detect_ns
        self.priced = dict(priced or {})
        self.ledger = Ledger()
        self.net = FluidNet(world)
        self.link = profile.network
        self.clocks: dict[str, SimClock] = {}
        self.controls: dict[str, Control] = {}
        self.meetings = Meetings(self._carry)
        self._lives: Counter[str] = Counter()
        self._born_ns: dict[str, int] = {}

    def verbs(
        self,
        me: RankId,
        local: Any,
        *,
        engine: Engine | None = None,
        trace: Trace | None = None,
        hooks: Hooks | None = None,
    ) -> SimVerbs:
        """The verbs of one rank; ``local`` moves real bytes (``Source``, ``Target``) or only counts them.

        Asked for again, after a kill, they are those of another process in its place: it holds nothing, takes in
        what is still under way to that name, and is known to the others a quarter of a lease later.
        """
        name = str(me)
        self._lives[name] += 1
        self._born_ns[name] = self.world.now_ns()
        if self._lives[name] > 1:
            told_ns = self.world.now_ns() + self.lease_ns // BEATS_PER_LEASE
            self.world.call_at(told_ns, lambda: self._find(name))
        clock = SimClock(self.world, name)
        control = Control(name, clock, SimMail(self, name))
        self.clocks[name], self.controls[name] = clock, control
        fabric = MeetingFabric(me, clock, self.meetings)
        return SimVerbs(me, clock, control, fabric, local, engine, trace, hooks, cluster=self)

    def kill(self, rank: str) -> None:
        """Freeze a rank for ever; its groups break after ``detect_ns``, its lease ends after ``lease_ns``."""
        self.clocks[rank].kill()
        self.ledger.forget(rank)
        now, life = self.world.now_ns(), self._lives[rank]
        self.world.call_at(now + self.detect_ns, lambda: self.meetings.lost(RankId.parse(rank)))
        self.world.call_at(now + self.lease_ns, lambda: self._lose(rank, life))

    def alive(self, rank: str) -> bool:
        """False once the rank was killed."""
        return not self.clocks[rank].dead

    def _lose(self, rank: str, life: int) -> None:
        """The lease of a killed process ended, unless another one holds it by now."""
        for name, control in self.controls.items():
            if self.alive(name) and self._lives[rank] == life:
                control.lost(rank)

    def _find(self, rank: str) -> None:
        """Everybody who was there before sees another process in the place of ``rank``."""
        for name, control in self.controls.items():
            if self.alive(name) and self.alive(rank) and self._born_ns[name] < self._born_ns[rank]:
                if not control.is_lost(rank):
                    control.lost(rank)
                control.found(rank)

    def _carry(self, rendezvous: Rendezvous, meeting: Meeting) -> None:
        if meeting.op == "open":
            when = self.world.now_ns() + self.profile.control.connect_ns
            self.world.call_at(when, lambda: rendezvous.done(meeting))
            return
        nbytes = sum(_wire_bytes(payload) for payload in meeting.payloads.values())
        carried = self.net.transfer([self.link], nbytes)
        carried.on_done(lambda: rendezvous.done(meeting))


class SimMail:
    """One rank's way out to the control network; implements ``control.Transport``.

    Attributes:
        late_ns: added to the next message's latency, then cleared; how a fault delays a post.
    """

    def __init__(self, cluster: SimCluster, me: str) -> None:
        self.cluster = cluster
        self.me = me
        self.late_ns = 0

    def put(self, peer: str, message: Message) -> None:
        """See ``control.Transport.put``."""
        late_ns, self.late_ns = self.late_ns, 0
        text = json.dumps(message)  # it owns its memory and hides no object, as on a wire
        when = self.cluster.world.now_ns() + cost_ns("post", 0, self.cluster.profile) + late_ns

        def deliver() -> None:
            if peer in self.cluster.controls and self.cluster.alive(peer):
                self.cluster.controls[peer].deliver(json.loads(text))

        self.cluster.world.call_at(when, deliver)


class SimVerbs(Verbs):
    """The verbs of one simulated rank. A step's bytes move half at the start and half at the end of its time."""

    def __init__(self, *args: Any, cluster: SimCluster) -> None:
        super().__init__(*args)
        self.cluster = cluster

    async def perform(self, name: str, step: Step[T]) -> T:
        """Result of a local step, after the time that the profile gives it; the ledger sees what it touches."""
        ledger, clock = self.cluster.ledger, self.clock
        try:
            touched = next(step)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        interval = ledger.begin(str(self.me), name, touched, clock.now_ns())
        try:
            await clock.sleep_until(
                clock.now_ns()
                + cost_ns(self.cluster.priced.get(name, name), touched.nbytes, self.cluster.profile)
            )
            return _finish(step)
        finally:
            ledger.end(interval)
            step.close()


class SimEngine:
    """The generating side of one rollout: while it runs it reads the weights of all the rollout's ranks.

    Args:
        cluster: where it runs.
        ranks: the rollout's ranks, leader first.
        on_change: called when requests are about to read again, and when they have read for the last time.
    """

    def __init__(
        self, cluster: SimCluster, ranks: Sequence[RankId], on_change: Callable[[], None] | None = None
    ) -> None:
        self.cluster = cluster
        self.ranks = tuple(ranks)
        self.on_change = on_change
        self._reading: dict[str, Interval] = {}

    async def pause(self) -> None:
        """Return once the requests in flight are drained; no-op when paused."""
        await self._spend("pause")
        if self._reading and self.on_change is not None:
            self.on_change()
        for interval in self._reading.values():
            self.cluster.ledger.end(interval)
        self._reading = {}

    async def resume(self) -> None:
        """Let requests read again; no-op when they do."""
        await self._spend("resume")
        if self._reading:
            return
        if self.on_change is not None:
            self.on_change()
        for rank in self.ranks:
            if self.cluster.alive(str(rank)):
                touched = Touched(0, reads=("weights",))
                now = self.cluster.world.now_ns()
                self._reading[str(rank)] = self.cluster.ledger.begin(str(rank), "generate", touched, now)

    @property
    def generating(self) -> bool:
        """True while requests read the weights."""
        return bool(self._reading)

    async def _spend(self, verb: str) -> None:
        clock = self.cluster.clocks[str(self.ranks[0])]
        await clock.sleep_until(clock.now_ns() + cost_ns(verb, 0, self.cluster.profile))


def _finish(step: Step[T]) -> T:
    try:
        next(step)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise RuntimeError("a step paused twice; it must yield exactly once, half-way")


def _wire_bytes(payload: Any) -> int:
    if isinstance(payload, list):
        return 8 * len(payload)
    nbytes: int = getattr(payload, "nbytes", 0)
    return nbytes
