"""Who is missing: gloo does not say whom an operation waits for, so the members ask each other, over the control plane.

Nobody asks before half of an operation's time has passed, so a run without trouble pays nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.asyncio_parts import AsyncioFuture
from weightsync.reference.members import Group, RankId

Note = dict[str, Any]
"""A JSON-able note between members.

``{"at": turn, "ask": bool}``, ``{"broken": why}``, or ``{"closed": turn, "why": why}``: left after that turn.
"""


class RollCall:
    """Where the members of one group stand, as one of them knows it. All methods belong to the rank's loop.

    Args:
        group: the group.
        me: this rank.
        clock: its clock.
        tell: sends a note to all other members.

    Attributes:
        turn: operations that this rank began in the group.
    """

    def __init__(
        self, group: Group, me: RankId, clock: AsyncioClock, tell: Callable[[Group, Note], None]
    ) -> None:
        self.turn = 0
        self._group = group
        self._others = tuple(str(member) for member in group.members if member != me)
        self._clock = clock
        self._tell = tell
        self._at: dict[str, int] = {}
        self._news: AsyncioFuture | None = None
        self._stopped = False

    async def wait(self, future: AsyncioFuture, deadline_ns: int) -> None:
        """Wait for an operation, and ask around at half-time. Raises its error, or TimeoutError at the deadline."""
        half_ns = (self._clock.now_ns() + deadline_ns) // 2
        try:
            await self._clock.wait(future, min(half_ns, deadline_ns))
        except TimeoutError:
            self._ask()
            await self._clock.wait(future, deadline_ns)

    def missing(self) -> tuple[str, ...]:
        """Members that have not begun the operation this rank is in, as far as they answered; never nobody."""
        found = tuple(peer for peer in self._others if self._at.get(peer, -1) < self.turn)
        return found or self._others or ("nobody",)

    async def silent(self, until_ns: int) -> tuple[str, ...]:
        """Members that do not answer by ``until_ns``; returns earlier once all did, or after ``stop``."""
        self._ask()
        try:
            while not self._stopped and self._silent():
                self._news = self._clock.future()
                await self._clock.wait(self._news, until_ns)
        except TimeoutError:
            pass
        return self._silent()

    def hear(self, sender: str, note: Note) -> None:
        """Take in where a member stands; answer if it asks."""
        self._at[sender] = note["at"]
        if note["ask"]:
            self._tell(self._group, {"at": self.turn, "ask": False})
        self._wake()

    def stop(self) -> None:
        """The group is dead: no answer matters any more."""
        self._stopped = True
        self._wake()

    def _ask(self) -> None:
        self._at.clear()
        self._tell(self._group, {"at": self.turn, "ask": True})

    def _silent(self) -> tuple[str, ...]:
        return tuple(peer for peer in self._others if peer not in self._at)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set_result(None)
