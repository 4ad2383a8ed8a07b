"""Cancelling and killing: the same log on the simulated clock and on asyncio."""

from __future__ import annotations

import gc
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest

from weightsync.testing.clocks import Bench, Program, check_clocks, guarded, on_asyncio, on_sim, sleeper


def test_cancel_reaches_a_task_in_wait_join_sleep_and_cancel_and_runs_its_finally_first():
    async def deaf(bench: Bench) -> None:
        try:
            await bench.clock.sleep_until(bench.at(9))
        except CancelledError:
            await bench.clock.sleep_until(bench.at(5))

    async def program(bench: Bench) -> None:
        clock = bench.clock
        other = bench.spawn(deaf(bench))
        waits = {
            "wait": clock.wait(clock.future(), None),
            "deadline": clock.wait(clock.future(), bench.at(9)),
            "join": clock.join([other], bench.at(9)),
            "sleep": clock.sleep_until(bench.at(9)),
            "cancel": clock.cancel(other),
        }
        tasks = [bench.spawn(guarded(bench, awaitable, name)) for name, awaitable in waits.items()]
        await clock.sleep_until(bench.at(1))
        for task in tasks:
            await clock.cancel(task)
            bench.say("ended")

    expected: list[Any] = []
    for name in ("wait", "deadline", "join", "sleep", "cancel"):
        expected += [(1, name, "cancelled"), (1, name, "finally"), (1, "ended")]
    check_clocks(program, *expected, ("ended", None, None, *["cancelled"] * 5))


def test_a_task_that_is_just_being_woken_is_cancelled_and_its_value_is_lost():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        future = clock.future()
        task = bench.spawn(guarded(bench, clock.wait(future, None), "woken"))
        await clock.sleep_until(bench.at(1))
        future.set_result("value")
        await clock.cancel(task)
        bench.say("back", future.done())

    check_clocks(
        program,
        *[
            (1, "woken", "cancelled"),
            (1, "woken", "finally"),
            (1, "back", True),
            ("ended", None, "cancelled"),
        ],
    )


def test_a_task_that_never_started_is_cancelled_without_running():
    async def program(bench: Bench) -> None:
        task = bench.spawn(sleeper(bench, 0, "ran"))
        await bench.clock.cancel(task)
        bench.say(task.done())

    check_clocks(program, (0, True), ("ended", None, "cancelled"))


def test_two_cancels_throw_once_and_a_done_task_is_left_alone():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        task = bench.spawn(guarded(bench, clock.sleep_until(bench.at(9)), "victim"))
        await clock.sleep_until(bench.at(1))
        second = bench.spawn(clock.cancel(task))
        await clock.cancel(task)
        await clock.join([second], None)
        await clock.cancel(task)
        bench.say("all back")

    check_clocks(
        program,
        *[(1, "victim", "cancelled"), (1, "victim", "finally"), (1, "all back")],
        ("ended", None, "cancelled", None),
    )


def test_cancel_waits_for_a_task_that_swallows_it():
    async def stubborn(bench: Bench) -> str:
        try:
            await bench.clock.sleep_until(bench.at(9))
        except CancelledError:
            bench.say("swallowed")
        await bench.clock.sleep_until(bench.at(4))
        return "ended in its own time"

    async def program(bench: Bench) -> None:
        task = bench.spawn(stubborn(bench))
        await bench.clock.sleep_until(bench.at(1))
        await bench.clock.cancel(task)
        bench.say("back")

    check_clocks(program, (1, "swallowed"), (4, "back"), ("ended", None, "ended in its own time"))


def test_cancel_of_a_task_that_never_ends_hangs_visibly():
    async def stubborn(bench: Bench) -> None:
        while True:
            try:
                await bench.clock.wait(bench.clock.future(), None)
            except CancelledError:
                bench.say("swallowed")

    async def program(bench: Bench) -> None:
        task = bench.spawn(stubborn(bench))
        canceller = bench.spawn(bench.clock.cancel(task))
        with pytest.raises(TimeoutError):
            await bench.clock.join([canceller], bench.at(3))
        bench.say("a deadline further out still works")

    with_hang = ("ended", None, "hung", "hung")
    check_clocks(program, (0, "swallowed"), (3, "a deadline further out still works"), with_hang)


def test_except_exception_never_swallows_a_cancel():
    async def careless(bench: Bench) -> None:
        while True:
            try:
                await bench.clock.sleep_until(bench.at(9))
            except Exception:
                bench.say("swallowed")

    async def program(bench: Bench) -> None:
        task = bench.spawn(careless(bench))
        await bench.clock.sleep_until(bench.at(1))
        await bench.clock.cancel(task)
        bench.say("ended")

    check_clocks(program, (1, "ended"), ("ended", None, "cancelled"))


def test_a_task_that_cancels_itself_is_thrown_out_of_that_wait():
    async def program(bench: Bench) -> None:
        try:
            await bench.clock.cancel(bench.tasks[0])
        except CancelledError:
            bench.say("thrown")
            raise

    check_clocks(program, (0, "thrown"), ("ended", "cancelled"))


def test_a_cleanup_may_await_and_a_cleanup_error_is_dropped_with_the_outcome():
    async def tidy(bench: Bench) -> None:
        try:
            await bench.clock.sleep_until(bench.at(9))
        finally:
            await bench.clock.sleep_until(bench.at(2))
            bench.say("tidied")
            raise ValueError("while tidying")

    async def program(bench: Bench) -> None:
        task = bench.spawn(tidy(bench))
        await bench.clock.sleep_until(bench.at(1))
        await bench.clock.cancel(task)
        bench.say("back", bench.clock.unjoined())

    check_clocks(program, (2, "tidied"), (2, "back", ()), ("ended", None, repr(ValueError("while tidying"))))


def test_a_kill_freezes_every_task_runs_no_finally_and_drops_timers():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        future = clock.future()
        waits = [clock.wait(future, bench.at(5)), clock.sleep_until(bench.at(2)), clock.wait(future, None)]
        tasks = [bench.spawn(guarded(bench, awaitable, "victim")) for awaitable in waits]
        bench.spawn(guarded(bench, clock.join(tasks, bench.at(4)), "joiner"))
        clock.call_at(bench.at(3), lambda: bench.say("a dropped callback"))
        await clock.sleep_until(bench.at(1))
        future.set_result("in flight")
        clock.kill()
        late = bench.spawn(sleeper(bench, 2, "late"))
        bench.say("dead", clock.dead, late.done())
        try:
            await clock.wait(future, None)
            bench.say("went on")
        finally:
            bench.say("finally")

    def collected(run: Callable[[Program], list[Any]]) -> list[Any]:
        log = run(program)
        gc.collect()
        return log

    hung = ("ended", *["hung"] * 6)
    assert collected(on_sim)[:2] == collected(on_asyncio)[:2] == [(1, "dead", True, False), hung]
