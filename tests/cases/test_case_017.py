"""Fault case 017: the sender moves its baseline before the receivers' word, and loses what they missed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.buckets import unpack
from weightsync.reference.params import same_bits
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.trainer import Trainer
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors

STATES = [
    {"w": torch.tensor(values, dtype=torch.bfloat16)}
    for values in ([0.0] * 4, [1.0, 0, 0, 0], [1.0, 2, 0, 0])
]
WHOLE = WholeTensors.of(STATES[0], rollouts=2)
SHORT = ProtocolSettings(connect_ns=1_000_000_000, update_ns=1_000_000_000)
ROLLOUT_VERBS = [
    "receive",
    "decode",
    "validate",
    "pause",
    "apply",
    "digest",
    "compare_digests",
    "reply",
    "commit",
]
TRAINER_VERBS = ["snapshot", "diff", "digest", "exchange", "gather", "encode", "send", "call", "agree"]


def told(run: InprocessRun) -> set[int]:
    """Positions that the last update's buckets told."""
    found: set[int] = set()
    version = run.buckets[-1].header.heading.version
    for bucket in run.buckets:
        if bucket.header.heading.version == version and bucket.header.ranges:
            for one in unpack(bucket, run.deployment.tensors):
                shift = range(one.spec.count) if one.positions is None else one.positions.tolist()
                found |= {one.spec.base + int(position) for position in shift}
    return found


async def step(run: InprocessRun, state: dict[str, Tensor]) -> Outcome:
    run.set(state)
    return await run.push()


def held(run: InprocessRun) -> list[Tensor]:
    return [target.weights["w"] for target in run.targets.values()]


@pytest.mark.parametrize("receive", ["stage", "stream"])
def test_what_a_failed_apply_missed_is_sent_again(receive: Any) -> None:
    """Fault case 017: the second update fails, the third tells positions 0 and 1."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=ProtocolSettings(receive=receive)) as run:
            assert (await step(run, STATES[0])).committed
            run.plant("rollout1.0", "apply", error=OSError("io"))
            failed = await step(run, STATES[1])
            assert not failed.committed
            assert "OSError: io" in failed.reason
            assert [rollout.version for rollout in run.rollouts.values()] == [1, 1]
            healed = await step(run, STATES[2])
            assert healed.committed
            assert healed.full == ()
            assert {0, 1} <= told(run)
            assert all(same_bits(weights, STATES[2]["w"]) for weights in held(run))
            assert run.violations == []

    asyncio.run(story())


@pytest.mark.parametrize("late", [False, True], ids=["before its effect", "after its effect"])
@pytest.mark.parametrize(
    ("rank", "verb"),
    [("rollout1.0", verb) for verb in ROLLOUT_VERBS] + [("trainer.0", verb) for verb in TRAINER_VERBS],
)
def test_nothing_is_lost_whatever_fails(rank: str, verb: str, late: bool) -> None:
    """Fault case 017: a verb fails throughout the second update; the third brings everything everywhere."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=SHORT) as run:
            assert (await step(run, STATES[0])).committed
            fault = run.plant(rank, verb, times=2 if verb == "agree" else 99, late=late)
            failed = await step(run, STATES[1])
            assert fault.seen
            if failed.committed:
                assert all(same_bits(weights, STATES[1]["w"]) for weights in held(run))
            else:
                assert failed.reason
            fault.times = 0
            assert (await step(run, STATES[2])).committed
            assert all(same_bits(weights, STATES[2]["w"]) for weights in held(run))
            assert all(engine.on for engine in run.engines.values())
            assert run.violations == []

    asyncio.run(story())


class MovesItsBaselineFirst(Trainer):
    """The fault: whatever the receivers answer and report, what was sent last is the baseline."""

    sent: int | None = None

    async def start(self, job: Any, deadline_ns: int) -> None:
        await super().start(job, deadline_ns)
        self.sent = job.slot

    async def connect(self, deadline_ns: int) -> None:
        await super().connect(deadline_ns)
        if self.sent is not None:
            self.slots.acknowledge(self.sent)


def test_the_fault_itself_is_refused_by_the_receivers() -> None:
    """Fault case 017: a delta on a version that was never committed does not fit, and no bit is wrong."""

    async def story() -> None:
        async with InprocessRun(WHOLE, trainer=MovesItsBaselineFirst) as run:
            assert (await step(run, STATES[0])).committed
            run.plant("rollout1.0", "apply", error=OSError("io"))
            assert not (await step(run, STATES[1])).committed
            refused = await step(run, STATES[2])
            assert not refused.committed
            assert "a delta on version 2 does not fit" in refused.reason
            assert run.violations == []

    asyncio.run(story())
