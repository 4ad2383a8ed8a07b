"""The ledger of read and write intervals: finds races that no comparison of bits would show."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.reference.steps import Touched


@dataclass(frozen=True, slots=True)
class Race:
    """Two verbs of one rank that touched one memory at the same time, at least one of them writing.

    Attributes:
        rank: whose memory it is.
        memory: which: ``live``, ``slot0``, ``slot1`` or ``weights``.
        first: the verb that was under way, and whether it reads or writes.
        second: the verb that began then, likewise.
        at_ns: when.
    """

    rank: str
    memory: str
    first: str
    second: str
    at_ns: int

    def __str__(self) -> str:
        """One sentence."""
        where = f"race on {self.memory} of {self.rank} at {self.at_ns} ns"
        return f"{where}: {self.second} began while {self.first} was under way"


@dataclass(eq=False, slots=True)
class Interval:
    """One verb's use of some memories, from ``begin`` to ``end``."""

    rank: str
    verb: str
    touched: Touched


class Ledger:
    """Holds each interval against all that are open. Of one simulated world; times are ns on its clock."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._open: list[Interval] = []

    def begin(self, rank: str, verb: str, touched: Touched, at_ns: int) -> Interval:
        """Open an interval and record every race that it is in."""
        interval = Interval(rank, verb, touched)
        for other in self._open:
            if other.rank == rank:
                self._compare(other, interval, at_ns)
        self._open.append(interval)
        return interval

    def end(self, interval: Interval) -> None:
        """Close an interval; no-op for one that is closed."""
        self._open = [other for other in self._open if other is not interval]

    def forget(self, rank: str) -> None:
        """Drop a killed rank's open intervals: what it was doing matters to nobody."""
        self._open = [other for other in self._open if other.rank != rank]

    def _compare(self, other: Interval, interval: Interval, at_ns: int) -> None:
        for memory in (*interval.touched.writes, *interval.touched.reads):
            writes = memory in interval.touched.writes
            if memory in other.touched.writes or (writes and memory in other.touched.reads):
                first = f"{other.verb} ({'write' if memory in other.touched.writes else 'read'})"
                second = f"{interval.verb} ({'write' if writes else 'read'})"
                self.races.append(Race(interval.rank, memory, first, second, at_ns))
