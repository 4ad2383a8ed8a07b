"""Connecting: who takes part in an update, and who must be sent everything. The lead's decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from weightsync.reference.errors import PeerLost, WeightSyncError
from weightsync.reference.members import RolloutRef

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer


async def find_members(trainer: Trainer, deadline_ns: int) -> Mapping[str, Any]:
    """The lead's word on connecting: epoch, members, who is behind, and the slot that the others hold.

    The epoch is the present one while every member is there and nobody came back.
    """
    gone = _find_lost(trainer)
    absent = [r for n, r in trainer.rollouts.items() if n not in trainer.members and n not in trainer.gone]
    complete = bool(trainer.members) and not any(str(number) in gone for number in trainer.members)
    if complete and not await _anyone_back(trainer, absent, deadline_ns):
        return {"epoch": trainer.epoch, "highest": trainer.highest, "gone": gone}
    epoch, reports = trainer.epoch + 1, {}
    body = {"epoch": epoch, "fingerprint": trainer.plan.fingerprint, "update": trainer.updates}
    candidates = [r for n, r in trainer.rollouts.items() if n not in trainer.gone and str(n) not in gone]
    calls = [trainer.fanout.ask(rollout.leader, "hello", body, deadline_ns) for rollout in candidates]
    for rollout, reply in zip(candidates, await trainer.fanout.settle(calls, deadline_ns), strict=True):
        if isinstance(reply, Mapping):
            reports[rollout.number] = reply
            continue
        lost = reply.peer if isinstance(reply, PeerLost) else getattr(reply, "lost", None)
        if lost is not None:
            if trainer.settings.on_rollout_loss == "fail":
                raise PeerLost(lost, "connect")
            gone[str(rollout.number)] = str(reply)
    if not reports:
        raise WeightSyncError(f"none of {len(candidates)} rollouts answered hello; look at their status")
    slot = _best_slot(trainer, list(reports.values()))
    behind = [n for n, report in reports.items() if slot is None or _slot_of(trainer, report) != slot]
    highest = max([trainer.highest, *(report["highest"] for report in reports.values())])
    return {
        "epoch": epoch, "highest": highest, "members": list(reports), "behind": behind, "slot": slot, "gone": gone,
    }  # fmt: skip


def _find_lost(trainer: Trainer) -> dict[str, str]:
    """Numbers of rollouts with a rank whose lease ended since they took part, and why."""
    gone: dict[str, str] = {}
    for number, rollout in trainer.rollouts.items():
        for rank in rollout.ranks:
            if number not in trainer.gone and trainer.verbs.is_lost(rank):
                if trainer.settings.on_rollout_loss == "fail":
                    raise PeerLost(str(rank), "connect")
                gone[str(number)] = f"{rank} was lost"
    return gone


async def _anyone_back(trainer: Trainer, absent: Sequence[RolloutRef], deadline_ns: int) -> bool:
    calls = [trainer.fanout.ask(rollout.leader, "status", {}, deadline_ns) for rollout in absent]
    replies = await trainer.fanout.settle(calls, deadline_ns)
    return any(isinstance(reply, Mapping) and reply["lost"] is None for reply in replies)


def _slot_of(trainer: Trainer, report: Mapping[str, Any]) -> int | None:
    if report["dirty"] is not None:
        return None
    return trainer.slots.find(report["version"], report["digest"])


def _best_slot(trainer: Trainer, reports: Sequence[Mapping[str, Any]]) -> int | None:
    """The slot that most members hold, so that the fewest need a full update; ties go to the acknowledged."""
    held = [slot for slot in (_slot_of(trainer, report) for report in reports) if slot is not None]
    order = sorted(set(held), key=lambda slot: (-held.count(slot), slot != trainer.slots.acknowledged, slot))
    return order[0] if order else None
