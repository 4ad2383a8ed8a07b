"""Faults at awaits: kill, stall, fail, fail-after; planned one by one, exhaustively, or drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias, get_args

FaultKind = Literal["kill", "stall", "fail", "fail-after"]
KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


class InjectedFault(Exception):
    """A verb failed on purpose; not one of this package's own errors, like anything that a library may raise."""


@dataclass(frozen=True, order=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        rank: name of the rank it hits.
        index: which of the rank's awaits it hits, counted from 1 in the order in which they begin.
        kind: ``kill`` freezes the rank; ``stall`` delays the verb beyond the update's deadline but not the lease
            (a post returns, and its message comes late); ``fail`` raises before the verb took effect,
            ``fail-after`` after it did.
    """

    rank: str
    index: int
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} at await {self.index}"


CLEANUP = frozenset({"post", "cancel", "rollback", "disconnect", "pause", "resume"})
"""Verbs that a fault sets off; in a run without faults they are few."""


@dataclass(frozen=True, order=True, slots=True)
class Followup:
    """A second fault, in what the first one sets off: code that runs only then.

    Attributes:
        rank: name of the rank it hits.
        count: which of the rank's clean-up verbs (``CLEANUP``) after the first fault it hits, counted from 1.
        kind: as of a ``Fault``.
    """

    rank: str
    count: int
    kind: FaultKind

    def __str__(self) -> str:
        return f"{self.kind} {self.rank} at clean-up await {self.count} after that"


@dataclass(frozen=True, order=True, slots=True)
class Restart:
    """What follows the kill of a rollout rank: the rest of its rollout is ended, and all of it is started again.

    Attributes:
        rank: name of the killed rank.
        after_ms: how long after the kill the new processes are there, in simulated ms.
    """

    rank: str
    after_ms: int

    @property
    def kind(self) -> str:
        """``restart``."""
        return "restart"

    def __str__(self) -> str:
        return f"restart of the rollout of {self.rank} {self.after_ms} ms after that"


AnyFault: TypeAlias = Fault | Followup | Restart


class Effects(Protocol):
    """How one executor makes faults happen; the sim and the thread ranks each bring theirs."""

    async def kill(self, rank: str) -> None:
        """Never returns: the rank does nothing any more, not even its ``finally`` blocks."""

    async def stall(self, rank: str, verb: str, index: int) -> None:
        """Returns late, or makes the verb's message late."""

    def now_ns(self) -> int:
        """When a fault happens, on the clock of the run."""


@dataclass
class FaultPlan:
    """The faults of one run; ``disarm`` it before the update that must succeed.

    Attributes:
        faults: what is planned.
        hit: the faults that happened, with the verb that each one hit.
        times_ns: when they happened, in the same order.
    """

    faults: Sequence[AnyFault] = ()
    armed: bool = True
    hit: list[tuple[AnyFault, str]] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)

    def disarm(self) -> None:
        """From here on no fault happens."""
        self.armed = False


class FaultHooks:
    """Sees every verb of one rank and makes the planned faults happen; implements ``rank.Hooks``.

    Attributes:
        verbs: names of the verbs that began, in order; fault indices count them from 1.
    """

    def __init__(self, rank: str, plan: FaultPlan, effects: Effects) -> None:
        self.rank = rank
        self.plan = plan
        self.effects = effects
        self.verbs: list[str] = []
        mine = [fault for fault in plan.faults if fault.rank == rank]
        self._planned: dict[int, AnyFault] = {
            fault.index: fault for fault in mine if isinstance(fault, Fault)
        }
        self._followups = [fault for fault in mine if isinstance(fault, Followup)]
        self._cleanups = 0

    async def before(self, verb: str) -> int:
        """Count the verb; kill, stall or fail it as planned. The ordinal is what ``after`` is given."""
        self.verbs.append(verb)
        ordinal = len(self.verbs)
        self._count_cleanup(verb, ordinal)
        fault = self._fault(ordinal)
        if fault is not None and fault.kind != "fail-after":
            self._note(fault, verb)
            if fault.kind == "kill":
                await self.effects.kill(self.rank)
            elif fault.kind == "stall":
                await self.effects.stall(self.rank, verb, ordinal)
            else:
                raise InjectedFault(f"{self.rank} {verb}, before it took effect")
        return ordinal

    async def after(self, verb: str, ordinal: int) -> None:
        """Fail a verb that took effect, as planned."""
        fault = self._fault(ordinal)
        if fault is not None and fault.kind == "fail-after":
            self._note(fault, verb)
            raise InjectedFault(f"{self.rank} {verb}, after it took effect")

    def _count_cleanup(self, verb: str, ordinal: int) -> None:
        """Give a followup its place, once the verb is there that it waits for."""
        if self.plan.hit and verb in CLEANUP:
            self._cleanups += 1
            for fault in self._followups:
                if fault.count == self._cleanups:
                    self._planned.setdefault(ordinal, fault)

    def _note(self, fault: AnyFault, verb: str) -> None:
        self.plan.hit.append((fault, verb))
        self.plan.times_ns.append(self.effects.now_ns())

    def _fault(self, ordinal: int) -> AnyFault | None:
        return self._planned.get(ordinal) if self.plan.armed else None


def exhaustive(awaits: Mapping[str, int], kinds: Sequence[FaultKind] = KINDS) -> Iterator[tuple[Fault, ...]]:
    """Every single fault of a run in which each rank made so many awaits, rank by rank."""
    for rank, count in awaits.items():
        for index in range(1, count + 1):
            for kind in kinds:
                yield (Fault(rank, index, kind),)


RETURN_MS = (5, 20, 80, 250, 700)
"""When a killed rollout is there again: within an update, within its lease, and long after that."""


def returning(
    awaits: Mapping[str, int], after_ms: Sequence[int] = RETURN_MS
) -> Iterator[tuple[AnyFault, ...]]:
    """Every kill of a rollout rank, each with a restart after so long, rank by rank."""
    for (kill,) in exhaustive(awaits, ("kill",)):
        for one in after_ms if kill.rank.startswith("rollout") else ():
            yield (kill, Restart(kill.rank, one))


NEAR = (1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 10, 13)
"""How many awaits after the first fault the second one falls into its clean-up, the likely ones repeated."""


FIRST: tuple[FaultKind, ...] = ("kill", "stall", "fail", "fail", "fail-after", "fail-after")
"""Kinds of a first fault: after a failure everybody lives on, so most is left to go wrong."""

SECOND: tuple[FaultKind, ...] = ("stall", "stall", "stall", "fail", "fail", "fail-after", "kill")
"""Kinds of a second fault: within a clean-up, a message that comes late does the most."""


def drawn(awaits: Mapping[str, int], seed: int) -> tuple[AnyFault, ...]:
    """Two faults drawn from ``seed``, seldom one; at most one kill. Equal seeds draw equal faults.

    Clean-up code runs only after a fault, so the second one mostly falls into it, or a few awaits after the first:
    on the same rank, on the trainer's lead, who tells everybody, or on any at about the same progress. A rollout
    that is killed is started again more often than not.
    """
    stream = random.Random(f"{seed}/faults")
    faults = _two(awaits, stream)
    killed = [fault.rank for fault in faults if fault.kind == "kill" and fault.rank.startswith("rollout")]
    back = stream.random() < 0.7
    return (*faults, *(Restart(rank, stream.choice(RETURN_MS)) for rank in killed if back))


def _two(awaits: Mapping[str, int], stream: random.Random) -> tuple[AnyFault, ...]:
    ranks = sorted(awaits)
    lead = next((name for name in ranks if name.startswith("trainer")), ranks[0])
    rank = stream.choice(ranks)
    first = Fault(rank, stream.randint(1, awaits[rank]), stream.choice(FIRST))
    other = stream.choices((rank, lead, stream.choice(ranks)), (3, 3, 4))[0]
    kind = stream.choice([kind for kind in SECOND if kind != "kill" or first.kind != "kill"])
    what = stream.random()
    if what < 0.08:
        return (first,)
    if what < 0.7:
        return (first, Followup(other, stream.randint(1, 7), kind))
    index = stream.randint(1, awaits[other] * 5 // 4)
    if what < 0.9:
        index = first.index * awaits[other] // awaits[rank] + stream.choice(NEAR)
    second = Fault(other, index, kind)
    return (first,) if (first.rank, first.index) == (other, index) else tuple(sorted((first, second)))


def describe(faults: Sequence[AnyFault], hit: Sequence[tuple[AnyFault, Any]]) -> str:
    """The plan in words, with the verb that each fault hit."""
    verbs = dict(hit)
    return "; ".join(f"{fault} ({verbs.get(fault, 'not reached')})" for fault in faults) or "no fault"
