"""How ranks leave a stage together: each one's vote, and the verdict that all of them get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

Message = dict[str, Any]
"""A JSON-able message: only dicts with string keys, lists, strings, ints, booleans and None. Never pickled."""


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

    def to_message(self, key: str) -> Message:
        """The verdict on the stage ``key`` as a control message; ``of`` is the inverse."""
        votes = {name: asdict(vote) for name, vote in self.votes.items()}
        missing, lost = list(self.missing), list(self.lost)
        return {"kind": "verdict", "key": key, "votes": votes, "missing": missing, "lost": lost}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Verdict:
        """The verdict that ``to_message`` wrote."""
        votes = {name: Vote(v["ok"], v["reason"], v["data"]) for name, v in message["votes"].items()}
        return cls(votes, tuple(message["missing"]), tuple(message["lost"]))
