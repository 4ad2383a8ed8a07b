"""Connecting: who takes part in an update, and who must be sent everything. The lead's decisions.

A rollout that was lost takes part again once the leases of all its ranks are held and it answers ``hello``, be it
by the processes that were slow or by new ones. Its answer tells what it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync.reference.errors import PeerLost, WeightSyncError
from weightsync.reference.members import RolloutRef
from weightsync.reference.snapshot import SLOTS
from weightsync.reference.wire.forms import known_to_all

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer


async def find_members(trainer: Trainer, deadline_ns: int) -> Mapping[str, Any]:
    """The lead's word on connecting: epoch, members, who is gone, the slot to compare with, and who does not hold it;
    and the forms that all members know.

    Who does not is ``behind``: with the version that a squashed delta starts from, or None, for a full update.

    The epoch is the present one while every member is there, was never lost meanwhile, and nobody came back.
    """
    lost = _find_lost(trainer)
    here = [rollout for rollout in trainer.rollouts.values() if not _is_lost(trainer, rollout)]
    absent = [rollout for rollout in here if rollout.number not in trainer.members]
    complete = bool(trainer.members) and not lost.intersection(trainer.members)
    if complete and not await _anyone_back(trainer, absent, deadline_ns):
        return {"epoch": trainer.epoch, "highest": trainer.highest, "gone": _told(trainer)}
    epoch, reports = trainer.epoch + 1, {}
    body = {
        "epoch": epoch, "fingerprint": trainer.plan.fingerprint, "update": trainer.updates,
        "highest": trainer.highest,
    }  # fmt: skip
    calls = [trainer.fanout.ask(rollout.leader, "hello", body, deadline_ns) for rollout in here]
    for rollout, reply in zip(here, await trainer.fanout.settle(calls, deadline_ns), strict=True):
        if isinstance(reply, Mapping):
            reports[rollout.number] = reply
            if (
                reply["new"] and rollout.number in trainer.greeted
            ):  # replaced before anybody missed the one before
                trainer.gone.setdefault(rollout.number, f"{rollout.leader} is a new process")
            trainer.greeted.add(rollout.number)
            continue
        peer = reply.peer if isinstance(reply, PeerLost) else getattr(reply, "lost", None)
        if peer is not None:
            if trainer.settings.on_rollout_loss == "fail":
                raise PeerLost(peer, "connect")
            trainer.gone[rollout.number] = str(reply)
    if not reports:
        raise WeightSyncError(
            f"none of {len(trainer.rollouts)} rollouts answered hello, {len(here)} of which hold their leases; "
            "look at their status"
        )
    slot = _best_slot(trainer, list(reports.values()))
    behind = {
        str(number): _base_of(trainer, report, slot)
        for number, report in reports.items()
        if slot is None or _slot_of(trainer, report) != slot
    }
    highest = max([trainer.highest, *(report["highest"] for report in reports.values())])
    return {
        "epoch": epoch, "highest": highest, "members": list(reports), "behind": behind, "slot": slot,
        "gone": _told(trainer), "forms": known_to_all(reports.values()),
    }  # fmt: skip


async def until_back(trainer: Trainer, numbers: Iterable[int], deadline_ns: int) -> None:
    """Return once these rollouts can be taken in again. To be called on the lead, between two updates.

    A leader that answers is the present one: this rank knows by then that the one before it was lost.
    Raises DeadlineExceeded at ``deadline_ns``.
    """
    for number in numbers:
        rollout, answered = trainer.rollouts[number], False
        while not answered:
            await trainer.verbs.until_found(rollout.ranks, deadline_ns)
            try:
                await trainer.verbs.call(rollout.leader, "status", {}, deadline_ns)
                answered = True
            except PeerLost:
                continue


def _find_lost(trainer: Trainer) -> set[int]:
    """Numbers of rollouts with a rank that was lost since the last look; they are ``gone`` until they commit."""
    lost = set()
    for number, rollout in trainer.rollouts.items():
        for rank in rollout.ranks:
            before, now = trainer.losses.get(rank, 0), trainer.verbs.losses(rank)
            trainer.losses[rank] = now
            if now == before and not trainer.verbs.is_lost(rank):
                continue
            if trainer.verbs.is_lost(rank) and trainer.settings.on_rollout_loss == "fail":
                raise PeerLost(str(rank), "connect")
            lost.add(number)
            trainer.gone.setdefault(number, f"{rank} was lost")
    return lost


def _is_lost(trainer: Trainer, rollout: RolloutRef) -> bool:
    return any(trainer.verbs.is_lost(rank) for rank in rollout.ranks)


def _told(trainer: Trainer) -> dict[str, str]:
    return {str(number): why for number, why in trainer.gone.items()}


async def _anyone_back(trainer: Trainer, absent: Sequence[RolloutRef], deadline_ns: int) -> bool:
    """Whether one of them can be taken in again; a silent one leaves half of the time for the others' ``hello``."""
    deadline_ns -= max(0, deadline_ns - trainer.verbs.now_ns()) // 2
    calls = [trainer.fanout.ask(rollout.leader, "status", {}, deadline_ns) for rollout in absent]
    replies = await trainer.fanout.settle(calls, deadline_ns)
    return any(isinstance(reply, Mapping) and reply["lost"] is None for reply in replies)


def _slot_of(trainer: Trainer, report: Mapping[str, Any]) -> int | None:
    if report["dirty"] is not None:
        return None
    return trainer.slots.find(report["version"], report["digest"])


def _best_slot(trainer: Trainer, reports: Sequence[Mapping[str, Any]]) -> int | None:
    """The slot to compare with: from which most members can be sent a delta, and most of those the smallest.

    Ties go to the acknowledged one; None when everybody needs a full update.
    """
    order: list[tuple[int, int, bool, int]] = []
    for slot in range(SLOTS):
        held = sum(trainer.slots.held(slot) is not None and _slot_of(trainer, one) == slot for one in reports)
        missed = sum(_base_of(trainer, one, slot) is not None for one in reports)
        if held or missed:
            order.append((-max(held, missed), -held, slot != trainer.slots.acknowledged, slot))
    return min(order)[3] if order else None


def _base_of(trainer: Trainer, report: Mapping[str, Any], slot: int | None) -> int | None:
    """The version that a delta for this rollout starts from, known from there to the slot's; None when none is."""
    held = trainer.slots.held(slot) if slot is not None else None
    if held is None or report["dirty"] is not None:
        return None
    version, digest = report["version"], report["digest"]
    known = (version, digest) == held or trainer.history.knows(version, digest)
    return version if known and trainer.history.path(version, held[0]) is not None else None
