"""Plans of faults as such: one plan has one trace, and a hundred seeded ones break no promise."""

from __future__ import annotations

import pytest

from weightsync.testing.faults import FaultRun
from weightsync.testing.fuzz import Case, seeded_cases, violations


def test_one_plan_has_one_trace() -> None:
    for case in seeded_cases((3, 8)):
        first, second = (FaultRun(case.faults, seed=case.seed, updates=case.updates) for _ in range(2))
        first.run()
        second.run()
        assert first.report.trace.spans == second.report.trace.spans
        assert (first.report.hit, first.plan.times_ns) == (second.report.hit, second.plan.times_ns)


@pytest.mark.parametrize("tens", range(10))
def test_a_hundred_seeded_plans_break_no_promise(tens: int) -> None:
    cases: list[Case] = list(seeded_cases(range(10 * tens, 10 * tens + 10)))
    broken = [f"{case}: {sentence}" for case in cases for sentence in violations(case)]
    assert broken == []
