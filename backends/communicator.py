"""One ProcessGroupGloo as one rank holds it: opened and dropped off the loop, each operation ended by its deadline.

What gloo does not forgive is kept away from it. Sizes that differ end the whole process, so an operation whose size
rests on the ranks' agreement is announced in a message of fixed size first; payloads are contiguous uint8. After a
timeout, an error or a cancelled operation nobody knows what is still under way, so the group is dead.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.asyncio_parts import AsyncioFuture
from weightsync.backends.roll_call import Note, RollCall
from weightsync.backends.store import Store, prefixed
from weightsync.reference.errors import DeadlineExceeded, GroupBroken
from weightsync.reference.members import Group, RankId

SLACK_NS = 50_000_000
"""gloo's own timeout is so much later than the deadline, so that the rank's clock speaks first."""

ANSWER_NS = 500_000_000
"""How long a member may take to show that it was not its death that broke the group."""

OPERATIONS = ("open", "exchange", "gather")
"""Operations that are announced; their place is their number."""

Borrow = Callable[[], AbstractContextManager[Store]]

Issue = Callable[[Any, timedelta], Any]
"""Starts one operation on a process group, with a timeout; returns its ``Work``."""


class GlooFailed(Exception):
    """gloo's own words about an operation that did not end well, their first sentence."""

    @classmethod
    def of(cls, error: Exception) -> GlooFailed:
        """From what gloo raised."""
        return cls(str(error).split("\n")[0].split(". ")[0])


class Refused(Exception):
    """The group's key is taken; whoever has it is not to be disturbed."""


class Communicator:
    """A group's process group on one rank. All methods but ``release`` belong to the rank's loop.

    Args:
        group: the group.
        me: this rank, one of its members.
        clock: the rank's clock.
        start: starts a thread; ``close`` of the backend waits for those.
        tell: sends a note to all other members, over the control plane.

    Attributes:
        broken: None, or why the group is dead.
    """

    def __init__(
        self,
        group: Group,
        me: RankId,
        clock: AsyncioClock,
        start: Callable[[Callable[[], None], str], None],
        tell: Callable[[Group, Note], None],
    ) -> None:
        self.group = group
        self.index = group.index(me)
        self.me = me
        self.clock = clock
        self.broken: str | None = None
        self._start = start
        self._tell = tell
        self._roll = RollCall(group, me, clock, tell)
        self._left: str | None = None
        self._waiting: set[AsyncioFuture] = set()
        self._lock = threading.Lock()
        self._dropped = False
        self._held: list[Any] = []  # the process group; only the thread that empties this may destroy it

    # ---- life ----------------------------------------------------------------------------------------------

    async def open(self, store: Borrow, device: Callable[[], Any], deadline_ns: int) -> None:
        """Connect with all members. Raises DeadlineExceeded or GroupBroken; the group is dead then.

        Args:
            store: entered off the loop while this connects; gives the store that the members share.
            device: called off the loop; gives the gloo device to bind to.
            deadline_ns: on the rank's clock.
        """
        if len(self.group.members) > 1:
            future = self.clock.future()

            def build() -> None:
                try:
                    with store() as shared:
                        self._build(shared, device, deadline_ns)
                except Refused as refused:
                    future.set_exception(refused)
                except Exception as error:
                    future.set_exception(GlooFailed.of(error))
                else:
                    future.set_result(None)

            self._start(build, f"{self.me} opens {self.group.key}")
            await self.finish(future, "connect", deadline_ns)
        await self._announce("open", 0, deadline_ns)

    def fail(self, why: str) -> None:
        """Declare the group dead and tell the members, so that they need not find out."""
        if self.broken is None:
            self._tell(self.group, {"broken": why})
        self.end(why)

    def close(self) -> None:
        """End the group in order; what the members have yet to finish of this rank's last operation, they may."""
        why = f"{self.me} closed it"
        if self._waiting:
            self.fail(why)
        elif self.broken is None:
            self._tell(self.group, {"closed": self._roll.turn, "why": why})
            self.end(why)

    def end(self, why: str) -> None:
        """The group is dead: whoever waits in it gets GroupBroken, and the process group is dropped."""
        self.broken = self.broken or why
        for future in list(self._waiting):
            future.set_exception(GroupBroken(self._text()))
        self._roll.stop()
        self.release()

    def release(self) -> None:
        """Drop the process group in a thread, where its destructor waits for what is under way. From any thread.

        What an operation reads or writes stays allocated until it ended: gloo holds it.
        """
        with self._lock:
            if self._dropped:
                return
            self._dropped = True
        if self._held:
            self._start(self._held.clear, f"{self.me} drops {self.group.key}")

    def hear(self, sender: str, note: Note) -> None:
        """Take in a member's note: that the group is dead, that it left, where it stands, or the question for it."""
        if "broken" in note:
            self.end(note["broken"])
        elif "closed" in note:
            self._left = note["why"]
            if note["closed"] < self._roll.turn:
                self.end(self._left)
        else:
            self._roll.hear(sender, note)

    # ---- operations ----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """The next operation of this rank begins."""
        if self._left is not None:
            self.end(self._left)
        self.check()
        self._roll.turn += 1

    async def announce(self, operation: str, detail: int, deadline_ns: int) -> None:
        """Return when every member is about to do the same: same operation, same detail, same place in order.

        Raises GroupBroken on every member when one differs.
        """
        self.turn()
        await self._announce(operation, detail, deadline_ns)

    async def allgather(self, row: list[int], what: str, deadline_ns: int) -> Tensor:
        """Every member's row of int64, shape (members, len(row)); rows must be of one length."""
        mine = torch.tensor(row, dtype=torch.int64)
        if len(self.group.members) == 1:
            return mine.unsqueeze(0)
        rows = torch.empty((len(self.group.members), len(row)), dtype=torch.int64)
        started = self.issue(
            lambda pg, timeout: pg.allgather(list(rows.unbind()), mine, timeout), deadline_ns
        )
        await self.finish(started, what, deadline_ns)
        return rows

    def issue(self, issue: Issue, deadline_ns: int) -> AsyncioFuture:
        """Start an operation; what it comes to. It is under way even if nobody waits for it."""
        self.check()
        future = self.clock.future()

        def ended(work: torch.futures.Future[Any]) -> None:  # in a thread of gloo
            try:
                work.value()
            except Exception as error:
                future.set_exception(GlooFailed.of(error))
            else:
                future.set_result(None)

        try:
            issue(self._held[0], self._timeout(deadline_ns)).get_future().add_done_callback(ended)
        except Exception as error:
            future.set_exception(GlooFailed.of(error))
        return future

    async def finish(self, future: AsyncioFuture, what: str, deadline_ns: int) -> None:
        """Wait for an operation that was issued. Raises DeadlineExceeded or GroupBroken; the group is dead then."""
        self._waiting.add(future)
        try:
            await self._roll.wait(future, deadline_ns)
        except TimeoutError:
            raise self._late(what) from None
        except Refused as refused:
            self.end(str(refused))
            raise GroupBroken(self._text()) from None
        except GlooFailed as error:
            if self.clock.now_ns() >= deadline_ns:  # on a busy loop gloo's timeout may be seen first
                raise self._late(what) from None
            await self._explain(what, str(error), deadline_ns)
            raise GroupBroken(self._text()) from None
        except asyncio.CancelledError:
            self.fail(f"{self.me} gave {what!r} up half-way")
            raise
        finally:
            self._waiting.discard(future)

    def check(self) -> None:
        """Raise GroupBroken if the group is dead."""
        if self.broken is not None:
            raise GroupBroken(self._text())

    # ---- inner ---------------------------------------------------------------------------------------------

    async def _announce(self, operation: str, detail: int, deadline_ns: int) -> None:
        mine = [OPERATIONS.index(operation), self._roll.turn, detail]
        rows = (await self.allgather(mine, operation, deadline_ns)).tolist()
        for peer, row in zip(self.group.members, rows, strict=True):
            if row != mine:
                theirs = OPERATIONS[row[0]] if 0 <= row[0] < len(OPERATIONS) else f"operation {row[0]}"
                self.fail(
                    f"{peer} issued {theirs!r} as operation {row[1]} with {row[2]}, where {self.me} issued "
                    f"{operation!r} as operation {mine[1]} with {mine[2]}"
                )
                self.check()

    def _late(self, what: str) -> DeadlineExceeded:
        missing = ", ".join(self._roll.missing())
        self.fail(f"{self.me} waited for {missing} in {what!r} until its deadline")
        return DeadlineExceeded(f"{what!r} in group {self.group.key}, waiting for {missing},")

    async def _explain(self, what: str, words: str, deadline_ns: int) -> None:
        """Find out whose death it was that gloo reports, and declare the group dead."""
        if self._left is not None:
            self.end(self._left)
            return
        why = f"{self.me} gave {what!r} up half-way"
        try:
            silent = await self._roll.silent(min(deadline_ns, self.clock.now_ns() + ANSWER_NS))
            why = (
                f"{what!r} failed on {self.me}, and {', '.join(silent) or 'nobody'} does not answer ({words})"
            )
        finally:
            self.fail(why)

    def _build(self, store: Store, device: Callable[[], Any], deadline_ns: int) -> None:
        self._claim(store)
        gloo: Any = ProcessGroupGloo  # its type stubs lack the options
        options = gloo._Options()
        options._devices = [device()]
        options._timeout = self._timeout(deadline_ns)
        shared = prefixed(store, [self.group.key])
        self._held.append(gloo(shared, self.index, len(self.group.members), options))
        with self._lock:
            late = self._dropped
        if late:
            self._held.clear()

    def _claim(self, store: Store) -> None:
        """Refuse a key that was used before, or with other members: its old addresses would lead nowhere."""
        names = " ".join(map(str, self.group.members))
        found = store.compare_set(f"{self.group.key}/members", "", names).decode()
        if found != names:
            raise Refused(f"its members are {found}, not {names}")
        if store.add(f"{self.group.key}/opened/{self.me}", 1) > 1:
            raise Refused(f"{self.me} opened it before")

    def _timeout(self, deadline_ns: int) -> timedelta:
        return timedelta(microseconds=(max(0, deadline_ns - self.clock.now_ns()) + SLACK_NS) // 1000)

    def _text(self) -> str:
        return f"group {self.group.key} is dead: {self.broken}; close it and connect a new group epoch"
