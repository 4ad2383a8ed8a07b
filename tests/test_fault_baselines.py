"""Baselines under planted faults: what a failed push had marked is told by the next one, or a promise is broken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from weightsync.reference.baselines import DirtyBaseline
from weightsync.reference.dirty import Marks
from weightsync.testing.fuzz import Case, Protocol, awaits, fuzz, seeded_cases

SEEDS = 30


def cases(baseline: str) -> list[Case]:
    counts = awaits(baseline=baseline)
    return [replace(case, baseline=baseline) for case in seeded_cases(range(SEEDS), counts)]


@pytest.mark.parametrize("baseline", ["shards", "dirty"])
def test_seeded_faults_break_no_promise(baseline: str) -> None:
    assert fuzz(cases=cases(baseline)) is None


def test_marks_that_a_failed_push_forgets_break_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: DirtyBaseline, between: dict[str, Marks], taken: Mapping[str, Marks]) -> None:
        between.update(taken)

    every = cases("dirty")
    monkeypatch.setattr(DirtyBaseline, "_tell_again", forget)
    assert any(case.run(Protocol()).violations for case in every)
