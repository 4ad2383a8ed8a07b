"""``policy.baseline``: runs of every baseline end in the same bits; what cannot work is refused by name."""

from __future__ import annotations

import pytest

from weightsync.cli.dry_run import dry_run
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError
from weightsync.cli.scenario_files import load


def committed(scenario: str, baseline: str, backend: str, *more: str) -> list[tuple[object, ...]]:
    record = run(load(scenario, [f"policy.baseline={baseline}", *more]), backend)
    assert record is not None
    assert not record.races
    assert all(not audit.differences for audit in record.audits)
    return [(one.committed, one.full, one.digest) for one in record.trainers[0].outcomes]


@pytest.mark.parametrize("scenario", ["tiny-sync", "tiny-experts"])
@pytest.mark.parametrize("backend", ["inprocess", "sim"])
def test_every_baseline_ends_in_the_same_state(scenario: str, backend: str) -> None:
    whole, shards, dirty = (committed(scenario, name, backend) for name in ("whole", "shards", "dirty"))
    assert whole == shards == dirty
    assert all(one[0] for one in whole)


def test_dirty_bits_work_between_processes() -> None:
    assert all(one[0] for one in committed("tiny-sync", "dirty", "gloo", "policy.lease_ms=30000"))


def test_baselines_differ_in_memory_and_in_what_a_diff_costs() -> None:
    def memory(name: str) -> int:
        return sum(one.snapshots for one in dry_run(load("tiny-experts", [f"policy.baseline={name}"])).memory)

    def diff_ns(name: str) -> int:
        record = run(load("tiny-experts", [f"policy.baseline={name}", "values=false"]), "sim")
        assert record is not None
        return sum(span.end_ns - span.start_ns for span in record.trace.spans if span.verb == "diff")

    assert memory("whole") > memory("shards") > memory("dirty")
    assert diff_ns("whole") > diff_ns("shards") > diff_ns("dirty")


def test_a_learner_that_marks_nothing_is_refused() -> None:
    with pytest.raises(ScenarioError, match=r'policy.baseline = "dirty" needs an optimizer that marks'):
        load("tiny-hybrid", ["policy.baseline=dirty"])
    with pytest.raises(ScenarioError, match=r"policy.baseline"):
        load("tiny-sync", ["policy.baseline=most"])
