"""Fault case 023: the trainer sits in a broadcast that a receiver has refused, and never hears why."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightsync.backends.facade import TrainerFacade
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.rank import Verbs
from weightsync.reference.trainer import Trainer
from weightsync.reference.transmit import transmit
from weightsync.sim.backend import SimVerbs
from weightsync.testing.faults import FaultRun, Report
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors
from weightsync.testing.tiny import SETTINGS

SECOND = 1_000_000_000
LIMIT = replace(
    SETTINGS, connect_ns=5 * SECOND, update_ns=5 * SECOND, lease_ns=20 * SECOND, patience_ns=100 * SECOND
)
READY = {"at once": 0, "after 3 s": 3 * SECOND, "never": None}


def unready(rank: str, verb: str, after_ns: int | None) -> Callable[[SimVerbs], None]:
    """Makes a verb of a rank fail in the first update: at once, late, or by never coming back."""

    def change(verbs: Verbs) -> None:
        if str(verbs.me) != rank:
            return
        good = getattr(verbs, verb)

        async def bad(*args: Any, **named: Any) -> Any:
            if verbs.update != 1:
                return await good(*args, **named)
            if after_ns is None:
                await verbs.clock.wait(verbs.clock.future(), None)
            await verbs.clock.sleep_until(verbs.now_ns() + (after_ns or 0))
            raise PatchMismatch("bad shape")

        setattr(verbs, verb, bad)

    return change


def first_update_ns(report: Report, rank: str = "trainer.0") -> int:
    """How long the first update took on one rank, in simulated time."""
    spans = [span for span in report.trace.spans if span.rank == rank and span.update == 1]
    return max(span.end_ns for span in spans) - min(span.start_ns for span in spans)


def broken(report: Report) -> list[str]:
    """Broken promises; that the first update did not commit is what was planted."""
    return [said for said in report.violations if not said.startswith("update 1, into which no fault fell")]


@pytest.mark.parametrize("receive", ["stage", "stream"])
@pytest.mark.parametrize("rank", ["rollout0.0", "rollout1.0", "rollout1.1"])
@pytest.mark.parametrize("verb", ["connect", "receive"])
@pytest.mark.parametrize("ready", READY)
def test_a_receiver_that_is_not_ready_ends_the_update_in_time_with_its_own_words(
    receive: Any, rank: str, verb: str, ready: str
) -> None:
    """Fault case 023: it refuses at once, late, or never joins; the next update works, on every rank."""
    settings = replace(LIMIT, receive=receive)
    report = FaultRun(updates=1, settings=settings, verbs=unready(rank, verb, READY[ready])).run()
    assert broken(report) == []
    for name, (failed, healed) in report.outcomes.items():
        assert not failed.committed
        assert healed.committed
        assert first_update_ns(report, name) < 5.1 * SECOND
        assert ("DeadlineExceeded" if ready == "never" else "bad shape") in failed.reason


@pytest.mark.parametrize("rank", ["rollout0.0", "rollout1.0", "rollout1.1"])
@pytest.mark.parametrize("verb", ["connect", "receive"])
@pytest.mark.parametrize("ready", ["at once", "after 3 s"])
def test_a_refusal_ends_the_update_of_every_rank_when_it_is_said(rank: str, verb: str, ready: str) -> None:
    """Fault case 023: neither a follower's refusal nor the other trainer ranks wait for the deadline."""
    after_ns = READY[ready] or 0
    report = FaultRun(updates=1, settings=LIMIT, verbs=unready(rank, verb, after_ns)).run()
    assert broken(report) == []
    for name, (failed, _) in report.outcomes.items():
        assert "bad shape" in failed.reason
        assert first_update_ns(report, name) < after_ns + SECOND


@pytest.mark.parametrize("verb", ["decode", "validate", "apply"])
@pytest.mark.parametrize("ready", ["at once", "after 3 s"])
def test_a_receiver_that_fails_later_on_is_heard_as_well(verb: str, ready: str) -> None:
    """Fault case 023: whatever the receiver cannot do, its words come."""
    report = FaultRun(updates=1, settings=LIMIT, verbs=unready("rollout1.0", verb, READY[ready])).run()
    assert broken(report) == []
    for failed, healed in report.outcomes.values():
        assert not failed.committed
        assert "bad shape" in failed.reason
        assert healed.committed


@pytest.mark.parametrize("verb", ["connect", "receive", "decode", "validate", "apply"])
def test_its_refusal_ends_the_update_and_no_timer_does(verb: str) -> None:
    """Fault case 023: with deadlines of a minute, a refusal at once is heard at once."""

    async def story() -> None:
        async with InprocessRun(WholeTensors.of({"w": torch.zeros(4)}, rollouts=2)) as run:
            run.set({"w": torch.ones(4)})
            run.plant("rollout1.0", verb, error=OSError("bad shape"))
            failed = await asyncio.wait_for(run.push(), 20)
            assert not failed.committed
            assert "bad shape" in failed.reason
            assert (await run.push()).committed
            assert run.violations == []

    asyncio.run(story())


class IgnoresReplies(Trainer):
    """The fault: nobody looks at the reply to ``prepare`` until the broadcast is over."""

    async def _transfer(self, job: Any, deadline_ns: int) -> None:
        await transmit(self, job, deadline_ns)


def test_the_fault_itself_never_hears_why() -> None:
    """Fault case 023: without watching the reply, a refusal at once costs the deadline, and its words are lost."""
    report = FaultRun(
        updates=1, settings=LIMIT, trainer=IgnoresReplies, verbs=unready("rollout0.0", "connect", 0)
    ).run()
    assert first_update_ns(report) >= 5 * SECOND
    assert "bad shape" not in report.outcomes["trainer.0"][0].reason


def test_no_thread_is_left_by_fifty_pushes_of_which_most_fail() -> None:
    """Fault case 023: worker threads do not grow, and after the last failure everything works."""
    run = InprocessRun(WholeTensors.of({"w": torch.zeros(4)}, rollouts=2))

    @asynccontextmanager
    async def build() -> AsyncIterator[Trainer]:
        async with run:
            run.closes_trainers = False
            yield run.lead

    with TrainerFacade(build) as facade:
        threads = threading.active_count()
        for number in range(50):
            run.set({"w": torch.full((4,), float(number))})
            if number % 3:
                run.plant("rollout1.0", ("", "receive", "apply")[number % 3], error=OSError("bad shape"))
            outcome = facade.push()
            assert outcome.committed == (number % 3 == 0)
            assert outcome.committed or "bad shape" in outcome.reason
            assert threading.active_count() == threads
        assert facade.push().committed
    assert threading.active_count() == threads - 1
    assert run.violations == []
