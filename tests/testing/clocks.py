"""One little program on two clocks: simulated time, and asyncio on a loop whose time is virtual.

The virtual loop makes asyncio's order of events as exact as the simulated one, so that logs can be compared.
Times in logs are units since the start of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.sim.clock import SimClock, SimWorld

UNIT = 1 << 30
"""ns; far above the float error of asyncio's timers."""


class Deadlock(BaseException):
    """Nothing is ready and no timer is left."""


class VirtualSelector(selectors.DefaultSelector):
    """Lets time jump to the next timer; with no timer and nothing ready there is a deadlock."""

    ns = 0

    def select(self, timeout: float | None = None) -> Any:
        """Jump by ``timeout`` seconds, rounded up to whole ns; Deadlock without one."""
        if timeout is None:
            raise Deadlock
        self.ns += math.ceil(timeout * 1e9)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time that starts at 0 and never waits."""

    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        """Virtual time in seconds."""
        return self.virtual.ns / 1e9

    def now_ns(self) -> int:
        """Virtual time in ns."""
        return self.virtual.ns


@dataclass
class Bench:
    """What a program gets.

    Attributes:
        clock: the clock under test, at 0 ns.
        log: entries (time, *what), time in units of ``resolution``.
        tasks: what was spawned through the bench, the program itself first.
        resolution: ns.
    """

    clock: Any
    log: list[Any] = field(default_factory=list)
    tasks: list[Any] = field(default_factory=list)
    resolution: int = UNIT

    def at(self, units: float) -> int:
        """Instant in ns."""
        return int(units * UNIT)

    def say(self, *what: Any) -> None:
        """Log something with the time."""
        now = (self.clock.now_ns() + self.resolution // 2) // self.resolution
        self.log.append((now, *what))

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "child") -> Any:
        """Spawn a task whose outcome ends up in the log's last entry."""
        self.tasks.append(self.clock.spawn(coroutine, name))
        return self.tasks[-1]


Program = Callable[[Bench], Coroutine[Any, Any, Any]]
"""A little program."""


def on_sim(program: Program, resolution: int = UNIT) -> list[Any]:
    """Log of a program on the simulated clock, closed by ("ended", *outcomes)."""
    with SimWorld() as world:
        bench = Bench(SimClock(world, "rank"), resolution=resolution)
        bench.spawn(program(bench), "main")
        world.run()
        return _finish(bench)


def on_asyncio(program: Program, resolution: int = UNIT) -> list[Any]:
    """Log of a program on the asyncio clock in virtual time, closed by ("ended", *outcomes)."""
    loop = VirtualLoop()
    bench = Bench(AsyncioClock(loop, now_ns=loop.now_ns), resolution=resolution)
    bench.spawn(program(bench), "main")
    with contextlib.suppress(Deadlock):
        loop.run_forever()
    try:
        return _finish(bench)
    finally:
        bench.clock.close()
        loop.close()


def _finish(bench: Bench) -> list[Any]:
    ended = [_outcome(task) for task in bench.tasks]
    return [*bench.log, ("ended", *ended)]


def _outcome(task: Any) -> Any:
    if not task.done():
        return "hung"
    try:
        return task.result()
    except CancelledError:
        return "cancelled"
    except Exception as error:
        return repr(error)


def check_clocks(program: Program, *expected: Any) -> None:
    """Both clocks leave exactly the ``expected`` log; AssertionError otherwise."""
    assert on_sim(program) == list(expected)
    assert on_asyncio(program) == list(expected)


async def sleeper(bench: Bench, until: float, value: Any = None) -> Any:
    """Sleep, log, return ``value``."""
    await bench.clock.sleep_until(bench.at(until))
    bench.say("slept", value)
    return value


async def failer(bench: Bench, until: float, text: str) -> None:
    """Sleep, then raise ValueError."""
    await bench.clock.sleep_until(bench.at(until))
    raise ValueError(text)


def guarded(bench: Bench, awaitable: Coroutine[Any, Any, Any], name: str) -> Coroutine[Any, Any, Any]:
    """Await something; log its value or its cancellation, and that ``finally`` ran."""

    async def run() -> None:
        try:
            bench.say(name, await awaitable)
        except CancelledError:
            bench.say(name, "cancelled")
            raise
        finally:
            bench.say(name, "finally")

    return run()
