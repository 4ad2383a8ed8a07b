"""What the asyncio clock adds to the shared behaviour: real time, threads, and ranks that share a loop.

``tests/sim/test_clock.py`` holds it to the simulated clock, program by program.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import pytest

from weightsync.backends.asyncio_clock import AsyncioClock

MS = 1_000_000
SOON = 10_000 * MS  # a test that waits this long has failed


@pytest.fixture
def clock():
    clock = AsyncioClock(rank_name="trainer.0")
    yield clock
    clock.close()


def test_time_is_the_hosts_monotonic_clock_and_no_sleep_is_early(clock):
    async def program() -> list[int]:
        late = []
        for nanoseconds in (1, 999, 1_001, 100_003, 2 * MS):
            until = clock.now_ns() + nanoseconds
            await clock.sleep_until(until)
            late.append(clock.now_ns() - until)
        return late

    before = time.monotonic_ns()
    task = clock.spawn(program(), "main")
    assert clock.run([task]) == ()
    assert all(late >= 0 for late in task.result())
    assert before <= clock.now_ns() <= time.monotonic_ns()


def test_futures_may_be_set_from_any_thread(clock):
    async def program() -> list[object]:
        value, error = clock.future(), clock.future()

        def other_thread() -> None:
            value.set_result("from a thread")
            value.set_result("ignored")
            error.set_exception(ConnectionError("also from a thread"))

        thread = threading.Thread(target=other_thread)
        thread.start()
        found: list[object] = [await clock.wait(value, clock.now_ns() + SOON)]
        with pytest.raises(ConnectionError, match="also from a thread"):
            await clock.wait(error, clock.now_ns() + SOON)
        thread.join()
        clock.call_soon_threadsafe(found.append, "called")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return found

    task = clock.spawn(program(), "main")
    clock.run([task])
    assert task.result() == ["from a thread", "called"]


def test_two_thread_ranks_with_a_loop_each_hand_values_over():
    clocks = [AsyncioClock(rank_name=f"rollout{number}.0") for number in range(2)]
    inboxes = [clock.future() for clock in clocks]

    async def rank(me: int) -> object:
        inboxes[1 - me].set_result(f"from {me}")
        return await clocks[me].wait(inboxes[me], clocks[me].now_ns() + SOON)

    tasks = [clock.spawn(rank(number), "rank") for number, clock in enumerate(clocks)]
    threads = [
        threading.Thread(target=clock.run, args=([task],)) for clock, task in zip(clocks, tasks, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON / 1e9)
    assert [task.result() for task in tasks] == ["from 1", "from 0"]
    for clock in clocks:
        clock.close()


def test_a_thread_rank_killed_from_outside_stops_its_loop_and_runs_no_finally(clock):
    log = []
    waiting = threading.Event()

    async def victim() -> None:
        try:
            waiting.set()
            await clock.wait(clock.future(), None)
        finally:
            log.append("finally")

    task = clock.spawn(victim(), "victim")
    hung = []
    thread = threading.Thread(target=lambda: hung.extend(clock.run([task])))
    thread.start()
    assert waiting.wait(SOON / 1e9)
    clock.kill()
    thread.join(SOON / 1e9)
    gc.collect()
    assert (hung, task.done(), task.settled, log) == ([task], False, True, [])


def test_a_killed_rank_leaves_the_others_on_its_loop_alone():
    log = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        dead, alive = AsyncioClock(loop, rank_name="dead"), AsyncioClock(loop, rank_name="alive")

        async def victim() -> None:
            try:
                await asyncio.sleep(0.001)
                log.append("went on")
            finally:
                log.append("finally")

        async def suicide() -> None:
            try:
                dead.kill()
                await dead.sleep_until(0)
                log.append("went on")
            finally:
                log.append("finally")

        frozen = [dead.spawn(victim(), "victim"), dead.spawn(suicide(), "suicide")]
        dead.call_at(dead.now_ns() + MS, lambda: log.append("a dropped callback"))
        await alive.sleep_until(alive.now_ns() + 5 * MS)
        dead.call_soon_threadsafe(log.append, "dropped too")
        await alive.sleep_until(alive.now_ns() + 5 * MS)
        log.append([task.done() for task in frozen])
        clocks.append(dead)

    clocks: list[AsyncioClock] = []
    asyncio.run(main())  # which ends although two tasks are frozen
    gc.collect()
    assert log == [[False, False]]
    clocks[0].close()


def test_tasks_may_await_whatever_asyncio_offers(clock):
    async def program() -> int:
        async with asyncio.timeout(SOON / 1e9):
            return await asyncio.get_running_loop().run_in_executor(None, lambda: 7)

    task = clock.spawn(program(), "main")
    clock.run([task])
    assert task.result() == 7


def test_errors_nobody_joined_are_reported_by_the_clock_and_not_by_asyncio(clock, caplog):
    async def failing() -> None:
        raise ValueError("lost")

    task = clock.spawn(failing(), "failing")
    clock.run([task])
    assert [repr(error) for error in clock.unjoined()] == ["ValueError('lost')"]
    del task
    gc.collect()
    assert caplog.records == []


def test_closing_ends_tasks_that_are_left_without_noise(caplog, recwarn):
    def leave_garbage() -> None:
        clock = AsyncioClock()

        async def tidy() -> None:
            try:
                await clock.wait(clock.future(), None)
            finally:
                await clock.sleep_until(clock.now_ns() + MS)

        async def main() -> None:
            await asyncio.sleep(0)

        clock.spawn(tidy(), "tidy")
        clock.run([clock.spawn(main(), "main")])
        clock.spawn(tidy(), "never started")
        clock.kill()
        clock.spawn(tidy(), "spawned when dead")
        clock.close()
        clock.close()
        clock.call_soon_threadsafe(print)

    leave_garbage()
    gc.collect()
    assert caplog.records == []
    assert [str(warning.message) for warning in recwarn] == []


def test_closing_a_killed_rank_ends_its_clean_ups_and_shows_them_no_error_of_its_own():
    """Else an ``except Exception`` takes the interpreter's complaint for a failure and starts a clean-up."""
    clock = AsyncioClock(rank_name="r")
    seen: list[str] = []

    async def inner() -> None:
        try:
            await clock.wait(clock.future(), None)
        finally:
            seen.append("inner")
            await clock.wait(clock.future(), None)

    async def outer() -> None:
        try:
            await inner()
        except Exception as error:
            seen.append(repr(error))
        finally:
            seen.append("outer")
            await clock.wait(clock.future(), None)

    async def killer() -> None:
        clock.kill()

    clock.run([clock.spawn(outer(), "outer"), clock.spawn(killer(), "killer")])
    assert seen == []
    clock.close()
    assert seen == ["inner", "outer"]
