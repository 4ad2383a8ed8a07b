"""Connecting data groups, and the worlds that ranks take part in."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.gloo import GlooWorld
from weightsync.backends.store import host_store, local_store
from weightsync.reference.errors import (
    DeadlineExceeded,
    GroupBroken,
    PlanMismatch,
    WeightSyncError,
)
from weightsync.reference.members import Group, RankId
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Part
from weightsync.testing.ranks import GlooRanks

A, B, C = RankId("trainer", 0, 0), RankId("trainer", 0, 1), RankId("rollout", 0, 0)
PAIR = Group("pair", 1, (A, B))
LONG_NS, SHORT_NS = 60_000_000_000, 300_000_000


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def later(verbs: Verbs, ns: int = LONG_NS) -> int:
    return verbs.now_ns() + ns


# ---- connecting ----------------------------------------------------------------------------------------------------


def test_the_loop_runs_while_a_group_connects() -> None:
    """The constructor of a process group waits for every member; nothing of it may happen on the loop."""
    turns: list[int] = []

    async def first(verbs: Verbs) -> Any:
        async def tick() -> None:
            while True:
                turns.append(verbs.now_ns())
                await verbs.clock.sleep_until(verbs.now_ns() + 1_000_000)

        ticking = verbs.spawn(tick(), "ticking")
        connecting = verbs.spawn(verbs.connect(PAIR, later(verbs)), "connecting")
        while len(turns) < 20:
            await verbs.clock.sleep_until(verbs.now_ns() + 1_000_000)
        assert not connecting.done()
        await verbs.post(B, "come", {})
        await verbs.join([connecting], later(verbs))
        await verbs.cancel(ticking)

    async def second(verbs: Verbs) -> Any:
        await verbs.serve(later(verbs), A)
        await verbs.connect(PAIR, later(verbs))

    assert GlooRanks().run({A: first, B: second}) == {A: None, B: None}


def test_other_members_under_the_same_key_are_refused_at_once() -> None:
    other = Group(PAIR.name, PAIR.epoch, (A, B, C))

    async def member(verbs: Verbs) -> Any:
        await verbs.connect(PAIR, later(verbs))
        await verbs.post(C, "connected", {})
        await verbs.serve(later(verbs), C)
        return await verbs.exchange(PAIR, [1], later(verbs))

    async def stranger(verbs: Verbs) -> Any:
        await verbs.serve(later(verbs), A)
        with pytest.raises(
            GroupBroken, match=r"its members are trainer\.0 trainer\.1, not trainer\.0 trainer\.1 rollout"
        ):
            await verbs.connect(other, later(verbs))
        for rank in (A, B):
            await verbs.post(rank, "go on", {})

    ends = GlooRanks().run({A: member, B: member, C: stranger})
    assert ends == {A: [[1], [1]], B: [[1], [1]], C: None}


def test_a_key_is_connected_once() -> None:
    async def main(verbs: Verbs) -> Any:
        await verbs.connect(PAIR, later(verbs))
        with pytest.raises(GroupBroken, match="is open on trainer"):
            await verbs.connect(PAIR, later(verbs))
        await verbs.exchange(PAIR, [1], later(verbs))
        await verbs.disconnect(PAIR)
        with pytest.raises(GroupBroken, match=r"opened it before|closed it"):
            await verbs.connect(PAIR, later(verbs))

    assert GlooRanks().run({A: main, B: main}) == {A: None, B: None}


def test_a_member_that_comes_after_the_others_gave_up_is_told_at_once() -> None:
    async def first(verbs: Verbs) -> Any:
        with pytest.raises(DeadlineExceeded, match=r"'connect' in group pair/1, waiting for trainer\.1"):
            await verbs.connect(PAIR, later(verbs, SHORT_NS))
        await verbs.post(B, "gave up", {})

    async def second(verbs: Verbs) -> Any:
        await verbs.serve(later(verbs), A)
        with pytest.raises(
            GroupBroken, match=r"trainer\.0 waited for trainer\.1 in 'connect' until its deadline"
        ):
            await verbs.connect(PAIR, later(verbs))

    assert GlooRanks().run({A: first, B: second}) == {A: None, B: None}


def test_a_group_of_one_needs_no_communicator() -> None:
    alone = Group("alone", 1, (A,))

    async def main(verbs: Verbs) -> Any:
        await verbs.connect(alone, later(verbs))
        rows = await verbs.exchange(alone, [1, -(1 << 63)], later(verbs))
        mine = Part(torch.zeros(8, dtype=torch.uint8))
        assert await verbs.fabric.gather(alone, mine, [8], later(verbs)) == [mine]
        return rows

    assert GlooRanks().run({A: main}) == {A: [[1, -(1 << 63)]]}


# ---- worlds --------------------------------------------------------------------------------------------------------


def test_a_rank_that_is_none_of_the_run_is_refused() -> None:
    clock = AsyncioClock(rank_name="rollout0.0")
    world = GlooWorld(local_store(), (A, B), secret=bytes(16))
    with pytest.raises(
        PlanMismatch, match=r"rollout0\.0 is no rank of this run, which has trainer\.0, trainer\.1"
    ):
        world.verbs(C, None, clock=clock)
    with pytest.raises(WeightSyncError, match="lease_ns is 0; expected a positive number"):
        GlooWorld(local_store(), (A, B), secret=bytes(16), lease_ns=0)
    clock.close()


def test_a_rank_that_hangs_is_named_and_leaves_no_thread() -> None:
    async def ends(verbs: Verbs) -> Any:
        return verbs.me

    async def hangs(verbs: Verbs) -> Any:
        await verbs.serve(None, A)

    with pytest.raises(WeightSyncError, match=r"^trainer\.1 did not end"):
        GlooRanks(limit_s=0.2).run({A: ends, B: hangs})


def test_closing_twice_is_harmless_and_leaves_nothing() -> None:
    clock = AsyncioClock(rank_name=str(A))
    world = GlooWorld(host_store(), (A,), secret=bytes(16))
    world.verbs(A, None, clock=clock)
    assert world.close() == ()
    began = time.monotonic()
    assert world.close() == ()
    assert time.monotonic() - began < 5
    clock.close()
