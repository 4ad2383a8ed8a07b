"""The few exceptions, each with the sentence it prints: what was named, found, expected, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class WeightSyncError(Exception):
    """Base of every error this package raises on purpose."""


class MissingTPAttributes(WeightSyncError):
    """A sharded parameter carries no tensor-parallel attributes, so nobody can tell how it is cut."""


class Finding(NamedTuple):
    """One attribute that is not as recorded: ``found`` and ``expected`` are its values' text, or "absent"."""

    parameter: str
    attribute: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.attribute} of parameter {self.parameter!r} is {self.found}, expected {self.expected}"


class AttributeMismatch(WeightSyncError):
    """A copy does not carry what was recorded for its parameter.

    Attributes:
        hop: the copy after which this was found, in the caller's words.
        findings: what was found, in the order of the parameters.
    """

    def __init__(self, hop: str, findings: Sequence[Finding], advice: str) -> None:
        super().__init__(f"after hop {hop!r}: {'; '.join(map(str, findings))}; {advice}")
        self.hop = hop
        self.findings = tuple(findings)


class PatchMismatch(WeightSyncError):
    """A bucket or patch does not fit what it names; raised before the first write."""


class PlanMismatch(WeightSyncError):
    """Two sides, or two ranks, disagree about the tensors, their shapes or how they are cut."""


class BatchError(WeightSyncError, ValueError):
    """Samples cannot be cut into batches as asked, or batches do not fit together. Every rank raises it alike."""


class ProbeError(WeightSyncError):
    """A probed export or a captured loader does more, or less, than move elements."""


class StaleVersion(WeightSyncError):
    """A version number that was tried before, or a base version that the receiver does not hold."""


class BackendUnavailable(WeightSyncError):
    """A backend is unknown, or its module could not be imported on this machine."""


class UnsupportedCapability(WeightSyncError):
    """A backend was asked for something that it says it cannot do."""


class UpdateAborted(WeightSyncError):
    """One update ended without a commit; the ranks live on and the next update reconnects.

    Attributes:
        stage: the protocol stage whose verdict was negative.
        reason: every rank's own words, joined.
    """

    def __init__(self, stage: str, reason: str) -> None:
        super().__init__(f"update aborted in stage {stage!r}: {reason}")
        self.stage = stage
        self.reason = reason


class PeerLost(WeightSyncError):
    """A rank's lease ended: it was killed, or did nothing for longer than the lease.

    Attributes:
        peer: name of the lost rank, such as ``trainer.1``.
        verb: what the caller was waiting for.
    """

    def __init__(self, peer: str, verb: str) -> None:
        super().__init__(
            f"{peer} was lost while {verb!r} waited for it: its lease ended; restart it and reconnect"
        )
        self.peer = peer
        self.verb = verb


class DeadlineExceeded(WeightSyncError):
    """A verb's deadline passed before the peer answered.

    Attributes:
        verb: the verb, with the peer it waited for.
    """

    def __init__(self, verb: str) -> None:
        super().__init__(
            f"{verb} did not finish by its deadline; the update is abandoned and the next one reconnects"
        )
        self.verb = verb


class RemoteError(WeightSyncError):
    """A peer answered a control call with an error.

    Attributes:
        peer: name of the rank that answered.
        text: its error, in its own words.
        lost: name of a rank that the peer itself has lost, or None.
    """

    def __init__(self, peer: str, text: str, lost: str | None = None) -> None:
        super().__init__(f"{peer} answered: {text}")
        self.peer = peer
        self.text = text
        self.lost = lost


class GroupBroken(WeightSyncError):
    """A data group saw a timeout or an error and is dead; only a new group epoch connects again."""


class TagError(WeightSyncError):
    """A snapshot tag that does not exist or holds nothing, or an operation that would lose weights silently."""
