"""What a clock must offer, so that one protocol runs on asyncio and on SimPy.

Cancelling is one BaseException on every clock: ``asyncio.CancelledError``. An ``except Exception`` never
swallows it, on the machine's clock or in simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol


class Future(Protocol):
    """A value that arrives once. ``set_*`` on a done future does nothing."""

    def done(self) -> bool:
        """True once a value or an error is there."""

    def set_result(self, value: Any) -> None:
        """Deliver the value; no-op when done."""

    def set_exception(self, error: BaseException) -> None:
        """Deliver an error; no-op when done. An error that nobody waits for is not reported."""


class Task(Protocol):
    """A running coroutine of one rank."""

    def done(self) -> bool:
        """True once it returned, raised or was cancelled."""

    def result(self) -> Any:
        """Its value, or its error raised (``CancelledError`` when it was cancelled); only once done."""


class Clock(Protocol):
    """Time and structured concurrency for the tasks of one rank.

    A clock takes back its own futures and tasks only, so those arguments are typed Any here.
    """

    def now_ns(self) -> int:
        """Current time as int nanoseconds; the origin is the clock's own."""

    def future(self) -> Future:
        """A new pending future of this clock."""

    async def wait(self, future: Any, deadline_ns: int | None) -> Any:
        """Value of ``future``, or its error raised.

        Raises TimeoutError when ``deadline_ns`` passes first (at once if it has passed and the future is not
        done). The future stays pending and usable then, and also when the waiter is cancelled.
        """

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Task:
        """Start a task of this rank. Its error reaches whoever joins it; ``unjoined`` reports the others."""

    async def join(self, tasks: Sequence[Any], deadline_ns: int | None) -> None:
        """Return when every task is done; raise the first error as soon as a task fails (a cancelled task raises
        CancelledError's stand-in, ``WeightSyncError('task ... was cancelled')``); raise TimeoutError at the deadline.

        The other tasks are left running in both cases.
        """

    async def cancel(self, task: Any) -> None:
        """Throw CancelledError into the task where it waits and return once it ended; its outcome is dropped.

        No-op for a done task.
        """

    async def sleep_until(self, when_ns: int) -> None:
        """Return at ``when_ns``, or at once when that has passed."""

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """Run a plain callback at ``when_ns``; it is dropped when the rank is killed before."""

    def unjoined(self) -> tuple[BaseException, ...]:
        """Errors (not cancellations) of tasks that ended and were never joined nor cancelled."""
