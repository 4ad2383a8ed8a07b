"""Faults on simulated time where versions are remembered, and while a squashed delta travels."""

from __future__ import annotations

import pytest

from weightsync.sim.faults import Fault
from weightsync.testing.faults import FaultRun
from weightsync.testing.fuzz import Case, awaits, exhaustive_cases, violations

PLANS = 60
"""Of so many plans one is run here; all of them are in tests/faults."""


@pytest.mark.parametrize("receive", ["stage", "stream"])
def test_no_promise_is_broken_by_a_fault_where_versions_are_remembered(receive: str) -> None:
    cases: list[Case] = list(exhaustive_cases(awaits(receive=receive), receive))[7::PLANS]
    assert len(cases) > 25
    assert [sentence for case in cases for sentence in violations(case)] == []


def second_faults() -> list[tuple[Fault, ...]]:
    """A commit that one rollout never hears of, in update 2, and one more fault of some rank, from update 3 on."""
    counts = awaits()
    report = FaultRun().run()
    calls = [index for index, verb in enumerate(report.awaits["trainer.0"], 1) if verb == "call"]
    commit = calls[
        13
    ]  # 2 hello, 2 start, 2 prepare, 2 commit; then 2 start, 2 prepare, and the second commit
    lost = tuple(Fault("trainer.0", commit + tried, "fail") for tried in range(3))
    found = []
    for rank, count in counts.items():
        for index in range(count * 6 // 10, count, 9):
            kind = ("fail", "stall", "fail-after", "kill")[index % 4]
            if rank != "trainer.0" or index > commit + 3:
                found.append((*lost, Fault(rank, index, kind)))  # type: ignore[arg-type]
    return found


def test_a_fault_while_a_squashed_delta_travels_breaks_no_promise() -> None:
    squashed = 0
    for faults in second_faults():
        report = FaultRun(faults).run()
        assert report.violations == [], str(report)
        squashed += any(outcome.squashed for outcome in report.outcomes["trainer.0"])
    assert squashed > 10
