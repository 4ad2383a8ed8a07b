"""What a backend supplies beside a clock and a transport: a fabric. And what may look on: hooks, an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from weightsync.reference.members import Group


class Fabric(Protocol):
    """Moves buckets within data groups. A group that saw an error or a timeout is dead (GroupBroken from then on).

    Every method that waits for a peer ends by ``deadline_ns`` with DeadlineExceeded or GroupBroken.
    """

    async def open(self, group: Group, deadline_ns: int) -> None:
        """Connect the group; returns once its communicator is initialised on this rank."""

    async def close(self, group: Group) -> None:
        """Drop the group, pending operations included; no-op for one that is not open."""

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """All-gather of int64 vectors of one length: one list per member, in member order."""

    async def gather(
        self, group: Group, part: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """Every member's part at the root, in member order; None elsewhere.

        ``part.nbytes`` equals ``sizes[index of this member]``; sizes are known to all. The caller may overwrite
        nothing of ``part`` before this returns; what comes back belongs to the caller.
        """

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """Root only: header, then exactly the bytes it announces, to every other member."""

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        """Members but the root: the next bucket; its memory belongs to the caller."""


class Hooks(Protocol):
    """Sees every verb; fault injection is one."""

    async def before(self, verb: str) -> int:
        """Called before the effect; may raise, wait or never return. What it answers, ``after`` is given."""

    async def after(self, verb: str, ordinal: int) -> None:
        """Called after the effect; may raise, wait or never return."""


class Engine(Protocol):
    """The generating side of a rollout, as its leader sees it."""

    async def pause(self) -> None:
        """Return once no request reads the weights of any rank of this rollout."""

    async def resume(self) -> None:
        """Let requests read the weights again."""
