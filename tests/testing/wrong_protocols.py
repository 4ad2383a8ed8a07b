"""Protocols that are wrong in one method each; the fuzzer must find every one of them.

They are faults that were met while the protocol was tried out, so each stands for a kind.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Mapping
from typing import Any

from weightsync.reference.control import Request
from weightsync.reference.receiver import Receiving
from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.reference.verdict import Verdict, Vote


class ReusedVersion(Trainer):
    """Numbers versions from the last acknowledged one, so that a number which was tried is tried again."""

    def next_version(self) -> int:
        """One above the acknowledged baseline's version."""
        acknowledged = self.slots.acknowledged
        return (self.slots.version(acknowledged) or 0) + 1 if acknowledged is not None else 1


class SlotParity(Trainer):
    """Snapshots into slot i mod 2, which is the acknowledged baseline after one failed push."""

    def choose_slot(self) -> int:
        """The parity of the update."""
        return self.updates % 2


class NestedTimeouts(Trainer):
    """Gives each wait a time-out of its own, so that one rank gives up while another still works."""

    async def agree(self, stage: str, vote: Vote, deadline_ns: int) -> Verdict:
        """Waits for the verdict no longer than for one update."""
        patience_ns = self.verbs.now_ns() + self.settings.connect_ns // 2
        key = f"{self.updates}/{stage}"
        return await self.verbs.agree(self.ranks, key, vote, min(deadline_ns, patience_ns), patience_ns)


class SwallowedCancel(Rollout):
    """Goes on receiving when it is cancelled."""

    async def receive(self, update: Receiving) -> None:
        """Takes a cancel for a reason to try again."""
        while True:
            try:
                return await super().receive(update)
            except CancelledError:
                continue


class ResumedBeforeCommit(Rollout):
    """Opens generation before the label is right."""

    async def keep(self, update: Receiving, deadline_ns: int) -> None:
        """Resumes first, commits then."""
        if self.leader:
            await self.resume()
        await super().keep(update, deadline_ns)


class StaleAbortHonoured(Rollout):
    """Ends whatever is in progress when an abort arrives, of whatever version."""

    async def abort(self, request: Request) -> Mapping[str, Any]:
        """Does not compare versions."""
        await self.end_update(request.body["reason"])
        return {}


class CommitCountedTwice(Rollout):
    """Counts commits instead of taking the number it is given, so that a retried one moves the label again."""

    async def commit(self, request: Request) -> Mapping[str, Any]:
        """Adds one for each request, a repeated one included."""
        again = self.version == request.body["version"] and self.dirty is None
        answer = await super().commit(request)
        if again:
            self.version += 1
        return answer


class MissingAgree(Trainer):
    """Leaves a stage with its own verdict instead of everybody's."""

    async def agree(self, stage: str, vote: Vote, deadline_ns: int) -> Verdict:
        """Asks everybody while all is well, and nobody after a failure of its own."""
        if not vote.ok:
            return Verdict({str(rank): vote for rank in self.ranks})
        return await super().agree(stage, vote, deadline_ns)


class UndoDroppedOnSecondFailure(Rollout):
    """Takes a rollback that failed for one that worked."""

    async def roll_back(self, update: Receiving) -> bool:
        """Drops the undo log when the first try fails."""
        if not update.touched:
            return True
        try:
            await self.verbs.rollback()
        except Exception:
            await self.fanout.quietly(self.verbs.commit)
        return True


class LostForEver(Trainer):
    """Leaves a rollout out that was lost once, whoever holds its lease by now."""

    async def connect(self, deadline_ns: int) -> None:
        """Takes every loss for one that lasts."""
        control = self.verbs.control
        control.is_lost = lambda peer: control.losses(peer) > 0  # type: ignore[method-assign]
        await super().connect(deadline_ns)


class NewTakenForOld(Trainer):
    """Sends deltas to a process that holds nothing, since the one before it held the base."""

    async def connect(self, deadline_ns: int) -> None:
        """Believes that whoever joined once needs nothing whole any more."""
        await super().connect(deadline_ns)
        if self.updates > 1:
            self.behind = {n: base for n, base in self.behind.items() if n not in self.gone}


WRONG_PROTOCOLS: tuple[type[Trainer] | type[Rollout], ...] = (
    ReusedVersion,
    SlotParity,
    NestedTimeouts,
    SwallowedCancel,
    ResumedBeforeCommit,
    StaleAbortHonoured,
    CommitCountedTwice,
    MissingAgree,
    UndoDroppedOnSecondFailure,
    LostForEver,
    NewTakenForOld,
)
"""Each is found by ``fuzz`` within 1,000 seeds."""
