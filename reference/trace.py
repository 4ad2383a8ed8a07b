"""Span and Trace: who did what, from when to when, with how many bytes. No rendering."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Span:
    """One verb on one rank.

    Attributes:
        rank: name of the rank, such as ``rollout1.0``.
        verb: the verb's name.
        phase: the phase it is summed under (``snapshot``, ``broadcast``, ``apply``, ...).
        start_ns: when it began, on the backend's clock.
        end_ns: when it ended, on the same clock.
        nbytes: bytes it moved, or 0.
        update: number of the update it belongs to, counted from 1; 0 outside of one.
        ok: False when it raised.
    """

    rank: str
    verb: str
    phase: str
    start_ns: int
    end_ns: int
    nbytes: int = 0
    update: int = 0
    ok: bool = True

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from start to end."""
        return self.end_ns - self.start_ns


@dataclass
class Trace:
    """The spans of one run, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    def add(self, span: Span) -> None:
        """Append one span."""
        self.spans.append(span)

    def extend(self, spans: Iterable[Span]) -> None:
        """Append spans that another rank recorded."""
        self.spans.extend(spans)

    def verbs(self, rank: str) -> Counter[str]:
        """Multiset of the verb names of one rank; equal on every backend in a run without faults."""
        return Counter(span.verb for span in self.spans if span.rank == rank)

    def ranks(self) -> tuple[str, ...]:
        """Names of the ranks that recorded a span, sorted."""
        return tuple(sorted({span.rank for span in self.spans}))

    def phase_ns(self, rank: str | None = None) -> dict[str, int]:
        """Nanoseconds per phase, summed over one rank or all; a phase without spans is absent."""
        totals: dict[str, int] = {}
        for span in self.spans:
            if rank is None or span.rank == rank:
                totals[span.phase] = totals.get(span.phase, 0) + span.duration_ns
        return totals
