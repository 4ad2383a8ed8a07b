"""What one update cost, as numbers for a dashboard: a pure function of its outcome and of the spans of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from weightsync.reference.protocol import Outcome
from weightsync.reference.trace import Span, Trace

Kind = Literal["full", "delta", "mixed", "empty"]
Scalar = str | int | float | bool
PREFIX = "weightsync/"
"""Of every key of ``UpdateMetrics.to_dict``."""


@dataclass(frozen=True, slots=True)
class UpdateMetrics:
    """What one update came to and cost, as one trainer rank saw it.

    Attributes:
        update: number of the update, from 1.
        version: the version number it tried, or None when it ended before one was taken.
        committed: True when every member acknowledged the commit.
        reason: why not, or "".
        kind: what the members were sent: ``full``, ``delta``, ``mixed`` (both), or ``empty``: nothing had changed,
            or the update ended before it was known what to send.
        members: numbers of the rollouts that took part; of an update that ended before its start, were to.
        full: numbers of the rollouts that were sent everything.
        changed: elements that differ from the version before; all of them when nobody received a delta.
        elements: elements of the whole checkpoint.
        full_bytes: bytes broadcast as full updates; None on a rank that does not send.
        squashed: numbers of the rollouts that had missed versions and were sent them as one delta.
        history_bytes: what this rank keeps of the positions that versions changed.
        delta_bytes: bytes broadcast as deltas, headers and trailer included; None likewise.
        rank: name of the rank that saw this, or "".
        total_ns: from the first of the ranks known here into ``update()`` until the last one's return. A callback
            knows its own rank only.
        exposed_ns: what this rank spent inside ``update()``: its training waits for it.
        phases_ns: ns per phase of this rank in this update; a phase without spans is absent, which is not zero.
        highest: the highest version number ever tried.
        lost: number of each rollout that is lost, and why.
        gone: numbers of the rollouts that were lost and have committed nothing since.
        rejoined: numbers of the rollouts that were lost before and committed this version.
    """

    update: int
    version: int | None
    committed: bool
    reason: str
    kind: Kind
    members: tuple[int, ...]
    full: tuple[int, ...]
    changed: int
    elements: int
    full_bytes: int | None
    delta_bytes: int | None
    rank: str = ""
    total_ns: int = 0
    exposed_ns: int = 0
    phases_ns: Mapping[str, int] = field(default_factory=dict)
    highest: int = 0
    lost: Mapping[int, str] = field(default_factory=dict)
    gone: tuple[int, ...] = ()
    rejoined: tuple[int, ...] = ()
    squashed: tuple[int, ...] = ()
    history_bytes: int = 0

    @property
    def wire_bytes(self) -> int | None:
        """Bytes broadcast; None on a rank that does not send."""
        if self.full_bytes is None or self.delta_bytes is None:
            return None
        return self.full_bytes + self.delta_bytes

    @property
    def density(self) -> float:
        """Share of all elements that changed, 0 to 1."""
        return density(self.changed, self.elements)

    @property
    def bits_per_change(self) -> float | None:
        """Bits sent per changed element; None when nothing changed, and on a rank that does not send."""
        return None if self.wire_bytes is None else bits_per_change(self.wire_bytes, self.changed)

    def row(self) -> dict[str, Any]:
        """The update without its times, JSON-ready: what ``result.json`` and logs say of it."""
        return {
            "update": self.update,
            "version": self.version,
            "committed": self.committed,
            "reason": self.reason,
            "kind": self.kind,
            "members": list(self.members),
            "full": list(self.full),
            "squashed": list(self.squashed),
            "gone": list(self.gone),
            "rejoined": list(self.rejoined),
            "changed": self.changed,
            "elements": self.elements,
            "density": self.density,
            "full_bytes": self.full_bytes,
            "delta_bytes": self.delta_bytes,
            "bits_per_change": self.bits_per_change,
        }

    def to_dict(self) -> dict[str, Scalar]:
        """Flat and JSON-ready, one scalar a key, units in the names; what is None or absent has no key."""
        found: dict[str, Scalar | None] = {
            "rank": self.rank,
            "update": self.update,
            "version": self.version,
            "committed": self.committed,
            "reason": self.reason,
            "kind": self.kind,
            "members": len(self.members),
            "full_members": len(self.full),
            "squashed_members": len(self.squashed),
            "changed_elements": self.changed,
            "elements": self.elements,
            "density": self.density,
            "wire_bytes": self.wire_bytes,
            "full_bytes": self.full_bytes,
            "delta_bytes": self.delta_bytes,
            "bits_per_change": self.bits_per_change,
            "total_ns": self.total_ns,
            "exposed_ns": self.exposed_ns,
            "highest_version": self.highest,
            "history_bytes": self.history_bytes,
            "lost_rollouts": len(self.lost),
            "rejoined_rollouts": len(self.rejoined),
        }
        found |= {f"phase/{phase}_ns": spent for phase, spent in self.phases_ns.items()}
        found |= {f"lost/rollout{number}": why for number, why in self.lost.items()}
        return {PREFIX + key: value for key, value in found.items() if value is not None}


OnUpdate = Callable[[UpdateMetrics], None]
"""Told of every update."""


def update_metrics(
    outcome: Outcome,
    elements: int,
    *,
    spans: Iterable[Span] = (),
    inside: Sequence[tuple[int, int]] = (),
    rank: str = "",
    sends: bool = True,
    highest: int = 0,
    lost: Mapping[int, str] | None = None,
    history_bytes: int = 0,
) -> UpdateMetrics:
    """The metrics of one update.

    Args:
        outcome: what it came to, on this rank.
        elements: elements of the whole checkpoint.
        spans: of the rank; those of other ranks and other updates are left out.
        inside: (start, end) in ns of the call of ``update()``: this rank's first, others' if they are known.
        rank: name of the rank.
        sends: True on the lead, which alone counts the bytes.
        highest: the highest version number ever tried.
        lost: number of each lost rollout, and why.
        history_bytes: what the rank keeps of the positions that versions changed.
    """
    changed = elements if outcome.changed is None else outcome.changed
    if outcome.version is None:  # it ended before anything was sent
        changed = 0
    own = Trace([span for span in spans if (span.rank, span.update) == (rank, outcome.update)])
    return UpdateMetrics(
        outcome.update, outcome.version, outcome.committed, outcome.reason,
        _kind(outcome, changed), outcome.members, outcome.full, changed, elements,
        outcome.full_bytes if sends else None, outcome.delta_bytes if sends else None,
        rank, total_ns(inside), exposed_ns(inside), own.phase_ns(), highest, dict(lost or {}),
        outcome.gone, outcome.rejoined, outcome.squashed, history_bytes,
    )  # fmt: skip


def total_ns(inside: Sequence[tuple[int, int]]) -> int:
    """From the first rank's entry into ``update()`` until the last one's return; 0 when no rank is known."""
    return max(end for _, end in inside) - min(start for start, _ in inside) if inside else 0


def exposed_ns(inside: Sequence[tuple[int, int]]) -> int:
    """What the first of these ranks spent inside ``update()``; 0 when no rank is known."""
    return inside[0][1] - inside[0][0] if inside else 0


def density(changed: int, elements: int) -> float:
    """Share of all elements that changed, 0 to 1."""
    return changed / elements if elements else 0.0


def bits_per_change(wire_bytes: int, changed: int) -> float | None:
    """Bits sent per changed element, or None when nothing changed."""
    return 8 * wire_bytes / changed if changed else None


def deliver(on_update: OnUpdate, metrics: UpdateMetrics, error: Exception | None = None) -> None:
    """Tell of an update that is over. What the callback raises is raised, unless the update ended with ``error``.

    The error of the update comes first then, and carries that of the callback as a note.
    """
    try:
        on_update(metrics)
    except Exception as own:
        if error is None:
            raise
        error.add_note(f"on_update failed as well: {own!r}")


def _kind(outcome: Outcome, changed: int) -> Kind:
    if outcome.full:
        return "full" if set(outcome.members) <= set(outcome.full) else "mixed"
    return "delta" if changed else "empty"
