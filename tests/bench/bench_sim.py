"""Awaits per second on the simulated clock, against plain SimPy processes that wait for the same instants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import simpy
from harness import Row, compete

from weightsync.sim.clock import SimClock, SimWorld

RANKS = 8
AWAITS = 4000  # of each rank
ROUNDS = 7
Log = list[tuple[int, int]]


def rows() -> Iterator[Row]:
    conditions = {
        "ranks": RANKS,
        "awaits_per_rank": AWAITS,
        "threads": 1,
        "statistic": f"median of {ROUNDS} interleaved runs",
    }
    yield from compared("sleep_until", sleeping, {"simpy timeouts": simpy_sleeping}, conditions)
    yield from compared(
        "future handed on",
        relaying,
        {"simpy events": simpy_relaying, "asyncio futures": asyncio_relaying},
        conditions,
    )


def compared(
    name: str,
    ours: Callable[[], Log],
    others: dict[str, Callable[[], Log]],
    conditions: dict[str, str | int],
) -> Iterator[Row]:
    expected = ours()
    for other, call in others.items():
        if call() != expected:
            raise AssertionError(
                f"{name}: ours and {other} ran in another order, so their speeds mean nothing"
            )
    times = compete({"ours": ours, **others}, rounds=ROUNDS)
    speeds = {contestant: RANKS * AWAITS / (ms / 1e3) for contestant, ms in times.items()}
    for other in others:
        yield Row(f"sim {name}", "awaits/s", speeds["ours"], other, speeds[other], conditions)


def sleeping() -> Log:
    """Every rank sleeps for a while of its own, again and again."""
    log: Log = []

    async def rank(number: int, clock: SimClock) -> None:
        for _ in range(AWAITS):
            await clock.sleep_until(clock.now_ns() + number + 1)
        log.append((clock.now_ns(), number))

    with SimWorld() as world:
        clocks = [SimClock(world, f"trainer.{number}") for number in range(RANKS)]
        world.run([clock.spawn(rank(number, clock), "rank") for number, clock in enumerate(clocks)])
    return log


def simpy_sleeping() -> Log:
    log: Log = []
    env = simpy.Environment()

    def rank(number: int) -> Iterator[simpy.Event]:
        for _ in range(AWAITS):
            yield env.timeout(number + 1)
        log.append((int(env.now), number))

    for number in range(RANKS):
        env.process(rank(number))
    env.run()
    return log


def relaying() -> Log:
    """A baton goes round: every rank waits for its predecessor's future and sets its own."""
    log: Log = []

    with SimWorld() as world:
        batons = [[world.future() for _ in range(AWAITS + 1)] for _ in range(RANKS)]

        async def rank(number: int, clock: SimClock) -> None:
            for turn in range(AWAITS):
                await clock.wait(batons[number][turn], None)
                hand_on(batons, number, turn).set_result(None)
            log.append((clock.now_ns(), number))

        clocks = [SimClock(world, f"trainer.{number}") for number in range(RANKS)]
        batons[0][0].set_result(None)
        world.run([clock.spawn(rank(number, clock), "rank") for number, clock in enumerate(clocks)])
    return log


def simpy_relaying() -> Log:
    log: Log = []
    env = simpy.Environment()
    batons = [[env.event() for _ in range(AWAITS + 1)] for _ in range(RANKS)]

    def rank(number: int) -> Iterator[simpy.Event]:
        for turn in range(AWAITS):
            yield batons[number][turn]
            hand_on(batons, number, turn).succeed()
        log.append((int(env.now), number))

    batons[0][0].succeed()
    for number in range(RANKS):
        env.process(rank(number))
    env.run()
    return log


def asyncio_relaying() -> Log:
    log: Log = []

    async def rank(number: int, batons: list[list[asyncio.Future[None]]]) -> None:
        for turn in range(AWAITS):
            await batons[number][turn]
            hand_on(batons, number, turn).set_result(None)
        log.append((0, number))

    async def relay() -> None:
        loop = asyncio.get_running_loop()
        batons = [[loop.create_future() for _ in range(AWAITS + 1)] for _ in range(RANKS)]
        batons[0][0].set_result(None)
        await asyncio.gather(*(rank(number, batons) for number in range(RANKS)))

    asyncio.run(relay())
    return log


def hand_on(batons: list[list[Any]], number: int, turn: int) -> Any:
    """The next rank's baton of this turn; after the last rank, the first one's of the next turn."""
    return batons[number + 1][turn] if number + 1 < RANKS else batons[0][turn + 1]
