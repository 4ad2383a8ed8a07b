"""The trainer's way in for synchronous code: a facade that blocks, with a loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import Self

from weightsync.reference.audit import AuditReport
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.metrics import OnUpdate, UpdateMetrics, deliver
from weightsync.reference.protocol import Outcome
from weightsync.reference.status import TrainerStatus
from weightsync.reference.trainer import Trainer

Built = Trainer | Awaitable[Trainer] | AbstractAsyncContextManager[Trainer]
"""What ``build`` may return: the trainer, an awaitable of it, or an async context manager around it."""


class TrainerFacade:
    """One trainer rank whose ``push`` is a plain call, also within a running loop, where asyncio.run raises.

    Every trainer rank makes one and calls ``push`` in step order. The thread that pushes waits, so a loop
    that runs in it stands still until the update is over. The private thread inherits neither the current
    device nor the current stream of the caller: set them in ``build``, and let the optimizer's writes to the
    parameters be finished before ``push``.

    Args:
        build: called once on the private loop, so that clocks bind to it. What it opens as a context manager
            is closed there after the trainer, whose bye lets rollouts on the same loop end by themselves.
            Its error is raised here.
        name: of the thread.
        on_update: told of every update, failed or not, on the thread that pushes, before ``push`` returns; so it
            may take its time and use what belongs to that thread. What it raises is raised by ``push``: the update
            stays what it was, and ``trainer.last`` has its outcome.

    Attributes:
        trainer: what was built; it belongs to the private loop.
    """

    def __init__(
        self,
        build: Callable[[], Built],
        *,
        name: str = "weightsync-trainer",
        on_update: OnUpdate | None = None,
    ) -> None:
        self._build = build
        self._on_update = on_update
        self._told: list[UpdateMetrics] = []
        self._turn = threading.Lock()
        self._closed = False
        self._push: concurrent.futures.Future[Outcome] | None = None
        self._ready: concurrent.futures.Future[Trainer] = concurrent.futures.Future()
        self._ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._pushing = asyncio.Lock()
        self._building: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        try:
            self.trainer = self._ready.result()
        except BaseException:
            self.close()
            raise

    def push(self) -> Outcome:
        """Push the live parameters to every rollout; the outcome on which all trainer ranks agreed.

        The parameters may be mutated once this returns. An update that failed is an Outcome that says why,
        and the next push heals it. A push whose wait was interrupted goes on until ``close``.

        Raises:
            PeerLost: a trainer rank is lost, or a rollout under ``on_rollout_loss = "fail"``.
            WeightSyncError: closed, or called from the private thread, or while another push runs.
        """
        self._refuse_own_thread("push")
        with self._turn:
            if self._closed:
                raise WeightSyncError("push() was called on a closed facade, expected an open one; make one")
            if self._push is not None and not self._push.done():
                raise WeightSyncError(
                    "push() was called while another push runs, expected one at a time; wait for that one"
                )
            running = self._push = asyncio.run_coroutine_threadsafe(self._update(), self._loop)
        try:
            outcome = running.result()
        except concurrent.futures.CancelledError:
            raise WeightSyncError(
                "the facade was closed while this push ran; the update has no outcome, and no rollout "
                "generates from a part of it"
            ) from None
        except Exception as error:
            self._tell(error)
            raise
        self._tell()
        return outcome

    def status(self, timeout_s: float = 10.0) -> TrainerStatus:
        """What every rollout rank says of itself, and what the lead knows of them; call it on the lead.

        Any thread may ask, also while another one pushes; the push neither waits nor changes. A rank that does not
        answer within ``timeout_s`` is in it, with why.

        Raises:
            WeightSyncError: closed, or called from the private thread.
        """
        self._refuse_own_thread("status")
        with self._turn:
            if self._closed:
                raise WeightSyncError(
                    "status() was called on a closed facade, expected an open one; make one"
                )
            asking = asyncio.run_coroutine_threadsafe(self._ask(int(timeout_s * 1e9)), self._loop)
        try:
            return asking.result()
        except concurrent.futures.CancelledError:
            raise WeightSyncError("the facade was closed while status() waited for the rollouts") from None

    def audit(self, timeout_s: float = 600.0) -> AuditReport:
        """Count every element of every member anew; every trainer rank calls it, between two pushes.

        See ``Trainer.audit``: whoever is not what was pushed gets a full update next.

        Raises:
            StaleVersion: nothing is acknowledged yet, or since the last push failed.
            WeightSyncError: as ``push``, or it was not over within ``timeout_s``.
        """
        self._refuse_own_thread("audit")
        with self._turn:
            if self._closed:
                raise WeightSyncError("audit() was called on a closed facade, expected an open one; make one")
            if self._push is not None and not self._push.done():
                raise WeightSyncError("audit() was called while a push runs, expected it over; wait for it")
            running = asyncio.run_coroutine_threadsafe(self._audit(int(timeout_s * 1e9)), self._loop)
        try:
            return running.result()
        except concurrent.futures.CancelledError:
            raise WeightSyncError("the facade was closed while audit() ran") from None

    def close(self) -> None:
        """End a push that still runs, release the rollouts, end the thread. Repeatable.

        Raises:
            Exception: the first error of the private loop that no push raised.
        """
        self._refuse_own_thread("close")
        with self._turn:
            first, self._closed = not self._closed, True
        if first:
            with contextlib.suppress(RuntimeError):  # its loop has ended already
                self._loop.call_soon_threadsafe(self._halt)
        self._thread.join()
        if first and self._ready.exception() is None:
            self._ended.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as own:
            if error is None:
                raise
            error.add_note(f"closing the facade failed as well: {own!r}")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            (self._ended if self._ready.done() else self._ready).set_exception(error)
        else:
            self._ended.set_result(None)
            if not self._ready.done():
                self._ready.set_exception(WeightSyncError("the facade was closed before it was built"))

    async def _main(self) -> None:
        self._building = asyncio.current_task()
        if self._stop.is_set():
            return
        async with _opened(self._build()) as trainer:
            if self._on_update is not None:
                self._listen(trainer)
            self._ready.set_result(trainer)
            await self._stop.wait()
            if self._push is not None:
                self._push.cancel()
            async with self._pushing:
                await trainer.close()
        for error in trainer.verbs.clock.unjoined():
            raise error

    async def _update(self) -> Outcome:
        async with self._pushing:
            return await self.trainer.update()

    async def _audit(self, timeout_ns: int) -> AuditReport:
        async with self._pushing:
            return await self.trainer.audit(self.trainer.verbs.now_ns() + timeout_ns)

    async def _ask(self, timeout_ns: int) -> TrainerStatus:
        return await self.trainer.status(self.trainer.verbs.now_ns() + timeout_ns)

    def _refuse_own_thread(self, call: str) -> None:
        if threading.current_thread() is self._thread:
            raise WeightSyncError(
                f"{call}() was called on the private thread {self._thread.name!r}, expected another one; "
                "it would wait for itself"
            )

    def _listen(self, trainer: Trainer) -> None:
        if trainer.on_update is not None:
            raise WeightSyncError(
                "the trainer that was built has an on_update already, and the facade was given another, expected "
                "one; leave one out"
            )
        trainer.on_update = self._told.append

    def _tell(self, error: Exception | None = None) -> None:
        told, self._told[:] = list(self._told), []
        for metrics in told:
            if self._on_update is not None:
                deliver(self._on_update, metrics, error)

    def _halt(self) -> None:
        self._stop.set()
        if self._building is not None and not self._ready.done():
            self._building.cancel()


@asynccontextmanager
async def _opened(built: Built) -> AsyncIterator[Trainer]:
    if isinstance(built, AbstractAsyncContextManager):
        async with built as trainer:
            yield trainer
    else:
        yield await built if inspect.isawaitable(built) else built
