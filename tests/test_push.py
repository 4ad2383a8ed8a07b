"""Push schedules on the simulated clock and on the machine's: bits, order, staleness, errors, and what is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from weightsync.reference.errors import PeerLost, PlanMismatch, WeightSyncError
from weightsync.reference.issue_order import IssueOrder, IssueOrderMismatch, OrderedTrainer, check_orders
from weightsync.reference.push import PushSchedule, PushSettings
from weightsync.reference.trainer import Trainer
from weightsync.reference.transmit import Job
from weightsync.sim.faults import Fault
from weightsync.testing.fuzz import Protocol, fuzz
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors
from weightsync.testing.push_faults import ASYNC, PushCase, PushRun, push_awaits
from weightsync.testing.tiny import SETTINGS, STALL_NS
from weightsync.testing.wrong_protocols import SlotParity
from weightsync.testing.wrong_schedules import WRONG_SCHEDULES, LosesTheFinalError

SYNC = PushSettings()
PATIENT = replace(SETTINGS, connect_ns=4 * STALL_NS, update_ns=4 * STALL_NS)
"""Deadlines beyond the lease, so that a rank which is killed is known to be lost within the update."""

STATES = [{"w": torch.full((4,), float(number))} for number in range(6)]


def history(push: PushSettings, **more: Any) -> tuple[PushRun, list[tuple[int | None, bool, int | None]]]:
    run = PushRun(push=push, **more)
    report = run.run()
    assert report.violations == []
    return run, [(o.version, o.committed, o.digest) for o in report.outcomes["trainer.0"]]


# ---- one history ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1])
def test_in_the_background_the_history_is_the_same_and_versions_come_one_step_late(seed: int) -> None:
    sync, numbers = history(SYNC, seed=seed)
    behind, others = history(ASYNC, seed=seed)
    assert others == numbers
    assert behind.steps_of == sync.steps_of
    steps = range(1, sync.updates + 2)
    assert sync.held == [{0: step, 1: step} for step in steps]
    for step, held in zip(steps, behind.held, strict=True):
        assert all(step - 1 <= one <= step for one in held.values())
    assert any(one < step for step, held in zip(steps, behind.held, strict=True) for one in held.values())
    assert (sync.schedules[0].oldest, behind.schedules[0].oldest) == (0, 1)
    assert behind.schedules[0].staleness == 0  # after close everything is there


def first_killed(verb: str, rank: str = "trainer.1") -> Fault:
    """A kill at the rank's last await of this kind: in the last push."""
    verbs = PushCase(()).run(Protocol()).awaits[rank]
    return Fault(rank, len(verbs) - verbs[::-1].index(verb), "kill")


@pytest.mark.parametrize("verb", ["exchange", "gather", "agree"])
def test_the_error_of_the_last_push_surfaces_at_close(verb: str) -> None:
    run = PushRun([first_killed(verb)], disarm=False, settings=PATIENT)
    assert run.run().violations == []
    error: BaseException | None = None
    try:
        run.tasks["trainer.0"].result()
    except PeerLost as lost:
        error = lost
    assert isinstance(error, PeerLost)
    assert error.peer == "trainer.1"


def test_a_schedule_that_loses_the_last_error_is_seen() -> None:
    run = PushRun([first_killed("gather")], disarm=False, schedule=LosesTheFinalError, settings=PATIENT)
    assert any(
        "as if nothing had happened" in said or "one was lost" in said for said in run.run().violations
    )


@pytest.mark.parametrize("wrong", WRONG_SCHEDULES, ids=lambda wrong: wrong.__name__)
def test_every_wrong_schedule_is_seen(wrong: type[PushSchedule]) -> None:
    for faults in ([], [first_killed("gather")]):
        if PushRun(faults, schedule=wrong, disarm=not faults, settings=PATIENT).run().violations:
            return
    pytest.fail(f"{wrong.__name__} keeps every promise")


@pytest.mark.parametrize("baseline", ["shards", "dirty"])
@pytest.mark.parametrize("verb", ["", "diff", "gather", "send"])
def test_under_every_baseline_a_failed_push_in_the_background_is_healed(baseline: str, verb: str) -> None:
    verbs = PushCase((), baseline=baseline).run(Protocol()).awaits["trainer.0"]
    faults = [Fault("trainer.0", verbs.index(verb) + 1, "fail")] if verb else []
    case = PushCase(tuple(faults), baseline=baseline)
    assert case.run(Protocol()).violations == []


def test_slot_parity_is_found_in_the_background_too() -> None:
    counts = push_awaits()
    cases = [
        PushCase((Fault("trainer.0", index, kind),))  # type: ignore[arg-type]
        for index in range(counts["trainer.0"] // 3, counts["trainer.0"] // 2)
        for kind in ("fail", "fail-after")
    ]
    finding = fuzz(Protocol(trainer=SlotParity), cases)
    assert finding is not None
    assert finding.case.run(Protocol()).violations == []


# ---- on the machine's clock ----------------------------------------------------------------------------------------


def pushed_in_process(settings: PushSettings, told: list[str], steps: int = 4, **publish: Any) -> list[Any]:
    """Steps of one trainer rank in this process: what each publication returned, and the labels left behind."""

    async def story() -> list[Any]:
        found: list[Any] = []
        async with InprocessRun(WholeTensors.of(STATES[0])) as run:
            schedule = PushSchedule(run.lead, settings, told.append)
            for step in range(1, steps + 1):
                run.set(STATES[step])
                ended = await schedule.publish(step, last=steps, **publish)
                found.append(([one.step for one in ended], schedule.staleness, schedule.under_way))
            found.append([one.step for one in await schedule.join()])
            found.append([one.outcome.committed for one in schedule.pushed])
        return found

    return asyncio.run(story())


def test_what_each_publication_returns() -> None:
    assert pushed_in_process(SYNC, []) == [
        ([1], 0, None), ([2], 0, None), ([3], 0, None), ([4], 0, None), [], [True] * 4,
    ]  # fmt: skip
    assert pushed_in_process(ASYNC, []) == [
        ([], 1, 1), ([1], 1, 2), ([2], 1, 3), ([3], 1, 4), [4], [True] * 4,
    ]  # fmt: skip
    assert pushed_in_process(ASYNC, [], evaluates=True) == [
        ([1], 0, None), ([2], 0, None), ([3], 0, None), ([4], 0, None), [], [True] * 4,
    ]  # fmt: skip
    every_third = PushSettings(interval=3, correction="tis")
    assert pushed_in_process(every_third, []) == [
        ([], 1, None), ([], 2, None), ([3], 0, None), ([4], 0, None), [], [True] * 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (PushSettings("async", snapshot=False), "no snapshot to send from"),
        (PushSettings("async", old_actor=True), "old-actor tags are in use"),
        (PushSettings("async", correction="old-actor"), "old-actor tags are in use"),
    ],
)
def test_a_fallback_is_announced_and_nothing_runs_in_the_background(settings: PushSettings, why: str) -> None:
    told: list[str] = []
    assert pushed_in_process(settings, told) == pushed_in_process(SYNC, [])
    assert len(told) == 1
    assert why in told[0]


# ---- which steps ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("interval", "last", "evaluations", "published"),
    [
        (1, 4, (), [1, 2, 3, 4]),
        (2, 5, (), [2, 4, 5]),
        (3, 7, (5,), [3, 5, 6, 7]),
        (9, 4, (), [4]),
        (2, None, (), [1, 2, 3, 4, 5]),
    ],
)
def test_which_steps_are_published(
    interval: int, last: int | None, evaluations: Sequence[int], published: list[int]
) -> None:
    settings = PushSettings(interval=interval, correction="tis")
    steps = range(1, (last or 5) + 1)
    assert [n for n in steps if settings.publishes(n, last=last, evaluates=n in evaluations)] == published


@pytest.mark.parametrize("interval", [0, -1])
def test_an_interval_that_publishes_nothing_is_refused(interval: int) -> None:
    with pytest.raises(PlanMismatch, match=f"publish interval is {interval}; expected 1"):
        PushSettings(interval=interval, correction="tis")


def test_an_interval_above_one_demands_an_off_policy_correction() -> None:
    with pytest.raises(PlanMismatch, match="without an off-policy correction"):
        PushSettings(interval=2)


def test_steps_out_of_order_and_a_closed_schedule_are_refused() -> None:
    async def story() -> None:
        async with InprocessRun(WholeTensors.of(STATES[0])) as run:
            schedule = PushSchedule(run.lead, SYNC)
            with pytest.raises(PlanMismatch, match="step 2 follows step 0"):
                await schedule.publish(2)
            await schedule.publish(1)
            run.closes_trainers = False
            await schedule.close()
            assert await schedule.close() == ()
            with pytest.raises(WeightSyncError, match="closed schedule"):
                await schedule.publish(2)

    asyncio.run(story())


# ---- issue order ---------------------------------------------------------------------------------------------------


def test_a_rank_that_stops_early_is_no_mismatch_and_another_order_is() -> None:
    reports = []
    for ops in (["open", "exchange of 3", "gather of 8 bytes"], ["open", "exchange of 3"]):
        order = IssueOrder()
        for op in ops:
            order.issue("trainer/1", op)
        reports.append(order.report())
    check_orders({"trainer.0": reports[0], "trainer.1": reports[1]})
    swapped = {"trainer/1": ["1 open", "2 gather of 8 bytes"]}
    with pytest.raises(IssueOrderMismatch, match=r"trainer\.0 issued .*2 exchange of 3.* trainer\.1 issued"):
        check_orders({"trainer.0": reports[0], "trainer.1": swapped})


def test_long_orders_are_compared_where_both_are_known() -> None:
    left, right = IssueOrder(), IssueOrder()
    for number in range(100):
        left.issue("g", f"op {number}")
        right.issue("g", f"op {number}")
    left.issue("g", "more")
    check_orders({"a": left.report(), "b": right.report()})
    right.issue("g", "less")
    with pytest.raises(IssueOrderMismatch):
        check_orders({"a": left.report(), "b": right.report()})


def test_two_ranks_that_issue_on_one_group_in_two_orders_are_told_both_orders_on_every_rank() -> None:
    """A training loop that shares the push's group: rank 0 reduces before the push's exchange, rank 1 after it."""
    caught: dict[str, IssueOrderMismatch] = {}

    class Shares(PushRun):
        async def _train(self, trainer: Trainer) -> None:
            try:
                await super()._train(trainer)
            except IssueOrderMismatch as error:
                caught[str(trainer.verbs.me)] = error

    class Sharing(OrderedTrainer):
        async def _make_job(self, made: list[Job], deadline_ns: int) -> None:
            reduce = partial(
                self.verbs.fabric.exchange, self.group("trainer", self.ranks), [1, 2], deadline_ns
            )
            first = self.verbs.me == self.ranks[0]
            if self.updates == 2 and first:
                await reduce()
            await super()._make_job(made, deadline_ns)
            if self.updates == 2 and not first:
                await reduce()

    Shares(trainer=Sharing).run()
    assert set(caught) == {"trainer.0", "trainer.1"}
    for error in caught.values():
        assert error.group == "trainer/1"
        assert "exchange of 2" in str(error)
        assert error.orders["trainer.0"] != error.orders["trainer.1"]
