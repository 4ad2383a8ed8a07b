"""``reference.clock.Clock`` on asyncio: one clock per rank, on its own loop (thread ranks) or a shared one.

Tasks are real asyncio tasks, so a verb may await anything asyncio offers. Each coroutine runs behind a fence
that ``kill()`` shuts: a killed rank's tasks stay where they are for ever and run no ``finally``.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from weightsync.backends.asyncio_parts import AsyncioFuture, Fence, Timer, wake
from weightsync.reference.errors import WeightSyncError

_REFUSALS = 1000


class AsyncioTask:
    """A coroutine of one rank; implements ``reference.clock.Task``. Made by ``AsyncioClock.spawn``.

    Attributes:
        clock: the rank's clock.
        name: for error texts.
    """

    def __init__(self, clock: AsyncioClock, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        self.clock = clock
        self.name = name
        self._claimed = False
        self._fence = Fence(coroutine, clock.is_dead, clock.loop)
        self._task: asyncio.Task[Any] = clock.loop.create_task(self._fence, name=f"{clock.name}:{name}")

    def __repr__(self) -> str:
        return f"AsyncioTask({self.name!r} of {self.clock.name}, {'done' if self.done() else 'pending'})"

    def done(self) -> bool:
        """True once it returned, raised or was cancelled; a pending task of a killed rank never does."""
        return self._task.done()

    def result(self) -> Any:
        """Its value, or its error (``CancelledError`` when cancelled) raised; RuntimeError while pending."""
        if not self.done():
            raise RuntimeError(f"task {self.name!r} has no result yet: join it first")
        self._claimed = True
        return self._task.result()

    @property
    def settled(self) -> bool:
        """True when nothing more will come of it: it ended, or its rank was killed."""
        return self.done() or self.clock.dead

    @property
    def error(self) -> BaseException | None:
        """The error it ended with, CancelledError included; None while pending or after a value."""
        if not self.done():
            return None
        return CancelledError() if self._task.cancelled() else self._task.exception()


class AsyncioClock:
    """The clock of one rank on asyncio. All methods but those that say otherwise belong to the loop's thread.

    Args:
        loop: the loop it runs on; None makes one that ``close()`` closes again.
        rank_name: name of the rank for error texts, such as ``rollout1.0``.
        now_ns: the time, the same for all ranks of a host; None means ``time.monotonic_ns``.

    Attributes:
        dead: True after ``kill()``: tasks are frozen for ever, timers and wake-ups are dropped.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop | None = None,
        *,
        rank_name: str = "rank",
        now_ns: Callable[[], int] | None = None,
    ) -> None:
        self.name = rank_name
        self.dead = False
        self._closed = False
        self._refusals = 0
        self.loop = asyncio.new_event_loop() if loop is None else loop
        self._owns_loop = loop is None
        self._now_ns = time.monotonic_ns if now_ns is None else now_ns
        self._tasks: dict[AsyncioTask, None] = {}
        self._failed: list[AsyncioTask] = []
        self._stray: list[BaseException] = []
        self._turned: asyncio.Future[None] | None = None

    def is_dead(self) -> bool:
        """True after ``kill()``."""
        return self.dead

    def now_ns(self) -> int:
        """Time of this host in int ns."""
        return self._now_ns()

    def future(self) -> AsyncioFuture:
        """A new pending future. Only tasks of this clock's loop may wait for it; any thread may set it."""
        return AsyncioFuture(self.in_loop)

    async def wait(self, future: AsyncioFuture, deadline_ns: int | None) -> Any:
        """See ``reference.clock.Clock.wait``."""
        if self.dead:
            await self._freeze()
        if not future.done():
            await self._wait_for(future._waiters, deadline_ns)
            if not future.done():
                raise TimeoutError(f"{self.name} waited until {deadline_ns} ns and nothing came")
        return future.result()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> AsyncioTask:
        """See ``reference.clock.Clock.spawn``. On a killed rank the coroutine never starts."""
        task = AsyncioTask(self, coroutine, name)
        self._tasks[task] = None
        if self.dead:
            coroutine.close()
            _bury(task)
        task._task.add_done_callback(lambda _: self._ended(task))
        return task

    async def join(self, tasks: Sequence[AsyncioTask], deadline_ns: int | None) -> None:
        """See ``reference.clock.Clock.join``; of errors at one instant, the first in ``tasks`` order."""
        if self.dead:
            await self._freeze()
        if not _claim(tasks):
            ending = self.future()
            left = [task for task in tasks if not task.done()]

            def on_end(ended: asyncio.Task[Any]) -> None:
                left[:] = [task for task in left if task._task is not ended]
                if not left or ended.cancelled() or ended.exception() is not None:
                    ending.set_result(None)

            for task in left:
                task._task.add_done_callback(on_end)
            try:
                await self._wait_for(ending._waiters, deadline_ns)
            finally:
                for task in left:
                    task._task.remove_done_callback(on_end)
            if not _claim(tasks):
                names = ", ".join(repr(task.name) for task in tasks if not task.done())
                raise TimeoutError(f"{self.name} joined until {deadline_ns} ns; still running: {names}")

    async def cancel(self, task: AsyncioTask) -> None:
        """See ``reference.clock.Clock.cancel``. A task that swallows the cancel keeps the caller waiting."""
        if self.dead:
            await self._freeze()
        task._claimed = True
        if not task.done():
            task._task.cancel()
            ending = self.future()
            task._task.add_done_callback(ending.set_result)
            await self._wait_for(ending._waiters, None)

    async def sleep_until(self, when_ns: int) -> None:
        """See ``reference.clock.Clock.sleep_until``."""
        if self.dead:
            await self._freeze()
        await self._wait_for([], when_ns)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """See ``reference.clock.Clock.call_at``. An error of the callback is one of ``unjoined()``."""

        def guarded() -> None:
            if self.dead:
                return
            try:
                callback()
            except Exception as error:
                self._stray.append(error)

        if not self.dead:
            Timer(self.loop, self._now_ns, when_ns, guarded)

    def unjoined(self) -> tuple[BaseException, ...]:
        """See ``reference.clock.Clock.unjoined``; errors of timer callbacks come first."""
        self._failed = [task for task in self._failed if not task._claimed]
        return (*self._stray, *(task.error for task in self._failed if task.error is not None))

    def call_soon_threadsafe(self, callback: Callable[..., None], *args: Any) -> None:
        """Run ``callback`` in the loop's thread, from any thread; dropped when the rank is dead."""
        with contextlib.suppress(RuntimeError):  # the loop was closed between our looking and calling
            self.loop.call_soon_threadsafe(self._unless_dead, callback, *args)

    def in_loop(self, callback: Callable[..., None], *args: Any) -> None:
        """Run ``callback`` now when called from within the running loop, else by ``call_soon_threadsafe``."""
        if _running_loop() is self.loop:
            callback(*args)
        else:
            self.call_soon_threadsafe(callback, *args)

    def run(self, until_done: Sequence[AsyncioTask]) -> tuple[AsyncioTask, ...]:
        """Drive the loop in this thread until the given tasks are settled, which a kill also does.

        Returns those that did not end: none, or frozen ones. Loop and tasks are kept until ``close()``.
        """

        async def settle() -> None:
            while not all(task.settled for task in until_done):
                self._turned = self.loop.create_future()
                await self._turned

        self.loop.run_until_complete(settle())
        return tuple(task for task in until_done if not task.done())

    def kill(self) -> None:
        """Freeze every task of this rank for ever, whatever it waits for, without running any ``finally``.

        From any thread. A task of the rank may call it: the task then stops at its next await. Idempotent.
        """
        self.dead = True
        if _running_loop() is self.loop:
            self._settle_dead()
        else:
            with contextlib.suppress(RuntimeError):
                self.loop.call_soon_threadsafe(self._settle_dead)

    def close(self) -> None:
        """End the tasks that are left, without noise, and the loop if this clock made it; it must not run."""
        self.dead = self._closed = True
        tasks, self._tasks = list(self._tasks), {}
        for task in tasks:
            _bury(task)
            task._fence.end()
        if self._owns_loop and not self.loop.is_closed():
            self.loop.close()

    async def _wait_for(self, waiters: list[asyncio.Future[None]], deadline_ns: int | None) -> None:
        """Park until woken or until the deadline; return at once when that has passed."""
        if deadline_ns is not None and deadline_ns <= self.now_ns():
            return
        waiter = self.loop.create_future()
        waiters.append(waiter)
        timer = (
            None if deadline_ns is None else Timer(self.loop, self._now_ns, deadline_ns, lambda: wake(waiter))
        )
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if waiter in waiters:
                waiters.remove(waiter)

    async def _freeze(self) -> None:
        if self._closed and self._refusals < _REFUSALS:
            # Clean-ups of kept coroutines end at once; bounded, as a task may swallow the cancel and await again.
            self._refusals += 1
            raise CancelledError
        while True:
            await self.loop.create_future()

    def _unless_dead(self, callback: Callable[..., None], *args: Any) -> None:
        if not self.dead:
            callback(*args)

    def _ended(self, task: AsyncioTask) -> None:
        self._tasks.pop(task, None)
        if not task._task.cancelled() and task._task.exception() is not None:
            # Those that were joined meanwhile are let go: an error holds the frames of the update that it ended.
            self._failed = [*(one for one in self._failed if not one._claimed), task]
        self._turn()

    def _settle_dead(self) -> None:
        for task in self._tasks:
            _bury(task)
        self._turn()

    def _turn(self) -> None:
        if self._turned is not None:
            wake(self._turned)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _bury(task: AsyncioTask) -> None:
    """Make asyncio forget a frozen task: ``asyncio.run`` would wait for it at its end."""
    asyncio._unregister_task(task._task)
    task._task._log_destroy_pending = False  # type: ignore[attr-defined]


def _claim(tasks: Sequence[AsyncioTask]) -> bool:
    """True when all are done, each outcome then counting as joined; raises the first error in their order."""
    for task in tasks:
        error = task.error
        if error is not None:
            task._claimed = True
            if isinstance(error, CancelledError):
                raise WeightSyncError(f"task {task.name!r} was cancelled")
            raise error
    return all(task.done() for task in tasks)
