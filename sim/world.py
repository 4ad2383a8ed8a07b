"""One simulated world: SimPy's event queue in integer ns, with timers that can be taken back, and futures.

SimPy keeps the time and the queue. What it lacks is added here: a cancelled timer never moves the clock, and
everything that happens within one instant goes through one first-in first-out ready queue, as on asyncio.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, Protocol

import simpy

_COMPACT_ABOVE = 1024


class Timer(simpy.Event):
    """A callback at an instant. ``cancel`` takes it back; it then neither runs nor moves the clock.

    Attributes:
        when_ns: the instant.
        cancelled: True once it was taken back.
    """

    def __init__(
        self, env: _Environment, when_ns: int, callback: Callable[[], None], owner: Owner | None
    ) -> None:
        super().__init__(env)
        self.when_ns = when_ns
        self._ok = True
        self._value = None
        self._callback = callback
        self._owner = owner
        self.cancelled = False
        self.callbacks = [self._fire]

    @property
    def stale(self) -> bool:
        """True once cancelled, or when the rank that owns it was killed."""
        return self.cancelled or (self._owner is not None and self._owner.dead)

    def cancel(self) -> None:
        """Take the timer back; no-op once it ran or was cancelled."""
        if not self.cancelled and self.callbacks is not None:
            self.cancelled = True
            self.env.note_stale()  # type: ignore[attr-defined]

    def _fire(self, _: simpy.Event) -> None:
        self._callback()


class Owner(Protocol):
    """Whoever may be killed: a rank's clock."""

    @property
    def dead(self) -> bool:
        """True once the rank was killed."""


class _Environment(simpy.Environment):
    """SimPy's environment, dropping stale timers instead of stepping to them."""

    def __init__(self) -> None:
        super().__init__(initial_time=0)
        self._stale = 0

    def note_stale(self) -> None:
        """Count one cancelled timer; rebuild the queue once most of it is stale."""
        self._stale += 1
        if self._stale > _COMPACT_ABOVE and 2 * self._stale > len(self._queue):
            self._queue[:] = [entry for entry in self._queue if not _is_stale(entry[3])]
            heapq.heapify(self._queue)
            self._stale = 0

    def prune(self) -> None:
        """Drop stale timers from the head of the queue, leaving the time as it is."""
        queue = self._queue
        while queue and _is_stale(queue[0][3]):
            heapq.heappop(queue)
            self._stale = max(0, self._stale - 1)

    def peek(self) -> float:
        """Time of the next event that is not stale, or infinity."""
        self.prune()
        return super().peek()

    def step(self) -> None:
        """Process the next event that is not stale."""
        self.prune()
        super().step()


def _is_stale(event: simpy.Event) -> bool:
    return type(event) is Timer and event.stale


class Waiter:
    """What a task awaits: one wake-up, once. A wake-up that comes after the task moved on is ignored."""

    __slots__ = ("task",)

    def __init__(self) -> None:
        self.task: Parked | None = None

    def __await__(self) -> Any:
        yield self

    def wake(self) -> None:
        """Make the parked task ready; no-op when it is no longer parked here."""
        if self.task is not None:
            self.task.wake_from(self)


class Parked(Protocol):
    """A task as its waiter sees it."""

    def wake_from(self, waiter: Waiter) -> None:
        """Make the task ready if it is parked at this waiter."""


class SimFuture:
    """A value that arrives once; implements ``reference.clock.Future``. Ranks of one world may share it."""

    __slots__ = ("_done", "_error", "_value", "_waiters")

    def __init__(self) -> None:
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[Waiter | _Callback] = []

    def done(self) -> bool:
        """True once a value or an error is there."""
        return self._done

    def set_result(self, value: Any) -> None:
        """Deliver the value; no-op when done."""
        self._settle(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Deliver an error; no-op when done. An error that nobody waits for is not reported."""
        self._settle(None, error)

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, in the instant in which the future is done; at once when it is."""
        if self._done:
            callback()
        else:
            self._waiters.append(_Callback(callback))

    def result(self) -> Any:
        """The value, or the error raised. RuntimeError while pending."""
        if not self._done:
            raise RuntimeError("future has no result yet: wait for it with clock.wait(future, deadline_ns)")
        if self._error is not None:
            raise self._error
        return self._value

    def add(self, waiter: Waiter) -> None:
        """Wake ``waiter`` when the future is done. The caller saw that it is pending."""
        self._waiters.append(waiter)

    def discard(self, waiter: Waiter) -> None:
        """Forget ``waiter``; no-op when it is not there."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._done:
            return
        self._done, self._value, self._error = True, value, error
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()


class _Callback:
    __slots__ = ("wake",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self.wake = callback


class Settling(Protocol):
    """A task as ``SimWorld.run`` sees it."""

    @property
    def settled(self) -> bool:
        """True when nothing more will come of it: it ended, or its rank was killed."""


class SimWorld:
    """Time, queue and ready list that all ranks of one simulation share.

    Use it as a context manager, or call ``close()``: killed and hung tasks are kept until then, so that none
    of their ``finally`` blocks runs while anybody still looks at the results.

    Attributes:
        env: SimPy's environment; models may add their own events and processes.
        closed: True from the start of ``close()``.
    """

    def __init__(self) -> None:
        self.env = _Environment()
        self.closed = False
        self._ready: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._pump_scheduled = False
        self._closers: list[Callable[[], None]] = []

    def __enter__(self) -> SimWorld:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def now_ns(self) -> int:
        """Simulated time in int ns, from 0."""
        return self.env.now  # type: ignore[return-value]

    def future(self) -> SimFuture:
        """A new pending future."""
        return SimFuture()

    def call_soon(self, callback: Callable[..., None], *args: Any) -> None:
        """Run ``callback`` at this instant, after everything that is ready already."""
        self._ready.append((callback, args))
        if not self._pump_scheduled:
            self._schedule_pump()

    def call_at(self, when_ns: int, callback: Callable[[], None], owner: Owner | None = None) -> Timer:
        """Run ``callback`` at ``when_ns``, or now if that has passed; equal instants keep the order of calls.

        Raises TypeError when ``when_ns`` is not an integer: simulated time never rounds.
        """
        now_ns = self.now_ns()
        timer = Timer(self.env, max(index(when_ns), now_ns), callback, owner)
        self.env.schedule(timer, delay=timer.when_ns - now_ns)
        return timer

    def run(
        self, until_done: Sequence[Settling] | None = None, *, limit_ns: int | None = None
    ) -> tuple[Any, ...]:
        """Run until the given tasks are settled, or nothing but stale timers is left, or the next event lies
        beyond ``limit_ns``.

        Returns the given tasks that are not settled: they hang. Time stays at the last event.
        """
        waiting = [] if until_done is None else list(reversed(until_done))
        peek, step = self.env.peek, self.env.step
        while True:
            while waiting and waiting[-1].settled:
                waiting.pop()
            if until_done is not None and not waiting:
                return ()
            upcoming = peek()
            if upcoming == simpy.core.Infinity or (limit_ns is not None and upcoming > limit_ns):
                return tuple(task for task in until_done or () if not task.settled)
            step()

    def on_close(self, closer: Callable[[], None]) -> None:
        """Have ``closer`` called by ``close()``; clocks register themselves."""
        self._closers.append(closer)

    def close(self) -> None:
        """End the world: every rank is dead, kept coroutines are ended without noise. Idempotent."""
        self.closed = True
        self._ready.clear()
        closers, self._closers = self._closers, []
        for closer in closers:
            closer()
        self._ready.clear()

    def _schedule_pump(self) -> None:
        pump = simpy.Event(self.env)
        pump._ok = True
        pump._value = None
        pump.callbacks.append(self._pump)
        self._pump_scheduled = True
        self.env.schedule(pump)

    def _pump(self, _: simpy.Event) -> None:
        ready = self._ready
        try:
            while ready:
                callback, args = ready.popleft()
                callback(*args)
        finally:
            self._pump_scheduled = False
            if ready:
                self._schedule_pump()
