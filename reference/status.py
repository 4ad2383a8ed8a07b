"""What every rank says of itself, and how the trainer's lead asks: beneath the protocol, nothing waits for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from weightsync.reference.members import RankId
from weightsync.reference.metrics import update_metrics

if TYPE_CHECKING:
    from weightsync.reference.receiver import Receiver
    from weightsync.reference.trainer import Trainer


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What one rollout rank says of itself at one instant.

    Attributes:
        version: its label: the version whose bits it holds, unless it is dirty.
        dirty: None, or why the weights may be none of a version's.
        highest: the highest version number ever tried here.
        epoch: the group epoch it is in.
        generating: True while requests may read the weights, False while paused; None but on the leader.
        receiving: version of the update in progress, or None.
        buckets: how many buckets of that update came and were proved.
        prepared: True when that update is applied and proved, and waits for the trainer's decision.
        error: the last thing that went wrong here, or None.
    """

    version: int
    dirty: str | None
    highest: int
    epoch: int
    generating: bool | None
    receiving: int | None
    buckets: int
    prepared: bool
    error: str | None

    @classmethod
    def of(cls, receiver: Receiver) -> RankStatus:
        """The state of a rank, now."""
        update = receiver.update
        return cls(
            receiver.version, receiver.dirty, receiver.highest, receiver.epoch,
            receiver.generating if receiver.leader else None,
            update.version if update is not None else None,
            update.sequence if update is not None else 0,
            update is not None and update.prepared, receiver.error,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; ``RankStatus(**data)`` is the inverse."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class RolloutStatus:
    """One rollout as the trainer's lead sees it.

    Attributes:
        number: its number.
        gone: why the trainer no longer counts on it, or None.
        behind: True when the next update sends it everything.
        ranks: per rank, leader first: what it says of itself, or why it says nothing.
    """

    number: int
    gone: str | None
    behind: bool
    ranks: Mapping[RankId, RankStatus | str]

    def clean(self, version: int) -> bool:
        """True when it is there and every rank holds ``version``."""
        return self.gone is None and all(
            not isinstance(said, str) and said.dirty is None and said.version == version
            for said in self.ranks.values()
        )


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """The trainer and its rollouts.

    Attributes:
        version: the last version that every member acknowledged; 0 before the first.
        highest: the highest version number ever tried.
        epoch: the group epoch.
        update: number of the last update that began; 0 before the first.
        members: numbers of the rollouts that the next update counts on; empty after a failed one, which reconnects.
        last: the last update that is over, as ``UpdateMetrics.row`` says it, or None.
        rollouts: every rollout.
        history_bytes: what the lead keeps of the positions that versions changed.
        history: versions from which a rollout can be sent one delta.
    """

    version: int
    highest: int
    epoch: int
    update: int
    members: tuple[int, ...]
    last: Mapping[str, Any] | None
    rollouts: tuple[RolloutStatus, ...]
    history_bytes: int = 0
    history: tuple[int, ...] = ()

    @property
    def clean(self) -> bool:
        """True when every rollout is there and holds ``version``."""
        return all(rollout.clean(self.version) for rollout in self.rollouts)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; a rank that says nothing has ``silent``: why, and no other key but its name."""
        return {
            "version": self.version,
            "highest": self.highest,
            "epoch": self.epoch,
            "update": self.update,
            "members": list(self.members),
            "last": dict(self.last) if self.last is not None else None,
            "clean": self.clean,
            "history_bytes": self.history_bytes,
            "history": list(self.history),
            "rollouts": [
                {
                    "rollout": rollout.number,
                    "clean": rollout.clean(self.version),
                    "gone": rollout.gone,
                    "behind": rollout.behind,
                    "ranks": [
                        {"rank": str(rank), **({"silent": said} if isinstance(said, str) else said.to_dict())}
                        for rank, said in rollout.ranks.items()
                    ],
                }
                for rollout in self.rollouts
            ],
        }


async def ask(trainer: Trainer, deadline_ns: int) -> TrainerStatus:
    """The status of the trainer and of every rollout rank that answers by ``deadline_ns``; see ``Trainer.status``."""
    verbs, clock = trainer.verbs, trainer.verbs.clock
    ranks = [rank for rollout in trainer.rollouts.values() for rank in rollout.ranks]

    async def one(rank: RankId) -> RankStatus | str:
        try:
            return RankStatus(**await verbs.inquire(rank, deadline_ns))
        except Exception as error:
            return str(error)

    tasks = [verbs.spawn(one(rank), f"inquire {rank}") for rank in ranks]
    try:
        await clock.join(tasks, None)  # each ends by the deadline
    finally:
        for task in tasks:
            await clock.cancel(task)
    return assemble(trainer, {rank: task.result() for rank, task in zip(ranks, tasks, strict=True)})


def assemble(trainer: Trainer, said: Mapping[RankId, RankStatus | str]) -> TrainerStatus:
    """The status of the trainer and its rollouts, from what each rank said of itself, or why it did not."""
    elements = sum(meta.numel for meta in trainer.plan.tensors)
    last = update_metrics(trainer.last, elements).row() if trainer.last is not None else None
    rollouts = []
    for number, rollout in trainer.rollouts.items():
        ranks = {
            rank: f"{rank} was lost: its lease ended" if trainer.verbs.is_lost(rank) else said[rank]
            for rank in rollout.ranks
        }
        everything = number in trainer.behind and trainer.behind[number] is None
        rollouts.append(RolloutStatus(number, trainer.gone.get(number), everything, ranks))
    return TrainerStatus(
        trainer.version,
        trainer.highest,
        trainer.epoch,
        trainer.updates,
        trainer.members,
        last,
        tuple(rollouts),
        trainer.history.nbytes,
        tuple(sorted(trainer.history.digests)),
    )
