"""The keys of a scenario that say how versions are pushed: they work on every backend, or raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weightsync.cli import result as results
from weightsync.cli.record import RunRecord
from weightsync.cli.rl.learner import TIS_CAP, importance
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError
from weightsync.cli.scenario_files import load

SMALL = (
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=48",
    "model.shape.num_hidden_layers=1",
    "workload.rl.prompts=6",
    "workload.rl.samples=4",
    "workload.rl.digits=2",
    "workload.steps=4",
    "policy.lease_ms=30000",
)


def made(backend: str, *overrides: str) -> tuple[results.Result, RunRecord]:
    scenario = load("tiny-hybrid", [*SMALL, *overrides])
    record = run(scenario, backend)
    assert record is not None
    result = results.make_result(scenario, record)
    assert result["verdict"]["ok"], result["verdict"]["text"]
    return result, record


def mismatches(record: RunRecord) -> list[float]:
    return [step["mismatch"] for step in record.trainers[0].curve if "mismatch" in step]


@pytest.mark.parametrize("backend", ["inprocess", "sim", "gloo"])
def test_in_the_background_every_version_is_pushed_audited_and_learnt_from_late(backend: str) -> None:
    result, record = made(backend, "policy.push=async")
    assert [update["version"] for update in result["updates"]] == [1, 2, 3, 4]
    assert len(record.audits) == 4 * 3
    if backend != "gloo":  # there a push may end before the first token is drawn
        assert mismatches(record)[0] < 1e-4
        assert min(mismatches(record)[1:]) > 1e-3


def test_on_simulated_time_the_background_takes_time_off_the_trainer() -> None:
    sync, behind = (made("sim", f"policy.push={mode}")[0]["phases_ns"] for mode in ("sync", "async"))
    assert behind["exposed"] < sync["exposed"]
    assert {"snapshot", "diff", "broadcast"} <= behind.keys()


@pytest.mark.parametrize("backend", ["inprocess", "gloo"])
def test_without_a_snapshot_every_update_is_full_and_in_the_foreground(backend: str) -> None:
    result, record = made(backend, "policy.snapshot=none", "policy.push=async")
    assert [update["kind"] for update in result["updates"]] == ["full"] * 4
    assert max(mismatches(record)) < 1e-4


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_an_interval_publishes_the_first_the_last_and_every_nth_step(mode: str) -> None:
    keys = ("policy.publish_interval=3", "workload.rl.correction=tis", f"policy.push={mode}")
    _, record = made("inprocess", "workload.steps=5", *keys)
    assert len(record.outcomes) == 3  # steps 1, 3 and 5
    assert len(record.trainers[0].curve) == 5


@pytest.mark.parametrize(
    ("backend", "overrides", "said"),
    [
        ("gloo", ("policy.snapshot=device",), "needs a device beside the host, which gloo has not"),
        ("inprocess", ("policy.snapshot=device",), "needs a device beside the host"),
        ("sim", ("policy.publish_interval=0",), "publish_interval"),
        ("sim", ("policy.publish_interval=2",), "samples are of older weights"),
        ("sim", ("policy.snapshot=none", "policy.route=owned"), "sends everything to everybody"),
        ("sim", ("policy.push=later",), "policy.push"),
        ("sim", ("workload.kind=train", "workload.rl.correction=tis"), "trains on no samples"),
        ("sim", ("workload.kind=synthetic", "values=false", "policy.publish_interval=2"), "needs values = true"),
        ("sim", ("workload.kind=synthetic", "values=false", "policy.snapshot=none"), "needs values = true"),
    ],
)  # fmt: skip
def test_what_cannot_apply_raises(backend: str, overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ScenarioError, match=said):
        run(load("tiny-hybrid", [*SMALL, *overrides]), backend)


def test_a_device_snapshot_is_priced_as_one_on_simulated_time() -> None:
    host, device = (made("sim", f"policy.snapshot={place}")[0]["phases_ns"] for place in ("host", "device"))
    assert host["snapshot"] != device["snapshot"]
    assert host["diff"] == device["diff"]


def test_truncated_importance_weighs_tokens_that_became_likelier() -> None:
    work = load("tiny-hybrid", [*SMALL, "workload.rl.correction=tis"]).workload
    now, drawn = torch.tensor([[0.0, -1.0, -1.0]]), torch.tensor([[-9.0, -1.0, 0.0]])
    assert importance(now, drawn, work)[0].tolist() == pytest.approx([TIS_CAP, 1.0, 0.36788], abs=1e-4)
    plain: Any = load("tiny-hybrid", [*SMALL]).workload
    assert importance(now, drawn, plain).tolist() == [[1.0, 1.0, 1.0]]
