"""The engine of a rollout: a pause comes between two tokens, and what is generated goes on with the new weights."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from weightsync.cli.rl.engine import TokenTurns
from weightsync.reference.errors import DeadlineExceeded

LIMIT_S = 60.0


def on_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def wait(event: threading.Event) -> Coroutine[Any, Any, None]:
    async def happened() -> None:
        assert await asyncio.to_thread(event.wait, LIMIT_S)

    return happened()


async def settled() -> None:
    """Whatever the loop can do without another thread is done."""
    for _ in range(10):
        await asyncio.sleep(0)


class HastyTurns(TokenTurns):
    """Wrong: does not wait for the turn that is being taken."""

    async def pause(self) -> None:
        self.generating = False


class DeafTurns(TokenTurns):
    """Wrong: takes turns while paused."""

    def begin(self) -> None:
        with self._state:
            self._reading = True


async def broken_promises(turns: TokenTurns) -> list[str]:
    """Hold a turn while the engine is paused; what an engine may not do and did."""
    found: list[str] = []
    entered, leave, again = threading.Event(), threading.Event(), threading.Event()

    def generate() -> None:
        turns.begin()
        entered.set()
        leave.wait(LIMIT_S)
        turns.end()
        turns.begin()
        if not turns.generating:
            found.append("a turn began while paused")
        again.set()
        turns.end()

    await turns.resume()
    thread = on_thread(generate)
    await wait(entered)
    pausing = asyncio.create_task(turns.pause())
    await settled()
    if pausing.done():
        found.append("pause returned within a turn")
    leave.set()
    await asyncio.wait_for(pausing, LIMIT_S)
    if isinstance(turns, DeafTurns):
        await wait(again)
    await turns.resume()
    await wait(again)
    await asyncio.to_thread(thread.join, LIMIT_S)
    return found


def test_a_pause_returns_between_turns_and_none_begins_until_the_resume() -> None:
    assert asyncio.run(broken_promises(TokenTurns())) == []


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(HastyTurns, "pause returned within a turn"), (DeafTurns, "a turn began while paused")],
)
def test_wrong_engines_are_seen(wrong: type[TokenTurns], words: str) -> None:
    assert asyncio.run(broken_promises(wrong())) == [words]


def test_nothing_is_read_while_paused_over_many_updates() -> None:
    cells, torn, stop, turns = [0, 0], [0], threading.Event(), TokenTurns()
    taken = threading.Semaphore(0)

    def generate() -> None:
        while not stop.is_set():
            turns.begin()
            torn[0] += cells[0] != cells[1]
            turns.end()
            taken.release()

    async def update() -> None:
        await turns.resume()
        thread = on_thread(generate)
        for version in range(1, 200):
            await turns.pause()
            cells[0] = version
            await asyncio.sleep(0)
            cells[1] = version
            await turns.resume()
            assert await asyncio.to_thread(taken.acquire, timeout=LIMIT_S)
        stop.set()
        await asyncio.to_thread(thread.join, LIMIT_S)

    asyncio.run(update())
    assert torn == [0]


def test_a_request_that_is_held_too_long_fails_and_leaves_the_engine_sound() -> None:
    turns = TokenTurns(held_s=0.0)
    with pytest.raises(DeadlineExceeded, match="the pause that a request waited 0 s to end"):
        turns.begin()

    async def go_on() -> None:
        await turns.pause()  # no turn is taken, or this would not return
        await turns.resume()
        turns.begin()
        turns.end()

    asyncio.run(asyncio.wait_for(go_on(), LIMIT_S))


@pytest.mark.parametrize("resumed", [False, True])
def test_a_cancelled_pause_leaves_the_engine_sound(resumed: bool) -> None:
    turns = TokenTurns()

    async def cancelled() -> asyncio.Task[None]:
        await turns.resume()
        turns.begin()
        pausing = asyncio.create_task(turns.pause())
        await settled()
        pausing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pausing
        if resumed:
            await turns.resume()
        again = asyncio.create_task(turns.pause())
        await settled()
        assert not again.done()
        await asyncio.to_thread(turns.end)
        await asyncio.wait_for(again, LIMIT_S)
        await turns.resume()
        turns.begin()
        turns.end()
        await asyncio.wait_for(turns.pause(), LIMIT_S)
        return again

    asyncio.run(cancelled())


def test_a_turn_ends_quietly_when_the_loop_that_waited_is_gone() -> None:
    turns = TokenTurns()

    async def give_up() -> None:
        await turns.resume()
        turns.begin()
        pausing = asyncio.create_task(turns.pause())
        await settled()
        assert not pausing.done()

    asyncio.run(give_up())  # cancels the pause and closes its loop
    turns.end()
    asyncio.run(asyncio.wait_for(turns.pause(), LIMIT_S))
