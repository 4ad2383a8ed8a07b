"""What a run leaves behind on any backend, before anything is summed or drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from weightsync.cli.verify import Audit
from weightsync.reference.protocol import Outcome
from weightsync.reference.trace import Span, Trace

Event = dict[str, Any]
"""Something that happened to a rollout during a run; see ``losses``."""


@dataclass
class RankRecord:
    """One rank's part of a run.

    Attributes:
        spans: its verbs, on the backend's clock.
        outcomes: its updates; a trainer rank's only.
        inside: (start, end) in ns of each of its calls of ``update()``, likewise.
        audits: what the rollouts held after each version; the lead's only.
        job: spans of what goes on between updates, ``train`` on trainer ranks and ``generate`` on engines, each
            under a phase of its own name, on the same clock.
        curve: per optimizer step, what the job says of itself: ``step``, ``loss``, ``lr``, and with RL ``reward``
            (mean over the samples, 0 to 1), ``samples``, ``generated_tokens``; the lead's only.
    """

    spans: list[Span] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    inside: list[tuple[int, int]] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    job: list[Span] = field(default_factory=list)
    curve: list[dict[str, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``of`` is the inverse."""
        return asdict(self)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> RankRecord:
        """The record that ``to_dict`` wrote, tuples being tuples again."""
        return cls(
            [Span(**span) for span in data["spans"]],
            [Outcome(**_tuples(outcome)) for outcome in data["outcomes"]],
            [(start, end) for start, end in data["inside"]],
            [Audit(**_tuples(one)) for one in data["audits"]],
            [Span(**span) for span in data["job"]],
            data["curve"],
        )


@dataclass
class RunRecord:
    """A whole run.

    Attributes:
        backend: where it ran.
        seed: what it drew from.
        trace: the spans of all ranks' verbs, on one clock.
        job: the spans of training and generation, of all ranks on the same clock.
        trainers: per trainer rank, lead first: its record. Spans are in ``trace`` only.
        audits: what every rollout rank held after each committed version, in order.
        races: what the read/write ledger found; None where there is no ledger.
        conditions: in a few words, what the times depend on.
        events: rollouts that were lost, restarted, left out, and that rejoined; in order.
    """

    backend: str
    seed: int
    trace: Trace = field(default_factory=Trace)
    trainers: list[RankRecord] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    races: Sequence[str] | None = None
    conditions: str = ""
    job: Trace = field(default_factory=Trace)
    events: list[Event] = field(default_factory=list)

    @property
    def curve(self) -> list[dict[str, float]]:
        """What the job said of each optimizer step."""
        return self.trainers[0].curve

    @property
    def outcomes(self) -> list[Outcome]:
        """The updates as the lead saw them, which alone counts the bytes."""
        return self.trainers[0].outcomes


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
