"""What the trainer's lead asks the rollouts in the stages that start and commit a version, and what a loss means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from weightsync.reference.errors import PeerLost
from weightsync.reference.members import RankId
from weightsync.reference.transmit import Job, streams

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer
    from weightsync.reference.verdict import Verdict


async def start_rollouts(trainer: Trainer, job: Job, deadline_ns: int) -> Mapping[str, Any]:
    """Take the version's number, and return once every member said that it is ready for it, on its own base."""
    job.version = trainer.next_version()
    trainer.highest = max(trainer.highest, job.version)
    job.streams = streams(trainer, job)
    if trainer.on_version is not None:
        trainer.on_version(job.version, job.slot)
    tasks = []
    for stream in job.streams:
        body = {
            "epoch": trainer.epoch, "version": job.version, "base": stream.base, "kind": stream.kind,
            "lanes": [lane.told() for lane in stream.lanes], "update": trainer.updates,
        }  # fmt: skip
        for number in stream.rollouts:
            tasks.append(trainer.fanout.ask(trainer.rollouts[number].leader, "start", body, deadline_ns))
    await trainer.fanout.all_or_first_error(tasks, deadline_ns)
    return {"version": job.version}


async def commit_rollouts(trainer: Trainer, job: Job, deadline_ns: int) -> None:
    """Return once every member said that it committed; its first refusal is raised when all have answered."""
    body = {"version": job.version}
    calls = [trainer.fanout.ask_often(leader, "commit", body, deadline_ns) for leader in trainer.leaders()]
    for reply in await trainer.fanout.settle(calls, deadline_ns):
        if isinstance(reply, Exception):
            raise reply


def check_losses(trainer: Trainer, stage: str, verdict: Verdict) -> None:
    """Note the rollouts that a verdict calls lost; PeerLost for a trainer rank, and for any under "fail"."""
    named = [vote.data["lost"] for vote in verdict.votes.values() if vote.data.get("lost")]
    for name in (*verdict.lost, *named):
        rank = RankId.parse(name)
        if rank.role == "trainer" or trainer.settings.on_rollout_loss == "fail":
            raise PeerLost(name, stage)
        trainer.gone[rank.rollout] = f"{name} was lost"
