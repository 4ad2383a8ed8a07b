"""Futures, deadlines and joins: the same log on the simulated clock and on asyncio."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.reference.errors import WeightSyncError
from weightsync.testing.clocks import Bench, check_clocks, failer, sleeper


def test_wait_gives_the_value_or_raises_the_error():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        good, bad = clock.future(), clock.future()
        clock.call_at(bench.at(1), lambda: good.set_result(7))
        clock.call_at(bench.at(2), lambda: bad.set_exception(ValueError("no")))
        bench.say(await clock.wait(good, bench.at(5)))
        with pytest.raises(ValueError, match="no"):
            await clock.wait(bad, None)
        bench.say("raised")

    check_clocks(program, (1, 7), (2, "raised"), ("ended", None))


def test_a_deadline_leaves_the_future_pending_and_usable():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        future = clock.future()
        clock.call_at(bench.at(3), lambda: future.set_result("late"))
        with pytest.raises(TimeoutError):
            await clock.wait(future, bench.at(1))
        bench.say(future.done())
        with pytest.raises(TimeoutError):
            await clock.wait(future, bench.at(1))
        bench.say("at once")
        bench.say(await clock.wait(future, bench.at(4)))
        bench.say(await clock.wait(future, bench.at(0)))

    check_clocks(program, (1, False), (1, "at once"), (3, "late"), (3, "late"), ("ended", None))


def test_a_done_future_keeps_its_first_value_and_wakes_all_waiters_in_their_order():
    async def waiter(bench: Bench, future: Any, name: str) -> None:
        bench.say(name, await bench.clock.wait(future, None))

    async def program(bench: Bench) -> None:
        future = bench.clock.future()
        for name in "abc":
            bench.spawn(waiter(bench, future, name))
        await bench.clock.sleep_until(bench.at(1))
        future.set_result(1)
        future.set_result(2)
        future.set_exception(ValueError("ignored"))
        bench.say("set")

    expected = [(1, "set"), (1, "a", 1), (1, "b", 1), (1, "c", 1), ("ended", None, None, None, None)]
    check_clocks(program, *expected)


def test_a_cancelled_waiter_does_not_touch_the_future():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        future = clock.future()
        task = bench.spawn(clock.wait(future, bench.at(9)))
        await clock.sleep_until(bench.at(1))
        await clock.cancel(task)
        bench.say(task.done(), future.done())
        clock.call_at(bench.at(2), lambda: future.set_result("x"))
        bench.say(await clock.wait(future, bench.at(3)))

    check_clocks(program, (1, True, False), (2, "x"), ("ended", None, "cancelled"))


def test_instants_that_have_passed_return_at_once_and_callbacks_run_in_order():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        await clock.sleep_until(bench.at(2))
        await clock.sleep_until(bench.at(1))
        bench.say("no wait")
        clock.call_at(bench.at(5), lambda: bench.say("five"))
        clock.call_at(bench.at(4), lambda: bench.say("four"))
        clock.call_at(bench.at(0), lambda: bench.say("passed"))
        await clock.sleep_until(bench.at(6))

    check_clocks(program, (2, "no wait"), (2, "passed"), (4, "four"), (5, "five"), ("ended", None))


def test_join_waits_for_all_and_keeps_values():
    async def program(bench: Bench) -> None:
        tasks = [bench.spawn(sleeper(bench, units, units)) for units in (3, 1, 2)]
        await bench.clock.join(tasks, None)
        bench.say([task.result() for task in tasks])
        await bench.clock.join(tasks, bench.at(0))
        await bench.clock.join([], bench.at(0))

    check_clocks(
        program,
        *[(1, "slept", 1), (2, "slept", 2), (3, "slept", 3), (3, [3, 1, 2]), ("ended", None, 3, 1, 2)],
    )


def test_join_raises_the_first_error_at_once_and_leaves_the_others_running():
    async def program(bench: Bench) -> None:
        slow, bad = bench.spawn(sleeper(bench, 3, "slow")), bench.spawn(failer(bench, 1, "bad"))
        with pytest.raises(ValueError, match="bad"):
            await bench.clock.join([slow, bad], None)
        bench.say(slow.done(), bench.clock.unjoined())
        await bench.clock.join([slow], None)

    check_clocks(program, (1, False, ()), (3, "slept", "slow"), ("ended", None, "slow", "ValueError('bad')"))


def test_join_at_its_deadline_names_the_tasks_still_running():
    async def program(bench: Bench) -> None:
        quick = bench.spawn(sleeper(bench, 1, "quick"), "quick")
        slow = bench.spawn(sleeper(bench, 3, "slow"), "slow")
        with pytest.raises(TimeoutError, match="still running: 'slow'"):
            await bench.clock.join([quick, slow], bench.at(2))
        bench.say("gave up")
        with pytest.raises(TimeoutError):
            await bench.clock.join([slow], bench.at(2))
        await bench.clock.join([slow], bench.at(4))

    check_clocks(
        program,
        *[(1, "slept", "quick"), (2, "gave up"), (3, "slept", "slow"), ("ended", None, "quick", "slow")],
    )


def test_a_cancelled_task_reaches_its_joiner_as_an_ordinary_error():
    async def program(bench: Bench) -> None:
        victim = bench.spawn(sleeper(bench, 9), "victim")
        joiner = bench.spawn(bench.clock.join([victim], None), "joiner")
        await bench.clock.sleep_until(bench.at(1))
        await bench.clock.cancel(victim)
        with pytest.raises(WeightSyncError, match="task 'victim' was cancelled"):
            await bench.clock.join([joiner], None)
        bench.say("told")

    text = repr(WeightSyncError("task 'victim' was cancelled"))
    check_clocks(program, (1, "told"), ("ended", None, "cancelled", text))


def test_unjoined_reports_errors_that_reached_nobody():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        bench.spawn(failer(bench, 1, "lost"))
        joined = bench.spawn(failer(bench, 1, "joined"))
        dropped = bench.spawn(failer(bench, 1, "dropped"))
        ended = bench.spawn(sleeper(bench, 9))
        clock.call_at(bench.at(1), lambda: 1 // 0)
        await clock.sleep_until(bench.at(2))
        await clock.cancel(dropped)
        await clock.cancel(ended)
        with pytest.raises(ValueError, match="joined"):
            await clock.join([joined], None)
        bench.say(*map(repr, clock.unjoined()))

    zero = "ZeroDivisionError('integer division or modulo by zero')"
    errors = [repr(ValueError(text)) for text in ("lost", "joined", "dropped")]
    check_clocks(program, (2, zero, "ValueError('lost')"), ("ended", None, *errors, "cancelled"))


def test_results_that_are_not_there_yet_say_what_to_do():
    async def program(bench: Bench) -> None:
        with pytest.raises(RuntimeError, match="join it first"):
            bench.tasks[0].result()
        with pytest.raises(RuntimeError, match="wait for it"):
            bench.clock.future().result()

    check_clocks(program, ("ended", None))
