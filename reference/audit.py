"""An audit: every element of every member counted anew, on demand, between two updates.

It is the recount that ``verify_every`` asks for at an update, without one: ``Source.digest`` and ``Target.digest``,
both ``afresh``. Who does not agree with what was pushed gets a full update next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weightsync.reference.digest import wrap
from weightsync.reference.errors import StaleVersion

if TYPE_CHECKING:
    from weightsync.reference.control import Request
    from weightsync.reference.rollout import Rollout
    from weightsync.reference.trainer import Trainer


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found, equal on every trainer rank.

    Attributes:
        version: the version that was audited: the last one that every member acknowledged.
        digest: its digest as it was pushed, signed 64 bit.
        rollouts: numbers of the rollouts that were counted.
        problems: who is not what was pushed, ``"trainer"`` or ``"rollout 1"``, and why; empty when all are.
    """

    version: int
    digest: int
    rollouts: tuple[int, ...]
    problems: Mapping[str, str]

    @property
    def ok(self) -> bool:
        """True when every element of every member is the one that was pushed."""
        return not self.problems


async def audit(trainer: Trainer, deadline_ns: int) -> AuditReport:
    """The trainer's half; see ``Trainer.audit``."""
    slot = trainer.slots.acknowledged
    if slot is None or not trainer.members:
        raise StaleVersion(
            "nothing is acknowledged by every rollout, expected a version to audit; push an update first"
        )
    trainer.audits += 1
    number, version, pushed = trainer.audits, trainer.slots.version(slot), trainer.slots.digest(slot)
    try:
        verdict = await trainer.stage(f"audit {number}", _count(trainer, slot), deadline_ns)
        found = wrap(sum(vote.data["share"] for vote in verdict.votes.values()))
        asked = _ask(trainer, version, pushed, deadline_ns) if trainer.lead else None
        told = trainer.lead_data(await trainer.stage(f"audited {number}", asked, deadline_ns))
    except Exception:
        await trainer.reconnect()
        raise
    problems: dict[str, str] = dict(told["problems"])
    if found != pushed:
        problems["trainer"] = f"its snapshot of version {version} has digest {found}, it pushed {pushed}"
        trainer.slots.acknowledge(None)
        trainer.slots.invalidate(slot)
        trainer.history.clear()  # a step that was compared with it may lack a position
    if problems:
        await trainer.reconnect()
    return AuditReport(version, pushed, tuple(told["members"]), problems)


async def _count(trainer: Trainer, slot: int) -> Mapping[str, Any]:
    return {"share": await trainer.verbs.source_digest(slot, afresh=True)}


async def _ask(trainer: Trainer, version: int, digest: int, deadline_ns: int) -> Mapping[str, Any]:
    """The lead asks every member; who does not answer has a problem too."""
    body, problems = {"version": version, "digest": digest}, {}
    members = trainer.members
    calls = [
        trainer.fanout.ask(trainer.rollouts[number].leader, "audit", body, deadline_ns) for number in members
    ]
    for number, reply in zip(members, await trainer.fanout.settle(calls, deadline_ns), strict=True):
        why = str(reply) if isinstance(reply, Exception) else reply["problem"]
        if why is not None:
            problems[f"rollout {number}"] = why
    return {"problems": problems, "members": list(members)}


async def audit_rollout(rollout: Rollout, request: Request) -> Mapping[str, Any]:
    """The rollout's half: count every element on every rank; a rollout that does not agree is dirty from here on."""
    version = request.body["version"]
    if rollout.update is not None:
        raise StaleVersion(
            f"an audit came to {rollout.verbs.me} while version {rollout.update.version} is in progress; end that first"
        )
    reports = await rollout.order("audit", request.body, rollout.deadline_of(request))
    digest = wrap(await rollout.verbs.digest(afresh=True) + sum(report["digest"] for report in reports))
    problem = next((report["problem"] for report in reports if report["problem"] is not None), rollout.dirty)
    if problem is None and rollout.version != version:
        problem = f"{rollout.verbs.me} holds version {rollout.version}, expected {version}"
    elif problem is None and rollout.leader and digest != request.body["digest"]:
        problem = f"its digest in an audit of version {version} is {digest}, the trainer's is {request.body['digest']}"
        await rollout.spoil(problem)
    return {"digest": digest, "problem": problem}
