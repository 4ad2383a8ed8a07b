"""A simulated world as a whole: how a run ends, what is left of it, and how it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from typing import Any

import pytest

from weightsync.sim.clock import SimClock, SimWorld


def test_a_run_names_the_tasks_that_hang_and_stops_at_the_last_event():
    with SimWorld() as world:
        clock = SimClock(world, "rank")
        stuck = clock.spawn(clock.wait(clock.future(), None), "stuck")
        fine = clock.spawn(clock.sleep_until(7), "fine")
        assert world.run([fine, stuck]) == (stuck,)
        assert world.now_ns() == 7


def test_stale_deadlines_neither_move_the_clock_nor_fill_the_queue():
    with SimWorld() as world:
        clock = SimClock(world, "rank")

        async def program() -> None:
            for step in range(5_000):
                future = clock.future()
                clock.call_at(step, lambda future=future: future.set_result(None))
                await clock.wait(future, 10**15)

        task = clock.spawn(program(), "main")
        assert world.run() == ()
        assert (task.done(), world.now_ns()) == (True, 4_999)
        assert len(world.env._queue) == 0
        clock.spawn(program(), "again")
        world.run(limit_ns=4_999)
        assert world.now_ns() == 4_999


def test_the_queue_is_rebuilt_when_most_of_it_is_stale():
    with SimWorld() as world:
        clock = SimClock(world, "rank")
        longest = 0

        async def program() -> None:
            nonlocal longest
            for _ in range(10_000):
                future = clock.future()
                world.call_soon(future.set_result, None)
                await clock.wait(future, 10**15)
                longest = max(longest, len(world.env._queue))

        world.run([clock.spawn(program(), "main")])
        assert longest < 2_100


def test_a_run_stops_as_soon_as_its_tasks_are_done_or_at_its_limit():
    with SimWorld() as world:
        clock = SimClock(world, "rank")

        async def for_ever() -> None:
            while True:
                await clock.sleep_until(clock.now_ns() + 10)

        beat = clock.spawn(for_ever(), "heartbeat")
        task = clock.spawn(clock.sleep_until(35), "main")
        assert world.run([task]) == ()
        assert world.now_ns() == 35
        assert world.run([beat], limit_ns=100) == (beat,)
        assert world.now_ns() == 100


def test_plain_simpy_models_share_the_queue():
    with SimWorld() as world:
        clock = SimClock(world, "rank")
        future = clock.future()

        def model():
            yield world.env.timeout(30)
            future.set_result(world.env.now)

        world.env.process(model())
        task = clock.spawn(clock.wait(future, 100), "main")
        world.env.run()
        assert (task.result(), world.now_ns()) == (30, 30)


def test_simulated_time_is_integer_and_foreign_awaitables_are_refused_by_name():
    with SimWorld() as world:
        clock = SimClock(world, "rank")
        with pytest.raises(TypeError):
            clock.call_at(1.5, lambda: None)  # type: ignore[arg-type]

        class Foreign:
            def __await__(self):
                yield self

            def __repr__(self):
                return "a torch work"

        async def program() -> None:
            await asyncio.sleep(0)
            await Foreign()

        task = clock.spawn(program(), "main")
        world.run()
        with pytest.raises(RuntimeError, match="task 'main' awaited a torch work, which does not belong"):
            task.result()


def test_a_killed_rank_leaves_the_others_alone_and_does_not_hold_up_the_run():
    with SimWorld() as world:
        dead, alive = SimClock(world, "rollout1.0"), SimClock(world, "trainer.0")
        log: list[Any] = []

        async def victim() -> None:
            try:
                await dead.sleep_until(10_000)
            finally:
                log.append("finally")

        async def survivor() -> None:
            await alive.sleep_until(5)
            dead.kill()
            await alive.sleep_until(50)
            log.append("survived")

        tasks = [dead.spawn(victim(), "victim"), alive.spawn(survivor(), "survivor")]
        assert world.run(tasks) == ()
        gc.collect()
        assert (log, world.now_ns()) == (["survived"], 50)
        assert world.run() == ()
        assert world.now_ns() == 50


def test_closing_a_world_ends_frozen_and_hung_tasks_without_noise(recwarn):
    def leave_garbage() -> None:
        world = SimWorld()
        clock = SimClock(world, "rank")

        async def child() -> None:
            await clock.sleep_until(1)

        async def stubborn() -> None:
            while True:
                try:
                    await clock.wait(clock.future(), None)
                except BaseException:
                    await clock.join([], None)

        async def tidy() -> None:
            try:
                await clock.wait(clock.future(), None)
            finally:
                await clock.cancel(clock.spawn(child(), "child of a finally"))

        for coroutine in (stubborn(), tidy()):
            clock.spawn(coroutine, "kept")
        world.run()
        clock.spawn(tidy(), "never started")
        clock.kill()
        clock.spawn(child(), "spawned when dead")
        world.close()
        world.close()

    leave_garbage()
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_closing_a_world_returns_although_a_task_swallows_everything():
    def leave_garbage() -> None:
        world = SimWorld()
        clock = SimClock(world, "rank")

        async def swallow() -> None:
            while True:
                with contextlib.suppress(BaseException):
                    await clock.wait(clock.future(), None)

        clock.spawn(swallow(), "swallow")
        world.run()
        world.close()

    leave_garbage()
    gc.collect()  # here, where the warning about such a task is expected
