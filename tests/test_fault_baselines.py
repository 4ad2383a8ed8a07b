"""Baselines under planted faults: what a failed push had marked is told by the next one, or a promise is broken."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from weightsync.reference.baselines import DirtyBaseline
from weightsync.reference.dirty import Marks
from weightsync.testing.fuzz import Case, Protocol, fuzz, seeded_cases

SEEDS = 30


def cases(baseline: str) -> list[Case]:
    variants = [{"receive": receive, "baseline": baseline} for receive in ("stage", "stream")]
    return list(seeded_cases(range(SEEDS), variants))


@pytest.mark.parametrize("baseline", ["shards", "dirty"])
def test_seeded_faults_break_no_promise(baseline: str) -> None:
    assert fuzz(cases=cases(baseline)) is None


def test_marks_that_a_failed_push_forgets_break_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(self: DirtyBaseline, between: dict[str, Marks], taken: Mapping[str, Marks]) -> None:
        between.update(taken)

    every = cases("dirty")
    monkeypatch.setattr(DirtyBaseline, "_tell_again", forget)
    assert any(case.run(Protocol()).violations for case in every)
