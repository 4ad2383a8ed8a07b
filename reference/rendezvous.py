"""Collectives within one process: members post in order, and when all have posted everybody gets everything.

The bare order of a data group, without bytes' costs: the in-process backend completes a meeting at once, the
simulator after the time it prices. Like a real communicator, a group that saw an error is dead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from weightsync.reference.clock import Future
from weightsync.reference.errors import GroupBroken
from weightsync.reference.members import Group, RankId


@dataclass
class Meeting:
    """One collective: who has posted what.

    Attributes:
        op: the collective's name, equal on all members.
        payloads: what each member brought, by its position in the group.
        futures: what each member waits on.
    """

    op: str
    payloads: dict[int, Any] = field(default_factory=dict)
    futures: dict[int, Future] = field(default_factory=dict)

    def finish(self) -> None:
        """Give everybody the payloads, in member order."""
        payloads = [self.payloads[index] for index in sorted(self.payloads)]
        for future in self.futures.values():
            future.set_result(payloads)


class Rendezvous:
    """The meetings of one group, shared by its members.

    Args:
        group: the group.
        complete: called with a full meeting; must call its ``finish`` now or later.
    """

    def __init__(self, group: Group, complete: Callable[[Meeting], None]) -> None:
        self.group = group
        self.broken: str | None = None
        self._complete = complete
        self._posted = [0] * len(group.members)
        self._open: dict[int, Meeting] = {}

    def post(self, me: RankId, op: str, payload: Any, future: Future) -> None:
        """Bring ``payload`` to this member's next meeting; ``future`` gets everybody's payloads, or GroupBroken."""
        index = self.group.index(me)
        if self.broken is not None:
            future.set_exception(GroupBroken(self._text(self.broken)))
            return
        number = self._posted[index]
        self._posted[index] += 1
        meeting = self._open.setdefault(number, Meeting(op))
        meeting.payloads[index] = payload
        meeting.futures[index] = future
        if op != meeting.op:
            self.fail(f"{me} issued {op!r} where its peers issued {meeting.op!r}")
        elif len(meeting.futures) == len(self.group.members):
            self._complete(meeting)

    def done(self, meeting: Meeting) -> None:
        """Finish a full meeting, unless the group broke in the meantime."""
        self._open = {number: other for number, other in self._open.items() if other is not meeting}
        if self.broken is None:
            meeting.finish()

    def fail(self, why: str) -> None:
        """Kill the group: every waiter gets GroupBroken, and so does everyone who posts later."""
        if self.broken is not None:
            return
        self.broken = why
        for meeting in self._open.values():
            for future in meeting.futures.values():
                future.set_exception(GroupBroken(self._text(why)))
        self._open.clear()

    def absent(self) -> tuple[str, ...]:
        """Names of the members that the oldest unfinished meeting waits for."""
        for _, meeting in sorted(self._open.items()):
            return tuple(str(rank) for index, rank in enumerate(self.group.members) if index not in meeting.futures)
        return ()

    def _text(self, why: str) -> str:
        return f"group {self.group.key} is dead: {why}; close it and connect a new group epoch"
