"""Conformance of data groups when somebody is missing: deadlines that name whom, and the death of a group."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch

from weightsync.reference.buckets import FULL, Heading, abort_bucket
from weightsync.reference.errors import GroupBroken, UnsupportedCapability
from weightsync.reference.members import Group, RankId
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Part
from weightsync.testing.conformance_base import ConformanceBase, attempt, expect_equal, expect_refused
from weightsync.testing.conformance_groups import ALL, LOST, A, B, C, connected
from weightsync.testing.conformance_sample import EPOCH

SLACK_NS = 20_000_000_000
"""How much later than its deadline a verb may come back on a machine that is busy with something else."""

Call = Callable[[Verbs, int], Awaitable[Any]]


class Late(NamedTuple):
    """A verb that waits for somebody.

    Attributes:
        waiter: who waits.
        absent: who never takes its turn.
        call: what the waiter calls.
        other: what the third member calls.
    """

    waiter: RankId
    absent: RankId
    call: Call
    other: Call


def _exchange(verbs: Verbs, deadline_ns: int) -> Awaitable[Any]:
    return verbs.exchange(ALL, [1], deadline_ns)


def _gather(verbs: Verbs, deadline_ns: int) -> Awaitable[Any]:
    return verbs.fabric.gather(ALL, Part(torch.zeros(8, dtype=torch.uint8)), [8, 8, 8], deadline_ns)


def _send(verbs: Verbs, deadline_ns: int) -> Awaitable[Any]:
    return verbs.send(ALL, abort_bucket(Heading(FULL, EPOCH, 0, 1), "no reason"), deadline_ns)


def _receive(verbs: Verbs, deadline_ns: int) -> Awaitable[Any]:
    return verbs.receive(ALL, deadline_ns)


LATE: Mapping[str, Late] = {
    "exchange": Late(A, C, _exchange, _exchange),
    "gather": Late(A, C, _gather, _gather),
    "send": Late(A, C, _send, _receive),
    "receive": Late(B, A, _receive, _receive),
}


class LossConformance(ConformanceBase):
    """Whoever waits is told by its deadline, and for whom; a group that saw an error is dead."""

    @pytest.mark.parametrize("verb", LATE)
    def test_a_verb_names_by_its_deadline_whom_it_waited_for(self, verb: str) -> None:
        waiter, absent, call, other = LATE[verb]

        async def main(verbs: Verbs) -> Any:
            if verbs.me == absent:
                return await attempt(verbs.serve(verbs.now_ns() + self.limit_ns, waiter))
            deadline_ns = verbs.now_ns() + self.patience_ns
            (end,) = await attempt((call if verbs.me == waiter else other)(verbs, deadline_ns))
            late_ns = verbs.now_ns() - deadline_ns
            if verbs.me == waiter:
                await verbs.post(absent, "enough", {})
            return late_ns, (end,)

        late_ns, (end,) = self.results(self._connected(dict.fromkeys(ALL.members, main)))[waiter]
        expect_refused(end, LOST, f"{verb} on {waiter} without {absent}", str(absent))
        assert late_ns < SLACK_NS, f"{verb} on {waiter} came back {late_ns} ns after its deadline"

    def test_a_connect_names_by_its_deadline_whom_it_waited_for(self) -> None:
        async def main(verbs: Verbs) -> Any:
            deadline_ns = verbs.now_ns() + self.patience_ns
            (end,) = await attempt(verbs.connect(ALL, deadline_ns))
            return verbs.now_ns() - deadline_ns, (end,)

        for rank, (late_ns, (end,)) in self.results({A: main, B: main}).items():
            expect_refused(end, LOST, f"connect on {rank} without {C}", *([str(C)] if rank == A else []))
            assert late_ns < SLACK_NS, f"connect on {rank} came back {late_ns} ns after its deadline"

    def test_a_killed_member_ends_the_waiting_of_the_others(self) -> None:
        world = self.make_world()
        programs: dict[RankId, Any] = {}

        async def killed(verbs: Verbs) -> None:
            world.kill(verbs.me)
            await verbs.exchange(ALL, [1], verbs.now_ns() + self.limit_ns)

        async def main(verbs: Verbs) -> Any:
            return await attempt(verbs.exchange(ALL, [1], verbs.now_ns() + self.limit_ns))

        programs = self._connected({A: main, B: main, C: killed})
        try:
            results = world.run(programs)
        except UnsupportedCapability as cannot:
            pytest.skip(str(cannot))
        if any(isinstance(end, UnsupportedCapability) for end in results.values()):
            pytest.skip(f"{type(world).__name__} cannot kill a rank")
        for rank in (A, B):
            expect_refused(results[rank][0], LOST, f"exchange on {rank} with {C} killed", str(C))

    # ---- a group's death -----------------------------------------------------------------------------------

    def test_a_group_is_dead_after_a_timeout_and_a_new_epoch_works(self) -> None:
        fresh = Group("data", EPOCH + 1, ALL.members)

        async def main(verbs: Verbs) -> tuple[Any, Any, Any]:
            if verbs.me == C:
                first = await attempt(verbs.serve(verbs.now_ns() + self.limit_ns, A))
            else:
                first = await attempt(verbs.exchange(ALL, [1], verbs.now_ns() + self.patience_ns))
                await verbs.post(C, "enough", {})
            second = await attempt(verbs.exchange(ALL, [1], verbs.now_ns() + self.patience_ns))
            await verbs.disconnect(ALL)
            await verbs.connect(fresh, verbs.now_ns() + self.limit_ns)
            third = await verbs.exchange(fresh, [7], verbs.now_ns() + self.limit_ns)
            return first, second, [list(row) for row in third]

        results = self.results(self._connected(dict.fromkeys(ALL.members, main)))
        for rank, ((first,), (second,), third) in results.items():
            if rank != C:
                expect_refused(first, LOST, f"exchange on {rank} while {C} came late")
            expect_refused(second, LOST, f"exchange on {rank} in a group that saw a timeout")
            expect_equal(third, [[7], [7], [7]], f"exchange on {rank} in the next group epoch")

    def test_a_member_that_disconnects_ends_the_waiting_of_the_others(self) -> None:
        async def leave(verbs: Verbs) -> None:
            for _ in (A, B):
                await verbs.serve(verbs.now_ns() + self.limit_ns, A)
            await verbs.disconnect(ALL)
            await verbs.disconnect(ALL)

        async def main(verbs: Verbs) -> Any:
            await verbs.post(C, "connected", {})
            return await attempt(verbs.exchange(ALL, [1], verbs.now_ns() + self.limit_ns))

        results = self.results(self._connected({A: main, B: main, C: leave}))
        for rank in (A, B):
            expect_refused(results[rank][0], LOST, f"exchange on {rank} after {C} disconnected")

    def test_a_group_that_was_not_connected_is_refused(self) -> None:
        async def main(verbs: Verbs) -> Any:
            deadline_ns = verbs.now_ns() + self.limit_ns
            return [
                await attempt(verbs.exchange(ALL, [1], deadline_ns)),
                await attempt(verbs.receive(ALL, deadline_ns)),
            ]

        for verb, (end,) in zip(("exchange", "receive"), self.results({B: main})[B], strict=True):
            expect_refused(end, GroupBroken, f"{verb} in a group that was never connected", ALL.key)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def _connected(self, programs: Mapping[RankId, Callable[[Verbs], Awaitable[Any]]]) -> dict[RankId, Any]:
        return connected(programs, self.limit_ns)
