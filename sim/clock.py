"""The coroutine bridge: tasks, deadlines, kill and cancel on simulated time; a ``reference.clock.Clock``.

Coroutines are driven by plain callbacks; there is no SimPy process per task. Whatever wakes a task does so
through the world's ready queue: within one instant things happen in the order in which asyncio would do them.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from weightsync.reference.errors import WeightSyncError
from weightsync.sim.world import SimFuture, SimWorld, Waiter

__all__ = ["SimClock", "SimFuture", "SimTask", "SimWorld"]

_CLOSE_ATTEMPTS = 64
_REFUSALS = 1000


class SimTask:
    """A coroutine of one rank; implements ``reference.clock.Task``. Made by ``SimClock.spawn``.

    Attributes:
        clock: the rank's clock.
        name: for error texts.
    """

    __slots__ = (
        "_callbacks", "_claimed", "_coroutine", "_done", "_error", "_must_cancel", "_value", "_waiter",
        "clock", "name",
    )  # fmt: skip

    def __init__(self, clock: SimClock, coroutine: Coroutine[Any, Any, Any], name: str) -> None:
        self.clock = clock
        self.name = name
        self._coroutine = coroutine
        self._waiter: Waiter | None = None
        self._must_cancel = False
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._claimed = False
        self._callbacks: list[Callable[[SimTask], None]] = [clock._ended]

    def __repr__(self) -> str:
        return f"SimTask({self.name!r} of {self.clock.name}, {'done' if self._done else 'pending'})"

    def done(self) -> bool:
        """True once it returned, raised or was cancelled; a pending task of a killed rank never does."""
        return self._done

    def result(self) -> Any:
        """Its value, or its error (``CancelledError`` when cancelled) raised; RuntimeError while pending."""
        if not self._done:
            raise RuntimeError(f"task {self.name!r} has no result yet: join it first")
        self._claimed = True
        if self._error is not None:
            raise self._error
        return self._value

    @property
    def settled(self) -> bool:
        """True when nothing more will come of it: it ended, or its rank was killed."""
        return self._done or self.clock.dead

    def wake_from(self, waiter: Waiter) -> None:
        """Make the task ready if it is parked at this waiter."""
        if self._waiter is waiter:
            self._waiter = None
            self.clock.world.call_soon(self._step)

    def _interrupt(self) -> None:
        """Throw CancelledError where the task waits; when it is running or being woken, at its next turn."""
        if self._waiter is None:
            self._must_cancel = True
        else:
            self._waiter = None
            self.clock.world.call_soon(self._step, CancelledError())

    def _step(self, error: BaseException | None = None) -> None:
        clock = self.clock
        if clock.dead:
            return
        if self._must_cancel:
            self._must_cancel = False
            if not isinstance(error, CancelledError):
                error = CancelledError()
        try:
            request = self._coroutine.send(None) if error is None else self._coroutine.throw(error)
        except StopIteration as stop:
            self._finish(stop.value, None)
        except (KeyboardInterrupt, SystemExit) as ending:
            self._finish(None, ending)
            raise
        except BaseException as failure:  # a GeneratorExit of a child must reach the joiner, too
            self._finish(None, failure)
        else:
            self._park(request)

    def _park(self, request: Any) -> None:
        if type(request) is Waiter:
            request.task = self
            self._waiter = request
            if self._must_cancel:
                self._must_cancel = False
                self._interrupt()
        elif request is None:  # asyncio.sleep(0)
            self.clock.world.call_soon(self._step)
        else:
            self.clock.world.call_soon(self._step, RuntimeError(
                f"task {self.name!r} awaited {request!r}, which does not belong to the simulated clock;"
                " await this clock's methods only"))  # fmt: skip

    def _finish(self, value: Any, error: BaseException | None) -> None:
        clock = self.clock
        if clock.dead:
            return
        self._done, self._value, self._error = True, value, error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            clock.world.call_soon(callback, self)


class SimClock:
    """The clock of one simulated rank.

    Args:
        world: the world whose time it shows.
        rank_name: name of the rank, such as ``rollout1.0``.

    Attributes:
        dead: True after ``kill()``: tasks are frozen for ever, timers and wake-ups are dropped.
    """

    def __init__(self, world: SimWorld, rank_name: str) -> None:
        self.world = world
        self.name = rank_name
        self.dead = False
        self._tasks: dict[SimTask, None] = {}
        self._failed: list[SimTask] = []
        self._stray: list[BaseException] = []
        self._refusals = 0
        world.on_close(self._close)

    def now_ns(self) -> int:
        """Simulated time in int ns."""
        return self.world.now_ns()

    def future(self) -> SimFuture:
        """A new pending future; any rank of the world may wait for it."""
        return self.world.future()

    async def wait(self, future: SimFuture, deadline_ns: int | None) -> Any:
        """See ``reference.clock.Clock.wait``."""
        if self.dead:
            await self._freeze()
        if not future.done():
            await self._wait_for(future.add, future.discard, deadline_ns)
            if not future.done():
                raise TimeoutError(f"{self.name} waited until {deadline_ns} ns and nothing came")
        return future.result()

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> SimTask:
        """See ``reference.clock.Clock.spawn``. On a killed rank the coroutine never starts."""
        task = SimTask(self, coroutine, name)
        if self.dead:
            coroutine.close()
        else:
            self._tasks[task] = None
            self.world.call_soon(task._step)
        return task

    async def join(self, tasks: Sequence[SimTask], deadline_ns: int | None) -> None:
        """See ``reference.clock.Clock.join``; of errors at one instant, the first in ``tasks`` order."""
        if self.dead:
            await self._freeze()
        if not _claim(tasks):
            ending = self.future()
            left = [task for task in tasks if not task.done()]

            def on_end(task: SimTask) -> None:
                left.remove(task)
                if not left or task._error is not None:
                    ending.set_result(None)

            for task in left:
                task._callbacks.append(on_end)
            try:
                await self._wait_for(ending.add, ending.discard, deadline_ns)
            finally:
                for task in left:
                    if on_end in task._callbacks:
                        task._callbacks.remove(on_end)
            if not _claim(tasks):
                names = ", ".join(repr(task.name) for task in tasks if not task.done())
                raise TimeoutError(f"{self.name} joined until {deadline_ns} ns; still running: {names}")

    async def cancel(self, task: SimTask) -> None:
        """See ``reference.clock.Clock.cancel``. A task that swallows the cancel keeps the caller waiting."""
        if self.dead:
            await self._freeze()
        task._claimed = True
        if not task.done():
            task._interrupt()
            ending = self.future()
            task._callbacks.append(ending.set_result)
            await self._wait_for(ending.add, ending.discard, None)

    async def sleep_until(self, when_ns: int) -> None:
        """See ``reference.clock.Clock.sleep_until``."""
        if self.dead:
            await self._freeze()
        await self._wait_for(None, None, when_ns)

    def call_at(self, when_ns: int, callback: Callable[[], None]) -> None:
        """See ``reference.clock.Clock.call_at``. An error of the callback is one of ``unjoined()``."""

        def guarded() -> None:
            try:
                callback()
            except Exception as error:
                self._stray.append(error)

        if not self.dead:
            self.world.call_at(when_ns, guarded, self)

    def unjoined(self) -> tuple[BaseException, ...]:
        """See ``reference.clock.Clock.unjoined``; errors of timer callbacks come first."""
        self._failed = [task for task in self._failed if not task._claimed]
        return (*self._stray, *(task._error for task in self._failed if task._error is not None))

    def kill(self) -> None:
        """Freeze every task of this rank for ever, whatever it waits for, without running any ``finally``.

        A task of the rank may call it: the task then stops at its next await of this clock. Idempotent.
        """
        self.dead = True

    async def _wait_for(self, add: Callable[[Waiter], None] | None, discard: Callable[[Waiter], None] | None,
                        deadline_ns: int | None) -> None:  # fmt: skip
        """Park until woken or until the deadline; return at once when that has passed."""
        self._refuse_when_closed()
        if deadline_ns is not None and deadline_ns <= self.now_ns():
            return
        waiter = Waiter()
        timer = None if deadline_ns is None else self.world.call_at(deadline_ns, waiter.wake, self)
        if add is not None:
            add(waiter)
        try:
            await waiter
        finally:
            if timer is not None:
                timer.cancel()
            if discard is not None:
                discard(waiter)

    async def _freeze(self) -> None:
        while True:
            self._refuse_when_closed()
            await Waiter()

    def _refuse_when_closed(self) -> None:
        """In a closed world every await is cancelled at once, so that clean-ups of kept coroutines end.

        Not for ever: one that swallows cancels in a loop must not hang ``close()``.
        """
        if self.world.closed and self._refusals < _REFUSALS:
            self._refusals += 1
            raise CancelledError

    def _ended(self, task: SimTask) -> None:
        self._tasks.pop(task, None)
        if task._error is not None and not isinstance(task._error, CancelledError):
            self._failed.append(task)

    def _close(self) -> None:
        self.dead = True
        tasks, self._tasks = list(self._tasks), {}
        for task in tasks:
            _close_quietly(task._coroutine)


def _claim(tasks: Sequence[SimTask]) -> bool:
    """True when all are done, each outcome then counting as joined; raises the first error in their order."""
    for task in tasks:
        if task.done() and task._error is not None:
            task._claimed = True
            if isinstance(task._error, CancelledError):
                raise WeightSyncError(f"task {task.name!r} was cancelled")
            raise task._error
    return all(task.done() for task in tasks)


def _close_quietly(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close the coroutine; awaits in its ``finally`` blocks are ended in turn."""
    for _ in range(_CLOSE_ATTEMPTS):
        try:
            coroutine.close()
            return
        except RuntimeError:  # it awaited again
            continue
        except BaseException:
            return
