"""Two parts of the asyncio clock: the fence around a rank's coroutines, and timers that are never early."""

from __future__ import annotations

import asyncio
import collections.abc
from collections.abc import Callable, Coroutine
from typing import Any

_CLOSE_ATTEMPTS = 64


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
