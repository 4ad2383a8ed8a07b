"""A clock without a loop: every verb must complete at once, and one that would wait is an error.

It lets plain calls drive the protocol's own coroutines. No thread, no loop, no timer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.reference.control import Control
from weightsync.reference.errors import UnsupportedCapability, WeightSyncError
from weightsync.reference.members import Group, RankId
from weightsync.reference.rank import Hooks, Verbs
from weightsync.reference.trace import Trace

T = TypeVar("T")


def run_inline(coroutine: Coroutine[Any, Any, T], what: str) -> T:
    """What the coroutine returns, in this call; its errors pass through.

    Raises:
        WeightSyncError: it waited for something; it was closed where it waited.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    coroutine.close()
    raise WeightSyncError(_would_wait(what))


class InlineFuture:
    """A value that arrives once; implements ``reference.clock.Future``."""

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """True once a value or an error is there."""
        return self._done

    def set_result(self, value: Any) -> None:
        """Deliver the value; no-op when done."""
        if not self._done:
            self._done, self._value = True, value

    def set_exception(self, error: BaseException) -> None:
        """Deliver an error; no-op when done."""
        if not self._done:
            self._done, self._error = True, error

    def result(self) -> Any:
        """The value, or the error raised; only once done."""
        if self._error is not None:
            raise self._error
        return self._value


class InlineTask(InlineFuture):
    """A coroutine that has run to its end; implements ``reference.clock.Task``.

    Args:
        coroutine: what to run, at once.
        name: for error texts.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        super().__init__()
        self.name = name
        self.claimed = False
        try:
            self.set_result(run_inline(coroutine, f"task {name!r}"))
        except Exception as error:
            self.set_exception(error)

    @property
    def error(self) -> BaseException | None:
        """The error it ended with, or None."""
        return self._error

    def result(self) -> Any:
        """Its value, or its error raised."""
        self.claimed = True
        return super().result()


class InlineClock:
    """Implements ``reference.clock.Clock`` for a rank that nobody but its caller drives.

    Args:
        now_ns: the time; None means ``time.monotonic_ns``.
    """

    def __init__(self, now_ns: Callable[[], int] | None = None) -> None:
        self._now_ns = time.monotonic_ns if now_ns is None else now_ns
        self._failed: list[InlineTask] = []

    def now_ns(self) -> int:
        """Time of this host in int ns."""
        return self._now_ns()

    def future(self) -> InlineFuture:
        """A new pending future."""
        return InlineFuture()

    async def wait(self, future: Any, deadline_ns: int | None) -> Any:
        """Value of a future that is done; TimeoutError when the deadline has passed; else an error."""
        if not future.done():
            self._give_up("wait for a future", deadline_ns)
        return future.result()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> InlineTask:
        """Run a task to its end, before this returns."""
        task = InlineTask(coroutine, name)
        if task.error is not None:
            self._failed.append(task)
        return task

    async def join(self, tasks: Sequence[Any], deadline_ns: int | None) -> None:
        """Raise the first error of the tasks, which are all done."""
        for task in tasks:
            task.result()

    async def cancel(self, task: Any) -> None:
        """Drop the outcome of a task, which is done."""
        task.claimed = True

    async def sleep_until(self, when_ns: int) -> None:
        """Return when ``when_ns`` has passed; an error when it has not."""
        if when_ns > self.now_ns():
            raise WeightSyncError(_would_wait("sleep_until"))

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Refused: nothing runs between two calls."""
        raise UnsupportedCapability(
            "a timer was asked of a clock without a loop, expected none; do it in the next call"
        )

    def unjoined(self) -> tuple[BaseException, ...]:
        """Errors of tasks that were never joined nor cancelled."""
        self._failed = [task for task in self._failed if not task.claimed]
        return tuple(task.error for task in self._failed if task.error is not None)

    def _give_up(self, what: str, deadline_ns: int | None) -> None:
        if deadline_ns is not None and deadline_ns <= self.now_ns():
            raise TimeoutError(f"{what} until {deadline_ns} ns, which has passed")
        raise WeightSyncError(_would_wait(what))


class NoTransport:
    """A control plane that reaches nobody; implements ``reference.control.Transport``."""

    def put(self, peer: str, message: Mapping[str, Any]) -> None:
        """Drop the message."""


class NoFabric:
    """No data groups: buckets are handed in by calls; implements ``reference.rank.Fabric``."""

    async def open(self, group: Group, deadline_ns: int) -> None:
        """Refused."""
        raise _no_group(group, "open")

    async def close(self, group: Group) -> None:
        """Nothing to close."""

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """Refused."""
        raise _no_group(group, "exchange")

    async def gather(
        self, group: Group, part: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """Refused."""
        raise _no_group(group, "gather")

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """Refused."""
        raise _no_group(group, "send")

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        """Refused."""
        raise _no_group(group, "receive")


def inline_verbs(
    me: RankId,
    local: Any,
    *,
    trace: Trace | None = None,
    hooks: Hooks | None = None,
    now_ns: Callable[[], int] | None = None,
) -> Verbs:
    """The verbs of a rank that reaches no peer; each completes at once.

    Args:
        me: the rank.
        local: its bytes, a ``Source`` or a ``Target``; they stay the caller's.
        trace: where spans go.
        hooks: sees every verb; must not wait.
        now_ns: the time; None means ``time.monotonic_ns``.
    """
    clock = InlineClock(now_ns)
    return Verbs(me, clock, Control(str(me), clock, NoTransport()), NoFabric(), local, None, trace, hooks)


def _would_wait(what: str) -> str:
    return f"{what} would have to wait, expected it to complete at once; nothing runs between two plain calls"


def _no_group(group: Group, op: str) -> UnsupportedCapability:
    return UnsupportedCapability(
        f"{op!r} in group {group.key} was asked of a rank without data groups, expected plain calls only; "
        "hand the bucket to the session"
    )
