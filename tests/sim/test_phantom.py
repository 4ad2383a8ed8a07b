"""A run that only counts bytes shows the verbs, the buckets and the bytes of a run with values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from weightsync.reference.members import RankId
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.sim.phantom import PhantomSource, PhantomTarget
from weightsync.testing.faults import FaultRun
from weightsync.testing.tiny import SETTINGS, tiny_deployment


class Counted(FaultRun):
    """The same run with phantoms; ``totals`` are the counts that a run with values showed, update by update."""

    def __init__(self, totals: Sequence[Sequence[int]], settings: ProtocolSettings = SETTINGS) -> None:
        self.totals = totals
        super().__init__(settings=settings)
        self.promises.check_bits = lambda ref, when: None  # type: ignore[method-assign]  # there are no bits

    def _verbs(self, rank: RankId, local: Any, engine: Any = None) -> Any:
        plan = self.deployment.plan
        if isinstance(local, Source):
            local = PhantomSource(plan, rank.rank, lambda: self.totals[self.step])
        elif isinstance(local, Target):
            local = PhantomTarget(self.deployment.rollout_maps(rank), local.holding)
        return super()._verbs(rank, local, engine)


@pytest.fixture(scope="module")
def with_values() -> FaultRun:
    run = FaultRun()
    run.run()
    return run


def counted(with_values: FaultRun) -> Counted:
    outcomes = with_values.report.outcomes["trainer.0"]
    run = Counted([outcome.counts or (0,) * len(tiny_deployment().plan.pieces) for outcome in outcomes])
    run.run()
    return run


def sizes(outcomes: Sequence[Outcome]) -> list[tuple[Any, ...]]:
    return [(o.version, o.committed, o.full, o.changed, o.full_bytes, o.delta_bytes) for o in outcomes]


def test_a_counted_run_shows_the_same_verbs_and_bytes(with_values: FaultRun) -> None:
    run = counted(with_values)
    assert run.report.violations == []
    assert sizes(run.report.outcomes["trainer.0"]) == sizes(with_values.report.outcomes["trainer.0"])
    for rank in with_values.report.trace.ranks():
        assert run.report.trace.verbs(rank) == with_values.report.trace.verbs(rank)


def test_a_counted_routed_run_sends_the_full_update_to_the_byte() -> None:
    settings = replace(SETTINGS, route="owned")
    real = FaultRun(settings=settings)
    real.run()
    outcomes = real.report.outcomes["trainer.0"]
    run = Counted(
        [outcome.counts or (0,) * len(tiny_deployment().plan.pieces) for outcome in outcomes], settings
    )
    run.run()
    assert run.report.violations == real.report.violations == []
    found = run.report.outcomes["trainer.0"]
    assert [(o.version, o.committed, o.full, o.changed) for o in found] == [
        (o.version, o.committed, o.full, o.changed) for o in outcomes
    ]
    assert [o.full_bytes for o in found] == [o.full_bytes for o in outcomes]
    assert all(o.delta_bytes > 0 for o in found[1:])


def test_the_ranks_shares_add_up_to_the_given_counts() -> None:
    plan = tiny_deployment().plan
    totals = [piece.count // 2 for piece in plan.pieces]
    shares = [PhantomSource(plan, rank, lambda: totals) for rank in range(len(plan.maps))]
    for number, total in enumerate(totals):
        assert sum(source._share(number, total) for source in shares) == total
