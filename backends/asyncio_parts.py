"""Parts of the asyncio clock: futures, the fence around a rank's coroutines, timers that are never early."""

from __future__ import annotations

import asyncio
import collections.abc
from collections.abc import Callable, Coroutine
from typing import Any

_CLOSE_ATTEMPTS = 64


class AsyncioFuture:
    """A value that arrives once; implements ``reference.clock.Future``.

    Any thread may call ``set_*``; from outside the running loop it takes effect in the loop's next turn.

    Args:
        in_loop: runs a callback in the loop of the clock that made the future.
    """

    __slots__ = ("_done", "_error", "_in_loop", "_value", "_waiters")

    def __init__(self, in_loop: Callable[..., None]) -> None:
        self._in_loop = in_loop
        self._done = False
        self._value: Any = None
        self._error: BaseException | None = None
        self._waiters: list[asyncio.Future[None]] = []

    def done(self) -> bool:
        """True once a value or an error is there."""
        return self._done

    def set_result(self, value: Any) -> None:
        """Deliver the value; no-op when done."""
        self._in_loop(self._settle, value, None)

    def set_exception(self, error: BaseException) -> None:
        """Deliver an error; no-op when done. An error that nobody waits for is not reported."""
        self._in_loop(self._settle, None, error)

    def result(self) -> Any:
        """The value, or the error raised. RuntimeError while pending."""
        if not self._done:
            raise RuntimeError("future has no result yet: wait for it with clock.wait(future, deadline_ns)")
        if self._error is not None:
            raise self._error
        return self._value

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self._done:
            return
        self._done, self._value, self._error = True, value, error
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            wake(waiter)


class Fence(collections.abc.Coroutine[Any, Any, Any]):
    """Passes a coroutine through until its rank is dead; from then on it waits for ever.

    Args:
        coroutine: what a task of the rank runs; never closed behind its back once the rank is dead.
        is_dead: says whether the rank was killed.
        loop: the loop of the task that drives the fence.
    """

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, Any],
        is_dead: Callable[[], bool],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._coroutine = coroutine
        self._is_dead = is_dead
        self._loop = loop

    def send(self, value: Any) -> Any:
        """Next turn of the coroutine."""
        return self._stay() if self._is_dead() else self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Next turn of the coroutine, with an error."""
        return self._stay() if self._is_dead() else self._coroutine.throw(*error)

    def close(self) -> None:
        """Close the coroutine, unless the rank is dead."""
        if not self._is_dead():
            self._coroutine.close()

    def __await__(self) -> Any:
        raise TypeError("a fence is driven by its task only")

    def end(self) -> None:
        """Close the coroutine, dead or not; awaits in its ``finally`` blocks are ended in turn."""
        for _ in range(_CLOSE_ATTEMPTS):
            try:
                self._coroutine.close()
                return
            except RuntimeError:  # it awaited again
                continue
            except BaseException:
                return

    def _stay(self) -> Any:
        return next(iter(self._loop.create_future()))


class Timer:
    """A callback at an instant of ``now_ns``, never earlier, although the loop counts in float seconds."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        when_ns: int,
        callback: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._now_ns = now_ns
        self._when_ns = when_ns
        self._callback = callback
        self._arm()

    def cancel(self) -> None:
        """Take the timer back; no-op once it ran."""
        self._handle.cancel()

    def _arm(self) -> None:
        delay_ns = max(0, self._when_ns - self._now_ns())
        self._handle = self._loop.call_later(delay_ns / 1e9, self._fire)

    def _fire(self) -> None:
        if self._now_ns() < self._when_ns:
            self._arm()
        else:
            self._callback()


def wake(waiter: asyncio.Future[None]) -> None:
    """Let whoever awaits ``waiter`` go on; no-op when it is done or was cancelled."""
    if not waiter.done():
        waiter.set_result(None)
