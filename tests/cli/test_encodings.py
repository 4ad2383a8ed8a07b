"""Scenarios that ask for an encoding: what it does to bytes, with values and by counts alone, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.cli import result as results
from weightsync.cli.dry_run import dry_run
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError
from weightsync.cli.scenario_files import load

SMALL = ("policy.encoding=gap8+step+zstd",)
SLOW = ("policy.encoding=auto", "policy.link_bytes_per_s=1e6")


def made(*overrides: str, backend: str = "inprocess") -> results.Result:
    scenario = load("demo", ("workload.steps=3", *overrides))
    record = run(scenario, backend, None)
    assert record is not None
    return results.make_result(scenario, record)


def delta_bytes(result: results.Result) -> int:
    return sum(update["delta_bytes"] for update in result["updates"])


def forms(result: results.Result) -> set[str]:
    return {name for update in result["updates"] if update["kind"] == "delta" for name in update["forms"]}


@pytest.mark.parametrize("overrides", [SMALL, SLOW], ids=["named", "auto"])
@pytest.mark.parametrize("backend", ["inprocess", "sim"])
def test_a_smaller_encoding_sends_fewer_bytes_and_the_same_bits(
    overrides: tuple[str, ...], backend: str
) -> None:
    fixed, smaller = made(backend=backend), made(*overrides, backend=backend)
    assert smaller["verdict"]["ok"]
    assert fixed["verdict"]["ok"]
    assert delta_bytes(smaller) < delta_bytes(fixed)
    assert forms(smaller) != forms(fixed) <= {"int32+raw", "dense+raw"}


def test_counts_alone_cost_what_the_plan_says() -> None:
    """Estimates, and equal ones: of buckets that a run without values sends, and of the dry run."""
    overrides = (*SLOW, "workload.kind=synthetic", "values=false")
    result: Any = made(*overrides, backend="sim")
    planned = dry_run(load("demo", ("workload.steps=3", *overrides)))
    assert [one["full_bytes"] + one["delta_bytes"] for one in result["updates"]] == [
        one.nbytes for one in planned.updates
    ]
    assert planned.exact


def test_what_an_encoding_makes_of_values_is_an_estimate() -> None:
    planned = dry_run(load("demo", (*SMALL, "workload.kind=synthetic")))
    assert not planned.exact
    assert "gap8+step+zstd" in planned.note
    assert planned.nbytes < dry_run(load("demo", ("workload.kind=synthetic",))).nbytes


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("policy.encoding=rice",), "encoding 'rice' is unknown, expected auto or one of"),
        ((*SMALL, "policy.baseline=dirty"), "needs values in step, the baseline allows raw"),
        (("policy.link_bytes_per_s=1e9",), 'does nothing with policy.encoding = "int32\\+raw"'),
        ((*SMALL, "policy.link_bytes_per_s=1e9"), "which is one form whatever the link"),
        ((*SMALL, "policy.snapshot=none"), "policy.encoding is for deltas"),
        (("policy.snapshot=none", "policy.history_bytes=0"), "policy.history_bytes is for deltas"),
    ],
)
def test_an_encoding_that_cannot_be_is_refused(overrides: tuple[str, ...], told: str) -> None:
    with pytest.raises(ScenarioError, match=told):
        load("demo", overrides)
