"""Fault case 018: after a failed update some receivers hold part of it, and nobody knows which."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.params import int_view, same_bits
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.receiver import Receiving
from weightsync.reference.rollout import Rollout
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors

NAMES = ("a", "b", "c")


def state(number: int) -> dict[str, Tensor]:
    return {name: torch.full((16,), float(number)) for name in NAMES}


WHOLE = WholeTensors.of(state(0), rollouts=2, bucket_bytes=192)  # one bucket per tensor
SETTINGS = {receive: ProtocolSettings(receive=receive) for receive in ("stage", "stream")}


def holds(run: InprocessRun, rollout: int, number: int) -> bool:
    weights = run.targets[WHOLE.rollouts[rollout].leader].weights
    return all(same_bits(weights[name], tensor) for name, tensor in state(number).items())


def leader(run: InprocessRun, rollout: int) -> Rollout:
    return run.rollouts[WHOLE.rollouts[rollout].leader]


@pytest.mark.parametrize("receive", SETTINGS)
@pytest.mark.parametrize("verb", ["receive", "decode", "validate", "apply"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_after_a_failed_delta_no_rollout_holds_a_part_of_it(receive: str, verb: str, nth: int) -> None:
    """Fault case 018: A gets three buckets, B fails at one; neither reports the version, both are healed."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=SETTINGS[receive]) as run:
            run.set(state(1))
            assert (await run.push()).committed
            sent = len(run.buckets)
            run.set(state(2))
            run.plant("rollout1.0", verb, nth=nth)
            assert not (await run.push()).committed
            assert [leader(run, 0).version, leader(run, 1).version] == [1, 1]
            run.set(state(3))
            healed = await run.push()
            assert healed.committed
            assert healed.full == ()  # a delta is undone exactly, so nobody needs a full update
            assert len(run.buckets) - sent >= 4
            assert holds(run, 0, 3)
            assert holds(run, 1, 3)
            assert run.violations == []

    asyncio.run(story())


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_part_of_a_full_update_makes_dirty_and_only_the_dirty_get_it_again(nth: int) -> None:
    """Fault case 018: what cannot be undone refuses to generate until a full update is committed."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=SETTINGS["stream"]) as run:
            run.set(state(1))
            run.plant("rollout1.0", "apply", nth=nth)
            failed = await run.push()
            assert not failed.committed
            assert "OSError" in failed.reason
            for rollout in (0, 1):
                assert leader(run, rollout).version == 0
                assert "full update 1" in (leader(run, rollout).dirty or "")
                assert not run.engines[rollout].on
            run.set(state(2))
            healed = await run.push()
            assert healed.committed
            assert healed.full == (0, 1)
            assert holds(run, 0, 2)
            assert holds(run, 1, 2)
            assert run.violations == []

    asyncio.run(story())


def test_one_damaged_rollout_gets_a_full_update_beside_the_others_delta() -> None:
    """Fault case 018: a digest that does not agree makes dirty; the next update heals it, and only it."""

    async def story() -> None:
        async with InprocessRun(WHOLE, settings=ProtocolSettings(verify_every=1)) as run:
            run.set(state(1))
            assert (await run.push()).committed
            int_view(run.targets[WHOLE.rollouts[1].leader].weights["c"])[3] ^= 1
            changed = {**state(1), "a": state(2)["a"]}
            run.set(changed)
            failed = await run.push()
            assert not failed.committed
            assert "digest" in failed.reason
            assert not run.engines[1].on
            assert leader(run, 1).dirty is not None
            run.violations.clear()  # what was damaged behind the protocol's back generated until it was found
            run.set(state(3))
            healed = await run.push()
            assert healed.committed
            assert (healed.members, healed.full) == ((1, 0), (1,))
            assert holds(run, 0, 3)
            assert holds(run, 1, 3)
            assert all(engine.on for engine in run.engines.values())
            assert run.violations == []

    asyncio.run(story())


class KeepsItsParts(Rollout):
    """The fault: an update that failed is neither rolled back nor called dirty."""

    async def roll_back(self, update: Receiving) -> bool:
        return True


@pytest.mark.parametrize("receive", SETTINGS)
def test_the_fault_itself_is_seen(receive: str) -> None:
    """Fault case 018: without the rollback a rollout generates under a label that does not tell its bits."""

    async def story() -> Any:
        async with InprocessRun(WHOLE, settings=SETTINGS[receive], rollout=KeepsItsParts) as run:
            run.set(state(1))
            await run.push()
            run.set(state(2))
            run.plant("rollout1.0", "apply", nth=2)
            await run.push()
            await run.push()
            return run.violations

    assert any("generates under label 1" in said for said in asyncio.run(story()))
