"""Fault case 019: generation resumes before the commit, so new weights run under the old label."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from weightsync.reference.control import Request
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.rollout import Rollout
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors
from weightsync.testing.plain_calls import random_checkpoint
from weightsync.testing.tiny import tiny_deployment

STATES = [{"w": torch.tensor([7.0, 7.0])}, {"w": torch.tensor([7.0, 8.0])}, {"w": torch.tensor([9.0, 8.0])}]
WHOLE = WholeTensors.of(STATES[0])
SHORT = ProtocolSettings(connect_ns=1_000_000_000, update_ns=1_000_000_000)
LEADER = WHOLE.rollouts[0].leader


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
@pytest.mark.parametrize("times", [1, 3, 9, 99])
@pytest.mark.parametrize(
    ("rank", "verb"),
    [("rollout0.0", "commit"), ("rollout0.0", "resume"), ("rollout0.0", "reply"), ("trainer.0", "call")],
)
def test_no_request_runs_under_a_label_that_is_not_its_weights(
    rank: str, verb: str, times: int, late: bool
) -> None:
    """Fault case 019: commits, their replies and resumes fail once or for good; then everything heals."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=SHORT) as run:
            run.set(STATES[0])
            assert (await run.push()).committed
            run.set(STATES[1])
            nth = {"reply": 3, "call": 3}.get(verb, 1)  # start, prepare, then commit
            fault = run.plant(rank, verb, nth=nth, times=times, late=late)
            outcome = await run.push()
            if outcome.committed:
                assert run.rollouts[LEADER].version == 2
            fault.times = 0
            run.set(STATES[2])
            healed = await run.push()
            assert healed.committed
            assert run.rollouts[LEADER].version == healed.version
            assert run.differences(LEADER) == []
            assert run.engines[0].on
            assert run.violations == []

    asyncio.run(story())


def test_a_commit_whose_reply_was_lost_is_repeated_as_a_no_op() -> None:
    """Fault case 019: both sides say the new version after the retry, and the weights were kept once."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=SHORT) as run:
            run.set(STATES[0])
            assert (await run.push()).committed
            run.set(STATES[1])
            run.plant("trainer.0", "call", nth=3, times=2, late=True)
            before = run.rollouts[LEADER].verbs.trace.verbs(str(LEADER))
            assert (await run.push()).committed
            verbs = run.rollouts[LEADER].verbs.trace.verbs(str(LEADER)) - before
            assert verbs["reply"] == 5  # start, prepare, and three times commit
            assert verbs["commit"] == 1
            assert verbs["resume"] == 1
            assert (
                run.rollouts[LEADER].version,
                run.lead.slots.version(run.lead.slots.acknowledged or 0),
            ) == (2, 2)
            assert run.violations == []

    asyncio.run(story())


def test_commit_ends_on_every_rank_before_generation_resumes() -> None:
    """Fault case 019: the order of the spans, on a rollout of two ranks."""

    async def story() -> None:
        deployment = tiny_deployment()
        async with InprocessRun(deployment) as run:
            for number in range(3):
                run.set(random_checkpoint(deployment, number))
                assert (await run.push()).committed
            spans = [s for r in deployment.rollouts[1].ranks for s in run.rollouts[r].verbs.trace.spans]
            for update in (1, 2, 3):
                commits = [s.end_ns for s in spans if s.verb == "commit" and s.update == update]
                (resumed,) = [s.start_ns for s in spans if s.verb == "resume" and s.update == update]
                applied = [s.end_ns for s in spans if s.verb == "apply" and s.update == update]
                assert len(commits) == 2
                assert max(applied) <= min(commits)
                assert max(commits) <= resumed
            assert run.violations == []

    asyncio.run(story())


class ResumesFirst(Rollout):
    """The fault: transfer, resume, commit."""

    async def commit(self, request: Request) -> Mapping[str, Any]:
        if self.update is not None and self.leader:
            await self.resume()
        return await super().commit(request)


def test_the_fault_itself_is_seen() -> None:
    """Fault case 019: with the order of the fault, weights run under the old label."""

    async def story() -> list[str]:
        async with InprocessRun(WHOLE, settings=SHORT, rollout=ResumesFirst) as run:
            for state in STATES[:2]:
                run.set(state)
                await run.push()
            return run.violations

    assert any("generates under label 1" in said for said in asyncio.run(story()))
