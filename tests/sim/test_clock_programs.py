"""Random little programs leave equal logs on the simulated clock and on asyncio."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError
from typing import Any

from hypothesis import event, given
from hypothesis import strategies as st

from weightsync.reference.errors import WeightSyncError
from weightsync.testing.clocks import Bench, Program, on_asyncio, on_sim

FUTURES, TASKS = 3, 5
futures = st.integers(0, FUTURES - 1)
names = st.integers(0, TASKS - 1)
durations = st.integers(0, 3)
operations = st.one_of(
    st.tuples(st.just("sleep"), durations),
    st.tuples(st.just("wait"), futures, st.none() | durations),
    st.tuples(st.just("set"), futures),
    st.tuples(st.just("fail"), futures),
    st.tuples(st.just("spawn"), names),
    st.tuples(st.just("join"), st.lists(names, max_size=3, unique=True), st.none() | durations),
    st.tuples(st.just("cancel"), names),
    st.tuples(st.just("later"), durations, futures),
    st.tuples(st.just("yield")),
    st.tuples(st.just("raise")),
    st.tuples(st.just("stubborn"), durations),
)
scripts = st.lists(st.lists(operations, max_size=6), min_size=TASKS, max_size=TASKS)


def interpret(scripts: list[list[Any]], early: list[int]) -> Program:
    """A program: task 0 runs script 0; the others are spawned once, at its start (``early``) or by a script.

    Every timed operation gets a fraction of a unit of its own (a power of two), so that no two timers ever
    tie: asyncio's heap orders ties as it likes.
    """

    def fraction(task: int, step: int) -> int:
        return 1 << (10 + sum(len(script) for script in scripts[:task]) + step)

    unit = 1 << (12 + sum(len(script) for script in scripts))

    async def program(bench: Bench) -> None:
        clock = bench.clock
        shared = [clock.future() for _ in range(FUTURES)]
        started: dict[int, Any] = {}

        def after(units: int, task: int, step: int) -> int:
            return clock.now_ns() + units * unit + fraction(task, step)

        async def perform(task: int, step: int, operation: tuple[Any, ...]) -> Any:
            kind, *args = operation
            deadline = None
            if kind in ("wait", "join") and args[1] is not None:
                deadline = after(args[1], task, step)
            if kind == "sleep":
                await clock.sleep_until(after(args[0], task, step))
            elif kind == "wait":
                return await clock.wait(shared[args[0]], deadline)
            elif kind == "set":
                shared[args[0]].set_result((task, step))
            elif kind == "fail":
                shared[args[0]].set_exception(KeyError(task, step))
            elif kind == "spawn" and args[0] not in started and args[0] != 0:
                started[args[0]] = bench.spawn(body(args[0]), str(args[0]))
            elif kind == "join":
                await clock.join([started[name] for name in args[0] if name in started], deadline)
            elif kind == "cancel" and args[0] in started:
                await clock.cancel(started[args[0]])
            elif kind == "later":
                future, value = shared[args[1]], (task, step)
                clock.call_at(after(args[0], task, step), lambda: future.set_result(value))
            elif kind == "yield":
                await asyncio.sleep(0)
            elif kind == "raise":
                raise ValueError(task, step)
            elif kind == "stubborn":
                try:
                    await clock.wait(clock.future(), after(args[0], task, step))
                except CancelledError:
                    bench.say(task, step, "swallowed")
            return None

        async def body(task: int) -> None:
            try:
                for step, operation in enumerate(scripts[task]):
                    try:
                        bench.say(task, step, operation[0], await perform(task, step, operation))
                    except (TimeoutError, KeyError, WeightSyncError) as error:
                        bench.say(task, step, operation[0], type(error).__name__)
            finally:
                bench.say(task, "finally")

        started[0] = bench.tasks[0]
        for name in early:
            started[name] = bench.spawn(body(name), str(name))
        await body(0)
        bench.say("unjoined", *map(repr, clock.unjoined()))

    return program


@given(scripts, st.permutations(range(1, TASKS)), st.integers(0, TASKS - 1))
def test_random_programs_leave_equal_logs_on_both_clocks(scripts, order, early):
    program = interpret(scripts, list(order[:early]))
    simulated, real = on_sim(program, resolution=1024), on_asyncio(program, resolution=1024)
    assert simulated == real
    assert simulated == on_sim(program, resolution=1024)
    text = str(simulated)
    for class_ in ("hung", "cancelled", "TimeoutError", "swallowed", "KeyError", "WeightSyncError"):
        if class_ in text:
            event(class_)
