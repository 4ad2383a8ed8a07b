"""Every await of every rank times every kind of fault, and a thousand seeded pairs, on the simulated clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weightsync.testing.fuzz import Case, awaits, exhaustive_cases, seeded_cases, sweep_cases
from weightsync.testing.sweep import Bar, require_none

SEEDS = 1000


def assert_all_right(label: str, cases: Sequence[Case], capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        failures = sweep_cases(cases, progress=Bar(label, len(cases)))
    require_none(failures, len(cases))


@pytest.mark.parametrize("receive", ["stage", "stream"])
def test_any_one_fault_at_any_await_breaks_no_promise(
    receive: str, capfd: pytest.CaptureFixture[str]
) -> None:
    counts = awaits(receive=receive)
    cases = list(exhaustive_cases(counts, receive))
    rollouts = sum(count for rank, count in counts.items() if rank.startswith("rollout"))
    assert len(cases) == 4 * sum(counts.values()) + 2 * rollouts
    assert sum(counts.values()) > 400, "the scenario shrank; a sweep of it shows little"
    assert_all_right(f"one fault, receive = {receive}", cases, capfd)


def test_a_thousand_seeded_pairs_of_faults_break_no_promise(capfd: pytest.CaptureFixture[str]) -> None:
    assert_all_right("pairs of faults", list(seeded_cases(range(SEEDS))), capfd)
