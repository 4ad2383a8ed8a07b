"""A rollout that was lost comes back: as new processes that hold nothing, or as slow ones that hold what they held."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightsync.backends.inprocess import InprocessWorld
from weightsync.reference.control import Request
from weightsync.reference.errors import PeerLost, StaleVersion
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view
from weightsync.reference.protocol import Outcome
from weightsync.reference.rollout import Rollout
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import Fault, Restart, returning
from weightsync.testing.faults import FaultRun
from weightsync.testing.fuzz import Case, awaits, violations
from weightsync.testing.inprocess_run import Generating, InprocessRun, WholeTensors
from weightsync.testing.tiny import SETTINGS, tiny_deployment, tiny_shards
from weightsync.testing.wrong_protocols import LostForEver, NewTakenForOld

LEASE = replace(SETTINGS, connect_ns=10**9, update_ns=10**9, lease_ns=10**10, patience_ns=10**11)
OLD, NEW, LAST = (
    {"w": torch.tensor(values)} for values in ([0.0] * 6, [0.0, -0.0, 0, 1, 0, 0], [3.0, -0.0, 0, 1, 0, 0])
)
LOST = RankId("rollout", 1, 0)


class Losing(InprocessRun):
    """A run whose second rollout can be lost, be found again, and be started again."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(WholeTensors.of(OLD, rollouts=2), settings=LEASE, **kwargs)

    async def __aenter__(self) -> Losing:
        await super().__aenter__()
        control: Any = self.lead.verbs.control
        self.world: InprocessWorld = control.transport
        return self

    def lose(self) -> None:
        """Its lease ends for everybody else."""
        for name, control in self.world.controls.items():
            if name != str(LOST):
                control.lost(str(LOST))
        self.world.meetings.lost(LOST)

    def find(self) -> None:
        """Its lease is held again."""
        for name, control in self.world.controls.items():
            if name != str(LOST):
                control.found(str(LOST))

    def kill(self) -> None:
        """Its process ends."""
        clock: Any = self.rollouts[LOST].verbs.clock
        clock.kill()
        self.engines[1].on = False
        self.lose()

    def start_again(self) -> None:
        """Another process in its place, which holds nothing."""
        ref = self.deployment.rollouts[1]
        self.engines[1] = Generating()
        self.targets[LOST] = Target(
            self.deployment.tensors, self.deployment.rollout_maps(LOST), self.deployment.blank(LOST), {}
        )
        verbs = self.world.verbs(LOST, self.targets[LOST], engine=self.engines[1])
        self.rollouts[LOST] = Rollout(
            verbs, self.deployment.plan.fingerprint, ref.ranks, self.deployment.trainers[0], LEASE
        )
        dead = self._served.pop()
        dead.cancel()
        self._served.append(asyncio.create_task(self.rollouts[LOST].run()))

    async def step(self, weights: Any) -> Outcome:
        """Push these weights; every rollout that generates then holds what its label says."""
        self.set(weights)
        outcome = await self.push()
        self.look()
        assert self.violations == []
        return outcome


def test_a_rollout_that_was_started_again_gets_a_full_update_while_the_other_gets_a_delta() -> None:
    async def story() -> list[Outcome]:
        async with Losing() as run:
            outcomes = [await run.step(OLD)]
            run.kill()
            outcomes.append(await run.step(NEW))
            run.start_again()
            run.find()
            outcomes.append(await run.step(LAST))
            assert (run.rollouts[LOST].version, run.differences(LOST)) == (3, [])
            assert run.engines[1].on
            return outcomes

    first, without, back = asyncio.run(story())
    assert (first.members, first.full, first.gone) == ((0, 1), (0, 1), ())
    assert (without.members, without.full, without.gone, without.rejoined) == ((0,), (), (1,), ())
    assert sorted(back.members) == [0, 1]
    assert (back.full, back.gone, back.rejoined, back.changed) == ((1,), (), (1,), 1)


def test_a_rollout_that_was_slow_gets_a_delta_on_what_it_holds() -> None:
    async def story() -> list[Outcome]:
        async with Losing() as run:
            outcomes = [await run.step(OLD)]
            run.lose()
            run.find()
            outcomes.append(await run.step(NEW))
            return outcomes

    first, back = asyncio.run(story())
    assert (back.members, back.full, back.rejoined, back.changed) == ((0, 1), (), (1,), 2)
    assert back.version == first.version + 1 if first.version else False


def test_a_slow_rollout_that_missed_two_versions_gets_a_full_update() -> None:
    """The trainer keeps two snapshots; what it holds is in neither of them any more."""

    async def story() -> list[Outcome]:
        async with Losing() as run:
            outcomes = [await run.step(OLD)]
            run.lose()
            outcomes += [await run.step(NEW), await run.step(LAST)]
            run.find()
            outcomes.append(await run.step(OLD))
            return outcomes

    *_, back = asyncio.run(story())
    assert (sorted(back.members), back.full, back.rejoined) == ([0, 1], (1,), (1,))


def test_a_new_process_learns_which_numbers_were_tried() -> None:
    async def story() -> None:
        async with Losing() as run:
            for weights in (OLD, NEW, LAST):
                await run.step(weights)
            run.kill()
            await run.step(OLD)
            run.start_again()
            assert run.rollouts[LOST].highest == 0
            run.find()
            back = await run.step(NEW)
            assert (back.version, run.rollouts[LOST].highest) == (5, 5)
            stale = {"epoch": run.lead.epoch, "version": 4, "base": 0, "kind": "full", "group": "data-1",
                     "members": ["trainer.0", "rollout1.0"], "update": 4}  # fmt: skip
            with pytest.raises(StaleVersion, match="version 4 was tried before"):
                await run.rollouts[LOST].start(Request("trainer.0", "start", stale, 1, None))

    asyncio.run(story())


def test_orders_for_the_process_before_are_refused_by_the_next_one_which_then_joins() -> None:
    """The mailbox may hand them on; every one names an epoch or a version that the new process is not in."""

    async def story() -> Outcome:
        async with Losing() as run:
            await run.step(OLD)
            epoch = run.lead.epoch
            run.kill()
            run.start_again()
            start = {"epoch": epoch, "version": 2, "base": 1, "kind": "delta", "group": f"data-0-1/{epoch}",
                     "members": ["trainer.0", "rollout0.0", "rollout1.0"], "update": 2}  # fmt: skip
            old = [("start", start), ("prepare", {"version": 2}), ("commit", {"version": 2}),
                   ("apply", {"version": 2}), ("rollback", {"version": 2}), ("commit", {"version": 1}),
                   ("abort", {"version": 2, "reason": "it was long ago"})]  # fmt: skip
            for number, (op, body) in enumerate(old):
                message = {"kind": "request", "from": "trainer.0", "op": op, "body": body,
                           "number": 1000 + number, "remaining_ns": 10**9}  # fmt: skip
                run.world.put(str(LOST), message)
            run.find()
            back = await run.step(NEW)
            assert run.differences(LOST) == []
            return back

    back = asyncio.run(story())
    assert (back.committed, sorted(back.members), back.full, back.rejoined) == (True, [0, 1], (1,), (1,))


@pytest.mark.parametrize(("slow", "full"), [("rollout1.0", (1,)), ("rollout1.1", ())])
def test_a_rollout_with_a_slow_rank_is_taken_back_by_all_its_ranks(slow: str, full: tuple[int, ...]) -> None:
    """A rank that lost its leader is dirty, so that rollout needs everything; one that lost a follower does not."""

    async def story() -> list[Outcome]:
        async with InprocessRun(tiny_deployment(), settings=LEASE) as run:
            world: Any = run.lead.verbs.control
            outcomes = []
            for step in range(4):
                for told in ("lost", "found") if step == 2 else ():
                    for name, control in world.transport.controls.items():
                        if name != slow:
                            getattr(control, told)(slow)
                    for _ in range(10):  # until whoever waits has heard of it
                        await asyncio.sleep(0)
                for params, shards in zip(run.params, tiny_shards(0, step), strict=True):
                    for name, shard in shards.items():
                        int_view(params[name].data).copy_(int_view(shard.data))
                outcomes.append(await run.push())
                run.look()
            assert run.violations == []
            assert all(run.differences(rank) == [] for rank in run.rollouts)
            assert all(rollout.dirty is None for rollout in run.rollouts.values())
            return outcomes

    outcomes = asyncio.run(story())
    assert all(outcome.committed for outcome in outcomes)
    assert [outcome.rejoined for outcome in outcomes] == [(), (), (1,), ()]
    assert (sorted(outcomes[2].members), outcomes[2].full) == ([0, 1], full)


def test_with_fail_a_loss_still_ends_the_run() -> None:
    async def story() -> None:
        async with Losing() as run:
            run.settings = LEASE
            await run.step(OLD)
            run.lead.settings = replace(LEASE, on_rollout_loss="fail")
            run.lose()
            with pytest.raises(PeerLost, match=r"rollout1\.0 was lost"):
                await run.step(NEW)
            run.find()

    asyncio.run(story())


# ---- on the simulated clock, with faults -------------------------------------------------------------------------


def lead(run: FaultRun) -> Sequence[Outcome]:
    return run.report.outcomes["trainer.0"]


@pytest.mark.parametrize("killed", ["rollout1.0", "rollout1.1"])
def test_every_rank_of_a_killed_rollout_is_back_with_everything(killed: str) -> None:
    run = FaultRun([Fault(killed, 40, "kill"), Restart(killed, 80)])
    assert run.run().violations == []
    back = next(outcome for outcome in lead(run) if outcome.rejoined)
    assert (back.committed, back.rejoined, set(back.members), back.full) == (True, (1,), {0, 1}, (1,))
    for rank in run.deployment.rollouts[1].ranks:
        assert run.rollouts[rank].version == lead(run)[-1].version


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (LostForEver, "rollout1.0 ended at version 0 (it holds no weights yet), not at 4"),
        (NewTakenForOld, "the update after the last fault did not commit"),
    ],
)
def test_a_trainer_that_does_not_take_it_back_breaks_a_promise(wrong: type[Trainer], sentence: str) -> None:
    violated = (
        FaultRun([Fault("rollout1.0", 40, "kill"), Restart("rollout1.0", 700)], trainer=wrong)
        .run()
        .violations
    )
    assert any(sentence in one for one in violated), violated


MOMENTS = 60
"""Of every so many moments one is taken here; all of them are in tests/faults."""


@pytest.mark.parametrize("receive", ["stage", "stream"])
@pytest.mark.parametrize("detect_ms", [0, 40])
def test_whenever_a_rollout_is_killed_and_started_again_no_promise_is_broken(
    receive: str, detect_ms: int
) -> None:
    plans = list(returning(awaits(receive=receive), (5, 80, 700)))[detect_ms % 7 :: MOMENTS]
    cases = [Case(faults, receive=receive, detect_ms=detect_ms) for faults in plans]
    assert len(cases) > 12
    assert [sentence for case in cases for sentence in violations(case)] == []
