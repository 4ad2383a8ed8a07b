"""Who takes part: a rank's name, a group of ranks, one rollout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from weightsync.reference.errors import PlanMismatch

Role = Literal["trainer", "rollout"]


class RankId(NamedTuple):
    """One rank: its role, the number of its rollout (0 for the trainer), and its rank there."""

    role: str
    rollout: int
    rank: int

    def __str__(self) -> str:
        """``trainer.1`` or ``rollout0.1``."""
        return f"trainer.{self.rank}" if self.role == "trainer" else f"rollout{self.rollout}.{self.rank}"

    @classmethod
    def parse(cls, name: str) -> RankId:
        """The inverse of ``str``; raises PlanMismatch for any other text."""
        head, _, rank = name.partition(".")
        number = head.removeprefix("rollout")
        if rank.isdigit() and head == "trainer":
            return cls("trainer", 0, int(rank))
        if rank.isdigit() and number.isdigit() and number != head:
            return cls("rollout", int(number), int(rank))
        raise PlanMismatch(f"rank name {name!r} is none; expected 'trainer.N' or 'rolloutM.N'")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that share one communicator for the life of one group epoch.

    Attributes:
        name: unique within its epoch.
        epoch: the group epoch; after any error the group is closed and a later epoch connects.
        members: its ranks in order; the first one is the root of every broadcast and gather.
    """

    name: str
    epoch: int
    members: tuple[RankId, ...]

    @property
    def key(self) -> str:
        """Name of the communicator, unique within a run."""
        return f"{self.name}/{self.epoch}"

    def index(self, rank: RankId) -> int:
        """Position of ``rank`` among the members; raises PlanMismatch when it is not one."""
        try:
            return self.members.index(rank)
        except ValueError:
            raise PlanMismatch(
                f"{rank} is not in group {self.key} of {', '.join(map(str, self.members))}; pass a group it belongs to"
            ) from None


@dataclass(frozen=True, slots=True)
class RolloutRef:
    """One rollout as the trainer knows it.

    Attributes:
        number: its number in the scenario.
        ranks: its ranks in order; the first is the leader, which alone answers the trainer.
    """

    number: int
    ranks: tuple[RankId, ...]

    @property
    def leader(self) -> RankId:
        """The rank that holds the lease and answers for the rollout."""
        return self.ranks[0]


def trainer_ranks(world: int) -> tuple[RankId, ...]:
    """The trainer's ranks, lead first."""
    return tuple(RankId("trainer", 0, rank) for rank in range(world))


def rollout_refs(worlds: list[int] | tuple[int, ...]) -> tuple[RolloutRef, ...]:
    """One RolloutRef per rollout; ``worlds[i]`` is the number of ranks of rollout i."""
    return tuple(
        RolloutRef(number, tuple(RankId("rollout", number, rank) for rank in range(world)))
        for number, world in enumerate(worlds)
    )
