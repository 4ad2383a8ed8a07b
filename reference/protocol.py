"""What both halves of the protocol share: its settings and what an update comes to.

The halves themselves are ``Trainer`` (trainer.py) and ``Rollout`` (rollout.py), one method per stage:
connect -> source -> start -> transfer -> commit on one side; hello -> start -> receive -> prepare -> commit on the
other. The protocol decides; it computes no offset and reads no byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from weightsync.reference.errors import PlanMismatch

FULL, DELTA = "full", "delta"


@dataclass(frozen=True, slots=True)
class ProtocolSettings:
    """What the protocol is told; equal on every rank.

    Attributes:
        receive: ``"stage"``: buckets are received while generating, the pause is the apply only, and there must be
            room for one update; ``"stream"``: generation is paused for the whole update.
        route: ``"all"``: every rollout rank is sent the whole update; ``"owned"``: only what it holds, for which the
            lead's ``Trainer`` needs its routes and a rollout's ``Target`` the same word.
        verify_every: digests are compared at every update; every this many, all elements are read for them, on both
            sides. In between they follow the changes, which cannot show a bit that flipped where nothing was
            written. 0: never.
        history_bytes: what each trainer rank may keep of the positions that earlier versions changed, so that a
            rollout that missed some gets one delta; the oldest are dropped first. 0: it gets a full update.
        on_rollout_loss: ``"fail"``: a lost rollout ends the run, named; ``"continue"``: the others go on.
        connect_ns: deadline of connecting, from its start.
        update_ns: one deadline for everything after connecting, from its start.
        lease_ns: how long a rollout waits for the decision, at least, before it rolls back: it does so between
            this long after it prepared and this long after the update's deadline.
        patience_ns: how long a rank waits for a verdict whose decider is alive; longer than any stall that is
            not a loss.
        tries: how often a failed local or repeatable verb is tried before it counts as failed.
    """

    receive: Literal["stage", "stream"] = "stage"
    route: Literal["all", "owned"] = "all"
    verify_every: int = 10
    history_bytes: int = 1 << 28
    on_rollout_loss: Literal["fail", "continue"] = "fail"
    connect_ns: int = 10_000_000_000
    update_ns: int = 60_000_000_000
    lease_ns: int = 30_000_000_000
    patience_ns: int = 600_000_000_000
    tries: int = 3

    def __post_init__(self) -> None:
        """Refuse settings that no run could keep."""
        for name in ("connect_ns", "update_ns", "lease_ns", "patience_ns", "tries"):
            if getattr(self, name) <= 0:
                raise PlanMismatch(f"{name} is {getattr(self, name)}; expected a positive number")
        for name, none in (("verify_every", "never"), ("history_bytes", "none")):
            if getattr(self, name) < 0:
                raise PlanMismatch(f"{name} is {getattr(self, name)}; expected 0 ({none}) or more")
        if self.patience_ns < self.connect_ns + self.update_ns:
            raise PlanMismatch(
                f"patience_ns is {self.patience_ns}; expected at least connect_ns + update_ns = "
                f"{self.connect_ns + self.update_ns}, or a rank leaves while its peers still work"
            )

    def verifies(self, update: int) -> bool:
        """True when every element is read for the digests of this update, counted from 1."""
        return self.verify_every > 0 and update % self.verify_every == 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one update came to.

    Attributes:
        update: number of the update, from 1.
        version: the version number it tried, or None when it ended before one was taken.
        committed: True when every member acknowledged the commit.
        reason: why not, or "".
        members: numbers of the rollouts that took part; of an update that ended before its start, were to.
        full: numbers of the rollouts that received a full update.
        squashed: numbers of the rollouts that had missed versions and received them as one delta on their own.
        changed: changed elements over all ranks, or None when nobody received a delta.
        counts: changed elements per checkpoint tensor, or None likewise.
        full_bytes: bytes broadcast as full updates.
        delta_bytes: bytes broadcast as deltas, squashed ones too, headers and trailer included.
        digest: digest of the version, signed 64 bit, or None.
        gone: numbers of the rollouts that were lost and have committed nothing since.
        rejoined: numbers of the rollouts that were lost before and committed this version.
    """

    update: int
    version: int | None
    committed: bool
    reason: str = ""
    members: tuple[int, ...] = ()
    full: tuple[int, ...] = ()
    changed: int | None = None
    counts: tuple[int, ...] | None = None
    full_bytes: int = 0
    delta_bytes: int = 0
    digest: int | None = None
    gone: tuple[int, ...] = ()
    rejoined: tuple[int, ...] = ()
    squashed: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes broadcast."""
        return self.full_bytes + self.delta_bytes
