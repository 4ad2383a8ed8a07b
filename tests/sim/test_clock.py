"""The same little programs on simulated time and on asyncio must leave the same log.

asyncio runs on a loop whose time is virtual, so its order of events is as exact as the simulated one. Times
in the logs are units since the start of the program.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import selectors
from asyncio import CancelledError
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.reference.errors import WeightSyncError
from weightsync.sim.clock import SimClock, SimWorld

UNIT = 1 << 30  # ns; far above the float error of asyncio's timers


class Deadlock(BaseException):
    pass


class VirtualSelector(selectors.DefaultSelector):
    """Lets time jump to the next timer; with no timer and nothing ready there is a deadlock."""

    ns = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock
        self.ns += math.ceil(timeout * 1e9)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.virtual = VirtualSelector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.ns / 1e9

    def now_ns(self) -> int:
        return self.virtual.ns


@dataclass
class Bench:
    """What a program gets: a clock, a log with times, and instants in units since the start."""

    clock: Any
    log: list[Any] = field(default_factory=list)
    tasks: list[Any] = field(default_factory=list)
    resolution: int = UNIT

    def at(self, units: float) -> int:
        return int(units * UNIT)

    def say(self, *what: Any) -> None:
        now = (self.clock.now_ns() + self.resolution // 2) // self.resolution
        self.log.append((now, *what))

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "child") -> Any:
        self.tasks.append(self.clock.spawn(coroutine, name))
        return self.tasks[-1]


Program = Callable[[Bench], Coroutine[Any, Any, Any]]


def on_sim(program: Program, resolution: int = UNIT) -> list[Any]:
    with SimWorld() as world:
        bench = Bench(SimClock(world, "rank"), resolution=resolution)
        bench.spawn(program(bench), "main")
        world.run()
        return finish(bench)


def on_asyncio(program: Program, resolution: int = UNIT) -> list[Any]:
    loop = VirtualLoop()
    bench = Bench(AsyncioClock(loop, now_ns=loop.now_ns), resolution=resolution)
    bench.spawn(program(bench), "main")
    with contextlib.suppress(Deadlock):
        loop.run_forever()
    try:
        return finish(bench)
    finally:
        bench.clock.close()
        loop.close()


def finish(bench: Bench) -> list[Any]:
    ended = [outcome(task) for task in bench.tasks]
    return [*bench.log, ("ended", *ended)]


def outcome(task: Any) -> Any:
    if not task.done():
        return "hung"
    try:
        return task.result()
    except CancelledError:
        return "cancelled"
    except Exception as error:
        return repr(error)


def check(program: Program, *expected: Any) -> None:
    assert on_sim(program) == list(expected)
    assert on_asyncio(program) == list(expected)


async def sleeper(bench: Bench, until: float, value: Any = None) -> Any:
    await bench.clock.sleep_until(bench.at(until))
    bench.say("slept", value)
    return value


async def failer(bench: Bench, until: float, text: str) -> None:
    await bench.clock.sleep_until(bench.at(until))
    raise ValueError(text)


# ---------------------------------------- futures and deadlines


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

    check(program, (1, 7), (2, "raised"), ("ended", None))


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

    check(program, (1, False), (1, "at once"), (3, "late"), (3, "late"), ("ended", None))


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
    check(program, *expected)


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

    check(program, (1, True, False), (2, "x"), ("ended", None, "cancelled"))


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

    check(program, (2, "no wait"), (2, "passed"), (4, "four"), (5, "five"), ("ended", None))


# ---------------------------------------- joining tasks


def test_join_waits_for_all_and_keeps_values():
    async def program(bench: Bench) -> None:
        tasks = [bench.spawn(sleeper(bench, units, units)) for units in (3, 1, 2)]
        await bench.clock.join(tasks, None)
        bench.say([task.result() for task in tasks])
        await bench.clock.join(tasks, bench.at(0))
        await bench.clock.join([], bench.at(0))

    check(
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

    check(program, (1, False, ()), (3, "slept", "slow"), ("ended", None, "slow", "ValueError('bad')"))


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

    check(
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
    check(program, (1, "told"), ("ended", None, "cancelled", text))


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
    check(program, (2, zero, "ValueError('lost')"), ("ended", None, *errors, "cancelled"))


# ---------------------------------------- cancelling


def guarded(bench: Bench, awaitable: Coroutine[Any, Any, Any], name: str) -> Coroutine[Any, Any, Any]:
    async def run() -> None:
        try:
            bench.say(name, await awaitable)
        except CancelledError:
            bench.say(name, "cancelled")
            raise
        finally:
            bench.say(name, "finally")

    return run()


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
    check(program, *expected, ("ended", None, None, *["cancelled"] * 5))


def test_a_task_that_is_just_being_woken_is_cancelled_and_its_value_is_lost():
    async def program(bench: Bench) -> None:
        clock = bench.clock
        future = clock.future()
        task = bench.spawn(guarded(bench, clock.wait(future, None), "woken"))
        await clock.sleep_until(bench.at(1))
        future.set_result("value")
        await clock.cancel(task)
        bench.say("back", future.done())

    check(
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

    check(program, (0, True), ("ended", None, "cancelled"))


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

    check(
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

    check(program, (1, "swallowed"), (4, "back"), ("ended", None, "ended in its own time"))


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
    check(program, (0, "swallowed"), (3, "a deadline further out still works"), with_hang)


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

    check(program, (1, "ended"), ("ended", None, "cancelled"))


def test_a_task_that_cancels_itself_is_thrown_out_of_that_wait():
    async def program(bench: Bench) -> None:
        try:
            await bench.clock.cancel(bench.tasks[0])
        except CancelledError:
            bench.say("thrown")
            raise

    check(program, (0, "thrown"), ("ended", "cancelled"))


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

    check(program, (2, "tidied"), (2, "back", ()), ("ended", None, repr(ValueError("while tidying"))))


# ---------------------------------------- killing


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


# ---------------------------------------- the run as a whole


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


def test_results_that_are_not_there_yet_say_what_to_do():
    async def program(bench: Bench) -> None:
        with pytest.raises(RuntimeError, match="join it first"):
            bench.tasks[0].result()
        with pytest.raises(RuntimeError, match="wait for it"):
            bench.clock.future().result()

    check(program, ("ended", None))


# ---------------------------------------- random programs

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
