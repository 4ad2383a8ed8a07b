"""Pushes in the background: any one fault at any await, and a thousand seeded pairs, on the simulated clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from weightsync.testing.fuzz import Protocol, fuzz, violations
from weightsync.testing.push_faults import PushCase, exhaustive_pushes, push_awaits, seeded_pushes
from weightsync.testing.sweep import Bar, require_none, sweep
from weightsync.testing.wrong_protocols import SlotParity

SEEDS = 1000


def assert_all_right(label: str, cases: Sequence[PushCase], capfd: pytest.CaptureFixture[str]) -> None:
    with capfd.disabled():
        failures = sweep(violations, cases, progress=Bar(label, len(cases)))
    require_none(failures, len(cases))


@pytest.mark.parametrize("receive", ["stage", "stream"])
def test_any_one_fault_at_any_await_leaves_the_history_of_the_foreground(
    receive: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert sum(push_awaits(receive).values()) > 400, "the scenario shrank; a sweep of it shows little"
    assert_all_right(f"one fault in the background, receive = {receive}", exhaustive_pushes(receive), capfd)


def test_a_thousand_seeded_pairs_of_faults_leave_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert_all_right("pairs of faults in the background", list(seeded_pushes(range(SEEDS))), capfd)


def test_slot_parity_is_found_by_seeds_alone() -> None:
    finding = fuzz(Protocol(trainer=SlotParity), seeded_pushes(range(SEEDS)))
    assert finding is not None
    assert finding.case.run(Protocol()).violations == []
