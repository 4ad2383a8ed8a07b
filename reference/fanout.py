"""Asking several peers at once, and cleaning up without hiding the reason for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from weightsync.reference.clock import Task
from weightsync.reference.errors import DeadlineExceeded, PeerLost, WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.rank import Verbs

T = TypeVar("T")


async def retry(tries: int, effect: Callable[[], Awaitable[T]]) -> T:
    """Result of a repeatable effect, tried up to ``tries`` times; a lost peer is not retried."""
    for _ in range(tries - 1):
        try:
            return await effect()
        except PeerLost:
            raise
        except Exception:
            continue
    return await effect()


class Fanout:
    """Calls in parallel over one rank's verbs.

    Args:
        verbs: the rank's verbs.
        tries: how often a repeatable verb is tried.
    """

    def __init__(self, verbs: Verbs, tries: int) -> None:
        self.verbs = verbs
        self.tries = tries

    async def retry(self, effect: Callable[[], Awaitable[T]]) -> T:
        """Result of a repeatable effect, or its last error."""
        return await retry(self.tries, effect)

    async def quietly(self, effect: Callable[[], Awaitable[Any]], tries: int | None = None) -> bool:
        """True when a clean-up worked within its tries; its failure must not hide the reason for it."""
        try:
            await retry(tries or self.tries, effect)
        except Exception:
            return False
        return True

    def ask(self, peer: RankId, op: str, body: Mapping[str, Any], deadline_ns: int) -> Task:
        """A running call to one peer."""
        return self.verbs.spawn(self.verbs.call(peer, op, body, deadline_ns), f"{op} {peer}")

    def ask_often(self, peer: RankId, op: str, body: Mapping[str, Any], deadline_ns: int) -> Task:
        """A running call that is repeated while it fails; the peer must treat a repetition as done."""
        effect = self.retry(lambda: self.verbs.call(peer, op, body, deadline_ns))
        return self.verbs.spawn(effect, f"{op} {peer}")

    @contextlib.asynccontextmanager
    async def ending(self, tasks: Sequence[Task]) -> AsyncIterator[None]:
        """However the block is left, by a cancel too, none of ``tasks`` outlives it."""
        try:
            yield
        finally:
            await self.stop_all(tasks)

    async def all_or_first_error(self, tasks: Sequence[Task], deadline_ns: int) -> list[Any]:
        """Every task's result; at the first failure the others are cancelled and it is raised."""
        async with self.ending(tasks):
            if tasks:
                await self.verbs.join(tasks, deadline_ns)
            return [task.result() for task in tasks]

    async def settle(self, tasks: Sequence[Task], deadline_ns: int) -> list[Any]:
        """Every task's result or the Exception that came instead, whatever becomes of the others."""
        try:
            for task in tasks:
                await self.quietly(partial(self._until_done, task, deadline_ns))
        finally:
            late = [task for task in tasks if not task.done()]
            await self.stop_all(late)
        return [_outcome(task, task in late) for task in tasks]

    async def stop_all(self, tasks: Sequence[Task]) -> None:
        """Stop every one of ``tasks``; a cancel that comes meanwhile is raised only when that is done."""
        cancelled: asyncio.CancelledError | None = None
        for task in tasks:
            try:
                await self.stop(task)
            except asyncio.CancelledError as error:
                cancelled = error
                await self.stop(task)
        if cancelled is not None:
            raise cancelled

    async def stop(self, task: Task | None) -> None:
        """Cancel a task that still runs and return once it ended; an error it ended with is dropped on purpose."""
        if task is None:
            return
        if not task.done():
            await self.quietly(lambda: self.verbs.cancel(task))
        if task.done():
            with contextlib.suppress(Exception, asyncio.CancelledError):
                task.result()

    async def _until_done(self, task: Task, deadline_ns: int) -> None:
        try:
            await self.verbs.join([task], deadline_ns)
        except Exception:
            if not task.done():
                raise


def _outcome(task: Task, late: bool) -> Any:
    try:
        return task.result()
    except Exception as error:
        return error
    except asyncio.CancelledError:
        return DeadlineExceeded("fan-out") if late else WeightSyncError(f"{task!r} was cancelled")
