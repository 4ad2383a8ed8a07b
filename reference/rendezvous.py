"""Collectives within one process: members post in order, and when all have posted everybody gets everything.

The bare order of a data group, without bytes' costs: the in-process backend completes a meeting at once, the
simulator after the time it prices. Like a real communicator, a group that saw an error is dead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from weightsync.reference.clock import Clock, Future
from weightsync.reference.errors import DeadlineExceeded, GroupBroken, PlanMismatch
from weightsync.reference.members import Group, RankId

REMEMBERED_DEATHS = 64
"""Dead groups that a process knows of, for a member that comes late."""


@dataclass
class Meeting:
    """One collective: who has posted what.

    Attributes:
        op: the collective's name, equal on all members.
        payloads: what each member brought, by its position in the group.
        futures: what each member waits on.
        takers: positions of the members that get the payloads; the others get an empty list.
    """

    op: str
    payloads: dict[int, Any] = field(default_factory=dict)
    futures: dict[int, Future] = field(default_factory=dict)
    takers: list[int] = field(default_factory=list)

    def finish(self) -> None:
        """Give every taker the payloads in member order: copies, made before any poster may go on."""
        payloads = [self.payloads[index] for index in sorted(self.payloads)]
        owned = {index: [_copy(payload) for payload in payloads] for index in self.takers}
        for index, future in self.futures.items():
            future.set_result(owned.get(index, []))


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

    def post(self, me: RankId, op: str, payload: Any, future: Future, takes: bool) -> None:
        """Bring ``payload`` to this member's next meeting.

        ``future`` gets copies of everybody's payloads if the member ``takes`` them, or GroupBroken.
        """
        index = self.group.index(me)
        if self.broken is not None:
            future.set_exception(GroupBroken(self._text(self.broken)))
            return
        number = self._posted[index]
        self._posted[index] += 1
        meeting = self._open.setdefault(number, Meeting(op))
        meeting.payloads[index] = payload
        meeting.futures[index] = future
        if takes:
            meeting.takers.append(index)
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
            return tuple(
                str(rank) for index, rank in enumerate(self.group.members) if index not in meeting.futures
            )
        return ()

    def _text(self, why: str) -> str:
        return f"group {self.group.key} is dead: {why}; close it and connect a new group epoch"


class Meetings:
    """All groups of one process, or of one simulated world.

    Args:
        complete: called with a full meeting and its rendezvous; must have ``rendezvous.done(meeting)`` called,
            now or later.
    """

    def __init__(self, complete: Callable[[Rendezvous, Meeting], None]) -> None:
        self._complete = complete
        self._groups: dict[str, Rendezvous] = {}

    def of(self, group: Group) -> Rendezvous:
        """The rendezvous of ``group``, made on first use; raises GroupBroken when its members differ."""
        rendezvous = self._groups.get(group.key)
        if rendezvous is None:
            dead = [key for key, one in self._groups.items() if one.broken is not None]
            for key in dead[:-REMEMBERED_DEATHS]:
                del self._groups[key]
            rendezvous = Rendezvous(group, lambda meeting: self._complete(self._groups[group.key], meeting))
            self._groups[group.key] = rendezvous
        if rendezvous.group.members != group.members:
            raise GroupBroken(
                f"group {group.key} was opened with {', '.join(map(str, rendezvous.group.members))}, not with "
                f"{', '.join(map(str, group.members))}; use a new group epoch"
            )
        return rendezvous

    def lost(self, rank: RankId) -> None:
        """A rank is gone: every group it was in is dead."""
        for rendezvous in self._groups.values():
            if rank in rendezvous.group.members:
                rendezvous.fail(f"{rank} is gone")


class MeetingFabric:
    """One rank's data groups within one process; implements ``rank.Fabric``.

    Args:
        me: this rank.
        clock: its clock.
        meetings: shared with its peers.
    """

    def __init__(self, me: RankId, clock: Clock, meetings: Meetings) -> None:
        self.me = me
        self.clock = clock
        self.meetings = meetings
        self._open: dict[str, Rendezvous] = {}

    async def open(self, group: Group, deadline_ns: int) -> None:
        """See ``rank.Fabric.open``."""
        rendezvous = self.meetings.of(group)
        self._open[group.key] = rendezvous
        await self._meet(rendezvous, "open", None, deadline_ns, takes=False)

    async def close(self, group: Group) -> None:
        """See ``rank.Fabric.close``; the peers' pending operations fail."""
        rendezvous = self._open.pop(group.key, None)
        if rendezvous is not None:
            rendezvous.fail(f"{self.me} closed it")

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """See ``rank.Fabric.exchange``."""
        return await self._meet(self._of(group), f"exchange of {len(vector)}", list(vector), deadline_ns)

    async def gather(
        self, group: Group, part: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """See ``rank.Fabric.gather``."""
        expected = sizes[group.index(self.me)]
        if part.nbytes != expected:
            raise PlanMismatch(
                f"{self.me} brings {part.nbytes} bytes to a gather where its peers expect {expected}; "
                "the counts it announced were others"
            )
        root = group.members[0] == self.me
        op = f"gather of {list(sizes)}"
        payloads = await self._meet(self._of(group), op, part, deadline_ns, takes=root)
        return payloads if root else None

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """See ``rank.Fabric.send``."""
        await self._meet(self._of(group), "broadcast", bucket, deadline_ns, takes=False)

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        """See ``rank.Fabric.receive``; every receiver gets its own copy."""
        payloads = await self._meet(self._of(group), "broadcast", None, deadline_ns)
        return payloads[0]

    def _of(self, group: Group) -> Rendezvous:
        try:
            return self._open[group.key]
        except KeyError:
            raise GroupBroken(f"group {group.key} is not open on {self.me}; connect it first") from None

    async def _meet(
        self, rendezvous: Rendezvous, op: str, payload: Any, deadline_ns: int, *, takes: bool = True
    ) -> list[Any]:
        future = self.clock.future()
        rendezvous.post(self.me, op, payload, future, takes)
        try:
            payloads: list[Any] = await self.clock.wait(future, deadline_ns)
        except TimeoutError:
            missing = ", ".join(rendezvous.absent()) or "its peers"
            rendezvous.fail(f"{self.me} waited for {missing} in {op!r} until its deadline")
            raise DeadlineExceeded(
                f"{op!r} in group {rendezvous.group.key}, waiting for {missing},"
            ) from None
        return payloads


def _copy(payload: Any) -> Any:
    """The payload in memory of its own; None and integers have none."""
    if isinstance(payload, list):
        return list(payload)
    return payload.copy() if hasattr(payload, "copy") else payload
