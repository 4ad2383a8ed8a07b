"""A rollout that missed versions gets them as one delta: from wherever it was left, over whatever happened since."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.backends.inprocess import InprocessWorld
from weightsync.reference.history import History, VersionStep
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.trainer import Trainer
from weightsync.testing.failing import FailingRun, Wrong
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors
from weightsync.testing.tiny import SETTINGS

CONTINUE = replace(
    SETTINGS, connect_ns=10**9, update_ns=10**9, lease_ns=10**10, patience_ns=10**11, verify_every=0
)
SIZE = 400


def state(*changed: int, value: float = 1.0) -> dict[str, Tensor]:
    """Zeros, with some elements changed."""
    tensor = torch.zeros(SIZE)
    for element in changed:
        tensor[element] = value
    return {"w": tensor}


FIRST, SECOND, THIRD, FOURTH = state(), state(1), state(1, 2, value=2.0), state(1, 2, 3, value=2.0)
LAST = {"w": FOURTH["w"].clone()}
LAST["w"][[1, 4]] = torch.tensor([7.0, -0.0])


class Losing(InprocessRun):
    """A run whose rollouts can be lost, and found again as they were."""

    def __init__(self, rollouts: int = 2, settings: ProtocolSettings = CONTINUE, **how: Any) -> None:
        super().__init__(WholeTensors.of(FIRST, rollouts=rollouts), settings=settings, **how)

    async def __aenter__(self) -> Losing:
        await super().__aenter__()
        control: Any = self.lead.verbs.control
        self.world: InprocessWorld = control.transport
        return self

    def lose(self, number: int) -> None:
        """Its lease ends for everybody else."""
        leader = self.deployment.rollouts[number].leader
        for name, control in self.world.controls.items():
            if name != str(leader):
                control.lost(str(leader))
        self.world.meetings.lost(leader)

    def find(self, number: int) -> None:
        """Its lease is held again."""
        leader = self.deployment.rollouts[number].leader
        for name, control in self.world.controls.items():
            if name != str(leader):
                control.found(str(leader))

    async def step(self, values: dict[str, Tensor]) -> Outcome:
        """One update to these values."""
        self.set(values)
        return await self.push()

    def whole(self) -> None:
        """Everybody holds the last version, bit for bit."""
        assert self.violations == []
        for rank, rollout in self.rollouts.items():
            assert (rollout.version, rollout.dirty) == (self.lead.version, None)
            assert self.differences(rank) == []


async def slow_one(run: Losing) -> Outcome:
    """Rollout 1 misses three versions, and is there again in the fifth."""
    async with run:
        assert (await run.step(FIRST)).full == (0, 1)
        run.lose(1)
        for values in (SECOND, THIRD, FOURTH):
            outcome = await run.step(values)
            assert (outcome.committed, outcome.members) == (True, (0,))
        run.find(1)
        back = await run.step(LAST)
        assert back.committed, back.reason
        assert (sorted(back.members), back.rejoined) == ([0, 1], (1,))
        run.whole()
        return back


def test_a_slow_one_gets_three_missed_versions_and_the_new_one_as_one_delta() -> None:
    back = asyncio.run(slow_one(Losing()))
    assert (back.full, back.squashed) == ((), (1,))
    assert back.changed == 2, "of the version before"


@pytest.mark.parametrize("budget", [0, 600])
def test_what_was_forgotten_is_sent_whole(budget: int) -> None:
    """Without a history, and with room for two steps of three."""
    back = asyncio.run(slow_one(Losing(settings=replace(CONTINUE, history_bytes=budget))))
    assert (back.full, back.squashed) == ((1,), ())


class Forgetful(History):
    """Leaves out the middle of a path."""

    def path(self, start: int, end: int) -> Sequence[VersionStep] | None:
        found = super().path(start, end)
        return found if found is None or len(found) < 3 else [*found[:1], *found[2:]]


class DropsTheMiddle(Trainer):
    """Squashes without what the middle step changed."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.history = Forgetful(self.settings.history_bytes)


class TakesOldValues(Trainer):
    """Squashes the right positions with the values of the version before."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        source, whole = self.verbs.local, self.verbs.local.squash
        source.squash = lambda slot, trails: self._relabelled(whole(1 - slot, trails), slot)

    def _relabelled(self, step: Any, slot: int) -> Any:
        changes = yield from step
        return replace(changes, slot=slot)


class TellsTheWrongBase(Trainer):
    """Takes a rollout that missed something for one that holds the base."""

    async def connect(self, deadline_ns: int) -> None:
        await super().connect(deadline_ns)
        self.behind = {n: base for n, base in self.behind.items() if base is None}


WRONG: tuple[type[Trainer], ...] = (DropsTheMiddle, TakesOldValues, TellsTheWrongBase)


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_a_wrong_squash_is_seen(wrong: type[Trainer]) -> None:
    """By the digest, or because the base is not what the rollout holds; no rollout generates a wrong bit."""
    run = Losing(trainer=wrong)
    with pytest.raises(AssertionError, match=r"its digest in version 5|a delta on version 4 does not fit"):
        asyncio.run(slow_one(run))
    assert run.violations == []


def test_two_that_were_left_at_different_versions_get_a_delta_each() -> None:
    async def story() -> None:
        async with Losing(3) as run:
            await run.step(FIRST)
            run.lose(1)
            await run.step(SECOND)
            run.lose(2)
            await run.step(THIRD)
            await run.step(FOURTH)
            run.find(1)
            run.find(2)
            back = await run.step(LAST)
            assert (back.committed, back.full, set(back.squashed)) == (True, (), {1, 2})
            bases = {b.header.heading.base for b in run.buckets if b.header.heading.version == back.version}
            assert bases == {1, 2, 4}
            run.whole()
            again = await run.step(FIRST)
            assert (again.committed, again.full, again.squashed) == (True, (), ())
            run.whole()

    asyncio.run(story())


def test_a_union_that_is_no_cheaper_than_everything_is_sent_whole() -> None:
    async def story() -> None:
        async with Losing() as run:
            await run.step(FIRST)
            run.lose(1)
            await run.step({"w": torch.arange(float(SIZE)) + 1})
            run.find(1)
            back = await run.step(LAST)
            assert (back.committed, back.full, back.squashed) == (True, (1,), ())
            run.whole()

    asyncio.run(story())


def test_a_failed_update_with_a_squashed_delta_is_tried_again_as_one() -> None:
    async def story() -> None:
        async with Losing() as run:
            await run.step(FIRST)
            run.lose(1)
            await run.step(SECOND)
            run.find(1)
            run.plant("rollout1.0", "apply", late=True)
            failed = await run.step(THIRD)
            assert (failed.committed, failed.squashed) == (False, (1,))
            back = await run.step(FOURTH)
            assert (back.committed, back.full, back.squashed) == (True, (), (1,))
            run.whole()

    asyncio.run(story())


def test_status_and_metrics_tell_what_is_remembered() -> None:
    async def story() -> None:
        seen: list[int] = []
        async with Losing() as run:
            run.lead.on_update = lambda metrics: seen.append(metrics.history_bytes)
            for values in (FIRST, SECOND, THIRD):
                await run.step(values)
            status = await run.lead.status(run.lead.deadline_ns(10**9))
            assert status.history == (1, 2, 3)
            assert status.history_bytes == 4 * (1 + 2)
            assert seen == [0, 4, 12]
            assert not any(rollout.behind for rollout in status.rollouts)

    asyncio.run(story())


# ---- in doubt: a commit that one rollout never heard of -----------------------------------------------------------


@pytest.mark.parametrize("backend", ["inprocess", "sim", "gloo"])
def test_one_rolled_back_while_the_other_committed(backend: str) -> None:
    """Both deltas are made from one base: the one of them goes back to it and on, in one delta."""
    run = FailingRun(backend, Wrong("trainer.0", 2, "call", 6, times=3), updates=4).run()
    assert [outcome.committed for outcome in run.outcomes] == [True, False, True, True]
    assert [outcome.full for outcome in run.outcomes] == [(0, 1), (), (), ()]
    assert [outcome.squashed for outcome in run.outcomes] == [(), (), (0,), ()]
    assert run.torn == []


def test_without_a_history_the_same_is_healed_by_a_full_update() -> None:
    settings = replace(FailingRun("inprocess").settings, history_bytes=0)
    run = FailingRun(
        "inprocess", Wrong("trainer.0", 2, "call", 6, times=3), updates=3, settings=settings
    ).run()
    assert [outcome.full for outcome in run.outcomes] == [(0, 1), (), (0,)]
    assert run.torn == []


# ---- whatever happens ----------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(data=st.data())
def test_whoever_is_lost_and_whatever_fails_everybody_ends_at_the_last_version(data: st.DataObject) -> None:
    """Who holds a version that is remembered is never sent everything, unless everything changed."""

    async def story() -> None:
        stream = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 20)))
        values = state()
        gone: set[int] = set()
        async with Losing(3) as run:
            first = await run.step(values)
            assert first.committed
            for _ in range(data.draw(st.integers(1, 6))):
                for number in data.draw(st.sets(st.integers(1, 2))):
                    (run.find if number in gone else run.lose)(number)
                    gone ^= {number}
                verb = data.draw(st.sampled_from([None, "apply", "decode", "diff", "send", "call"]))
                if verb is not None:
                    rank = "trainer.0" if verb in ("diff", "send", "call") else "rollout0.0"
                    nth, times = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
                    run.plant(rank, verb, nth=nth, times=times, late=data.draw(st.booleans()))
                values = {"w": values["w"].clone()}
                chosen = torch.randint(0, SIZE, (data.draw(st.integers(0, 5)),), generator=stream)
                values["w"][chosen] = torch.rand(len(chosen), generator=stream)
                outcome = await run.step(values)
                assert outcome.full == ()
                run.planted.clear()
            for number in gone:
                run.find(number)
            await run.step(values)
            last = await run.step(values)
            assert (last.committed, last.full) == (True, ()), last.reason
            run.whole()

    asyncio.run(story())
