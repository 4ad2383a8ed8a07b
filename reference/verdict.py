"""Votes at the end of a stage, and the verdict that all ranks of a group leave it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's status at the end of a stage: ``ok``, its reason when not, and data for the others."""

    ok: bool
    reason: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks of a group leave a stage with; decided by the group's first rank alone.

    Attributes:
        votes: the votes that arrived in time, by rank name.
        missing: ranks whose vote did not arrive by the deadline.
        lost: the missing ranks whose lease had ended.
    """

    votes: Mapping[str, Vote]
    missing: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True when everybody voted, and voted yes."""
        return not self.missing and all(vote.ok for vote in self.votes.values())

    @property
    def reason(self) -> str:
        """The reasons of those who voted no, and the names of those who did not vote."""
        said = [f"{name}: {vote.reason}" for name, vote in self.votes.items() if not vote.ok]
        for name in self.missing:
            said.append(f"{name} was lost" if name in self.lost else f"{name} gave no vote by the deadline")
        return "; ".join(said)


def verdict_message(key: str, verdict: Verdict) -> dict[str, Any]:
    """The verdict on the stage ``key`` as a control message; ``verdict_from`` is the inverse."""
    votes = {
        name: {"ok": v.ok, "reason": v.reason, "data": dict(v.data)} for name, v in verdict.votes.items()
    }
    return {
        "kind": "verdict",
        "key": key,
        "votes": votes,
        "missing": list(verdict.missing),
        "lost": list(verdict.lost),
    }


def verdict_from(message: Mapping[str, Any]) -> Verdict:
    """The verdict that a control message tells."""
    votes = {name: Vote(v["ok"], v["reason"], v["data"]) for name, v in message["votes"].items()}
    return Verdict(votes, tuple(message["missing"]), tuple(message["lost"]))
