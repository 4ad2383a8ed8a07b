"""Kill and fail at every await of two trainer ranks and a rollout's leader, over gloo, with ranks as threads."""

from __future__ import annotations

import pytest

from weightsync.sim.faults import exhaustive
from weightsync.testing.gloo_faults import GlooCase, gloo_awaits, gloo_violations
from weightsync.testing.sweep import Bar, require_none, sweep

WORKERS = 4
"""Runs mostly wait for leases, so there are more of them at a time than cores."""

LIMIT_S = 120
RENEW = 40
"""Runs per process: what a killed rank leaves behind ends with it."""


@pytest.mark.parametrize("rank", ["trainer.0", "trainer.1", "rollout1.0"])
def test_kill_and_fail_at_every_await_break_no_promise(rank: str, capfd: pytest.CaptureFixture[str]) -> None:
    verbs = gloo_awaits()[rank]
    assert len(verbs) > 40, "the scenario shrank; a sweep of it shows little"
    cases = [GlooCase(faults) for faults in exhaustive({rank: len(verbs)}, ("kill", "fail"))]
    with capfd.disabled():
        bar = Bar(f"gloo, {rank}", len(cases))
        failures = sweep(gloo_violations, cases, workers=WORKERS, limit_s=LIMIT_S, renew=RENEW, progress=bar)
    require_none(failures, len(cases))
