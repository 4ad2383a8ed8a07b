"""The trainer facade: blocking pushes, inside and outside of running loops, and nothing left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.backends.facade import TrainerFacade
from weightsync.reference.errors import PeerLost, StaleVersion, WeightSyncError
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.protocol import Outcome
from weightsync.reference.trainer import Trainer
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors

STATES = [{"w": torch.tensor([1.0, 0.0, float("nan")])}, {"w": torch.tensor([1.0, -0.0, float("nan")])}]


def make(trainer: type[Trainer] = Trainer) -> tuple[InprocessRun, Callable[[], Any]]:
    """A run of one trainer rank and two rollouts, and what builds it on a loop."""
    run = InprocessRun(WholeTensors.of(STATES[0], rollouts=2), trainer=trainer)

    @asynccontextmanager
    async def build() -> AsyncIterator[Trainer]:
        async with run:
            run.closes_trainers = False
            yield run.lead

    return run, build


def push_all(run: InprocessRun, facade: TrainerFacade) -> list[Tensor]:
    """Push every state; what the second rollout held after each."""
    held = []
    for state in STATES:
        run.set(state)
        assert facade.push().committed
        target = run.targets[run.deployment.rollouts[1].leader]
        held.append(target.weights["w"].clone())
    return held


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Any:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) == before


def test_pushes_block_and_arrive() -> None:
    run, build = make()
    with TrainerFacade(build) as facade:
        held = push_all(run, facade)
    for state, found in zip(STATES, held, strict=True):
        assert same_bits(found, state["w"])
    assert run.violations == []


def test_it_works_inside_a_running_loop() -> None:
    async def actor() -> list[Tensor]:
        run, build = make()
        with pytest.raises(RuntimeError):
            asyncio.run(asyncio.sleep(0))  # what a facade without a loop of its own would do
        with TrainerFacade(build) as facade:
            return push_all(run, facade)

    with pytest.warns(RuntimeWarning, match="never awaited"):
        held = asyncio.run(actor())
    assert [same_bits(found, state["w"]) for state, found in zip(STATES, held, strict=True)] == [True, True]


@pytest.mark.parametrize("kind", ["plain", "awaitable"])
def test_build_may_return_the_trainer_or_an_awaitable_of_it(kind: str) -> None:
    run, _ = make()

    async def later() -> Trainer:
        return await opened()

    async def opened() -> Trainer:
        await run.__aenter__()
        return run.lead

    def plain() -> Trainer:
        opening = opened()
        with pytest.raises(StopIteration) as done:
            opening.send(None)
        found: Trainer = done.value.value
        return found

    with TrainerFacade(plain if kind == "plain" else later) as facade:
        push_all(run, facade)


def test_an_error_of_build_is_raised_where_the_facade_is_made() -> None:
    def build() -> Trainer:
        raise OSError("no store")

    with pytest.raises(OSError, match="no store"):
        TrainerFacade(build)


class Failing(Trainer):
    """Its second update fails with an error, its third is lost."""

    async def update(self) -> Outcome:
        if self.updates == 1:
            self.updates += 1
            raise PeerLost("rollout1.0", "commit")
        return await super().update()


def test_errors_reach_the_caller_and_the_next_push_works() -> None:
    run, build = make(Failing)
    with TrainerFacade(build) as facade:
        run.set(STATES[0])
        assert facade.push().committed
        with pytest.raises(PeerLost, match=r"rollout1\.0"):
            facade.push()
        assert facade.push().committed


def test_a_failed_update_is_an_outcome_with_its_reason() -> None:
    run, build = make()
    with TrainerFacade(build) as facade:
        run.set(STATES[0])
        run.plant("rollout1.0", "apply", error=OSError("bad shape"))
        outcome = facade.push()
        assert not outcome.committed
        assert "bad shape" in outcome.reason
        assert facade.push().committed


def test_a_closed_facade_refuses_and_closing_twice_is_fine() -> None:
    _, build = make()
    facade = TrainerFacade(build)
    facade.close()
    facade.close()
    with pytest.raises(WeightSyncError, match="closed facade"):
        facade.push()


class Slow(Trainer):
    """An update that waits until it is told."""

    entered: threading.Event
    go: asyncio.Event

    async def update(self) -> Outcome:
        self.entered.set()
        await self.go.wait()
        return await super().update()


def slow() -> tuple[InprocessRun, TrainerFacade, Slow]:
    run, build = make(Slow)
    facade = TrainerFacade(build)
    trainer = facade.trainer
    assert isinstance(trainer, Slow)
    trainer.entered, trainer.go = threading.Event(), asyncio.Event()
    return run, facade, trainer


def test_one_push_at_a_time() -> None:
    _, facade, trainer = slow()
    pushing = threading.Thread(target=facade.push)
    pushing.start()
    assert trainer.entered.wait(10)
    with pytest.raises(WeightSyncError, match="while another push runs"):
        facade.push()
    facade._loop.call_soon_threadsafe(trainer.go.set)
    pushing.join(10)
    assert facade.push().committed
    facade.close()


def test_closing_ends_a_push_that_runs_and_tells_its_caller() -> None:
    _, facade, trainer = slow()
    found: list[BaseException] = []

    def push() -> None:
        try:
            facade.push()
        except WeightSyncError as error:
            found.append(error)

    pushing = threading.Thread(target=push)
    pushing.start()
    assert trainer.entered.wait(10)
    facade.close()
    pushing.join(10)
    assert "closed while this push ran" in str(found[0])


def test_a_push_from_the_private_thread_is_refused() -> None:
    _, build = make()
    with TrainerFacade(build) as facade:

        async def inside() -> str:
            try:
                facade.push()
            except WeightSyncError as error:
                return str(error)
            return ""

        said = asyncio.run_coroutine_threadsafe(inside(), facade._loop).result(10)
        assert "wait for itself" in said


def test_an_error_of_the_body_is_not_hidden_by_closing() -> None:
    class Worse(Trainer):
        async def close(self) -> None:
            await super().close()
            raise OSError("close failed")

    _, build = make(Worse)
    with pytest.raises(ZeroDivisionError) as error:
        with TrainerFacade(build):
            raise ZeroDivisionError
    assert any("close failed" in note for note in error.value.__notes__)
    with pytest.raises(OSError, match="close failed"):
        with TrainerFacade(make(Worse)[1]):
            pass


def test_an_error_of_a_task_that_nobody_joined_is_raised_at_close() -> None:
    class Dropping(Trainer):
        async def update(self) -> Outcome:
            async def fail() -> None:
                raise OSError("dropped")

            self.verbs.spawn(fail(), "stray")
            return await super().update()

    run, build = make(Dropping)
    facade = TrainerFacade(build)
    run.set(STATES[0])
    assert facade.push().committed
    with pytest.raises(OSError, match="dropped"):
        facade.close()


def test_a_facade_closed_while_it_builds_ends() -> None:
    entered = threading.Event()

    @asynccontextmanager
    async def build() -> AsyncIterator[Trainer]:
        entered.set()
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    facades: list[TrainerFacade] = []

    class Noted(TrainerFacade):
        def __init__(self) -> None:
            facades.append(self)
            super().__init__(build)

    failed: list[BaseException] = []

    def construct() -> None:
        try:
            Noted()
        except BaseException as error:
            failed.append(error)

    building = threading.Thread(target=construct)
    building.start()
    assert entered.wait(10)
    facades[0].close()
    building.join(10)
    assert isinstance(failed[0], asyncio.CancelledError)


def test_an_audit_blocks_and_its_findings_are_healed_by_the_next_push() -> None:
    run, build = make()
    with TrainerFacade(build) as facade:
        with pytest.raises(StaleVersion, match="nothing is acknowledged"):
            facade.audit()
        run.set(STATES[0])
        assert facade.push().committed
        assert facade.audit().ok
        rank = run.deployment.rollouts[0].leader
        int_view(run.targets[rank].weights["w"])[0] ^= 1
        assert list(facade.audit().problems) == ["rollout 0"]
        assert 0 in facade.push().full
        assert facade.audit().ok
    with pytest.raises(WeightSyncError, match="closed facade"):
        facade.audit()
