"""Watching through the facade: metrics on the thread that pushes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from weightsync.backends.facade import TrainerFacade
from weightsync.reference.errors import PeerLost, WeightSyncError
from weightsync.reference.metrics import UpdateMetrics
from weightsync.reference.protocol import Outcome
from weightsync.reference.status import RankStatus
from weightsync.reference.trainer import Trainer
from weightsync.reference.transmit import Job
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors

STATE = {"w": torch.tensor([1.0, -0.0, float("nan")])}


def make(trainer: type[Trainer] = Trainer) -> tuple[InprocessRun, Callable[[], Any]]:
    """A run of one trainer rank and two rollouts, and what builds it on a loop."""
    run = InprocessRun(WholeTensors.of(STATE, rollouts=2), trainer=trainer)

    @asynccontextmanager
    async def build() -> AsyncIterator[Trainer]:
        async with run:
            run.closes_trainers = False
            yield run.lead

    return run, build


def test_metrics_come_on_the_thread_that_pushes_before_push_returns() -> None:
    run, build = make()
    told: list[tuple[threading.Thread, UpdateMetrics]] = []
    with TrainerFacade(build, on_update=lambda m: told.append((threading.current_thread(), m))) as facade:
        run.set(STATE)
        first = facade.push()
        assert [(thread, m.version) for thread, m in told] == [(threading.current_thread(), first.version)]
        run.plant("rollout1.0", "apply", error=OSError("bad shape"), times=9)
        run.set({"w": torch.tensor([2.0, 0.0, 0.0])})
        assert not facade.push().committed
        assert len(told) == 2
        assert "bad shape" in told[1][1].reason


def test_what_the_callback_raises_is_raised_by_push_and_the_update_stays() -> None:
    run, build = make()

    def fail(metrics: UpdateMetrics) -> None:
        raise OSError("dashboard is down")

    with TrainerFacade(build, on_update=fail) as facade:
        run.set(STATE)
        with pytest.raises(OSError, match="dashboard is down"):
            facade.push()
        assert facade.trainer.last is not None
        assert facade.trainer.last.committed
        assert all(half.version == 1 for half in run.rollouts.values())


def test_an_update_that_ends_with_an_error_is_told_and_the_error_comes_first() -> None:
    class Lost(Trainer):
        async def connect(self, deadline_ns: int) -> None:
            raise PeerLost("rollout1.0", "connect")

    told: list[str] = []

    def note(metrics: UpdateMetrics) -> None:
        told.append(metrics.reason)
        raise OSError("dashboard is down")

    _, build = make(Lost)
    with TrainerFacade(build, on_update=note) as facade:
        with pytest.raises(PeerLost) as lost:
            facade.push()
    assert any("dashboard is down" in text for text in lost.value.__notes__)
    assert len(told) == 1


def test_two_callbacks_are_refused() -> None:
    class Told(Trainer):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.on_update = print

        async def update(self) -> Outcome:
            raise AssertionError

    with pytest.raises(WeightSyncError, match="leave one out"):
        TrainerFacade(make(Told)[1], on_update=print)


def test_status_is_a_plain_call_between_pushes() -> None:
    run, build = make()
    with TrainerFacade(build) as facade:
        assert not facade.status().clean
        run.set(STATE)
        facade.push()
        status = facade.status()
        assert status.clean
        assert (status.version, status.update) == (1, 1)
    with pytest.raises(WeightSyncError, match="closed facade"):
        facade.status()


def test_status_is_answered_while_another_thread_pushes() -> None:
    class Slow(Trainer):
        entered, go = threading.Event(), asyncio.Event()

        async def commit(self, job: Job, deadline_ns: int) -> None:
            self.entered.set()
            await self.go.wait()
            await super().commit(job, deadline_ns)

    run, build = make(Slow)
    with TrainerFacade(build) as facade:
        run.set(STATE)
        pushing = threading.Thread(target=facade.push)
        pushing.start()
        assert Slow.entered.wait(10)
        ranks = [said for rollout in facade.status().rollouts for said in rollout.ranks.values()]
        assert all(isinstance(said, RankStatus) and said.prepared for said in ranks)
        facade._loop.call_soon_threadsafe(Slow.go.set)
        pushing.join(10)
        assert facade.status().clean


def test_status_from_the_private_thread_is_refused() -> None:
    _, build = make()
    facade = TrainerFacade(build)

    async def inside() -> str:
        with pytest.raises(WeightSyncError) as refused:
            facade.status()
        return str(refused.value)

    assert "wait for itself" in asyncio.run_coroutine_threadsafe(inside(), facade._loop).result(10)
    facade.close()
