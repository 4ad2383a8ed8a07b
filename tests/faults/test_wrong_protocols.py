"""The fuzzer finds every wrong protocol, and what it prints is no larger than it must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.testing.fuzz import Case, Protocol, fuzz
from weightsync.testing.wrong_protocols import WRONG_PROTOCOLS

SEEDS = 1000
"""The right protocol keeps every promise in the same seeds: see test_exhaustive_sim."""


def parts_dropped(case: Case) -> Iterator[Case]:
    for fault in case.faults:
        yield replace(case, faults=tuple(other for other in case.faults if other != fault))
    if case.updates > 1:
        yield replace(case, updates=case.updates - 1)


@pytest.mark.parametrize("wrong", WRONG_PROTOCOLS, ids=lambda wrong: wrong.__name__)
def test_fuzz_finds_it_and_reduces_the_plan(wrong: type[Trainer] | type[Rollout]) -> None:
    finding = fuzz(wrong, seeds=SEEDS)
    assert finding is not None, f"no plan of {SEEDS} makes {wrong.__name__} break a promise"
    assert finding.report.violations
    halves = Protocol(trainer=wrong) if issubclass(wrong, Trainer) else Protocol(rollout=wrong)
    for smaller in parts_dropped(finding.case):
        assert not smaller.run(halves).violations, f"{smaller} fails already, yet {finding.case} was printed"
    assert finding.case.run(Protocol()).violations == [], (
        "the right protocol breaks a promise under this plan"
    )
    printed = str(finding)
    assert f"seed {finding.case.seed}" in printed
    assert all(str(fault) in printed for fault in finding.case.faults)
    assert all(span.verb in printed for span in finding.report.trace.spans)


def test_there_are_eleven() -> None:
    assert len(set(WRONG_PROTOCOLS)) == 11
