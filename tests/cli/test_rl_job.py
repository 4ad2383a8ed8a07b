"""The RL job as a whole: the same bits on every backend, odd sizes, and a reward that rises."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.cli import result as results
from weightsync.cli.log_check import faults_of, lines
from weightsync.cli.logs import KEYS
from weightsync.cli.record import RunRecord
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError
from weightsync.cli.scenario_files import load

SMALL = (
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=48",
    "model.shape.num_hidden_layers=1",
    "model.shape.num_attention_heads=4",
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
    return results.make_result(scenario, record), record


def digests(result: results.Result) -> list[Any]:
    return [(update["version"], update["digests"]) for update in result["updates"] if update["committed"]]


def curve(record: RunRecord) -> list[dict[str, Any]]:
    return [step for step in record.trainers[0].curve if "reward" in step]


@pytest.fixture(scope="module")
def reference() -> tuple[results.Result, RunRecord]:
    return made("inprocess")


def test_every_version_is_committed_and_audited_and_changes_the_weights(
    reference: tuple[results.Result, RunRecord],
) -> None:
    result, record = reference
    assert result["verdict"]["ok"], result["verdict"]["text"]
    assert len(record.audits) == 4 * 3
    assert len({str(found) for _, found in digests(result)}) == 4


@pytest.mark.parametrize("backend", ["sim", "gloo"])
def test_each_backend_gives_each_version_the_same_bits_and_logs_every_step(
    reference: tuple[results.Result, RunRecord], backend: str
) -> None:
    with lines() as found:
        result, record = made(backend)
    assert result["verdict"]["ok"], result["verdict"]["text"]
    steps = [line for line in found if line["event"] == "step"]
    assert [fault for line in steps for fault in faults_of(line)] == []
    assert [line["update"] for line in steps] == [1, 2, 3, 4]
    said = [{key: value for key, value in line.items() if key not in KEYS} for line in steps]
    assert said == record.trainers[0].curve
    assert {"step", "reward", "loss", "lr"} <= said[-1].keys()
    assert digests(result) == digests(reference[0])
    assert curve(record) == curve(reference[1])
    assert len(curve(record)) == 3
    if backend == "gloo":
        assert record.trainers[1].curve == record.trainers[0].curve


def test_another_seed_gives_other_bits(reference: tuple[results.Result, RunRecord]) -> None:
    assert digests(made("inprocess", "workload.seed=1")[0]) != digests(reference[0])


@pytest.mark.parametrize(
    "overrides",
    [
        ("workload.steps=1",),
        ("workload.rl.digits=8",),
        ("workload.rl.task=add", "workload.rl.algorithm=reinforce"),
        ("workload.rl.prompts=1",),  # fewer than rollouts
        ("rollouts=[{tp = 1}, {tp = 2, fused = true}, {tp = 1, fused = true}]",),
        ("trainer.tp=4", "rollouts.0.tp=4"),  # more ranks than key/value heads
        ("trainer.tp=3", "rollouts.1.tp=3"),  # uneven heads, and a vocabulary of 16 rows on 3 ranks
        ("policy.receive=stream",),
        ("model.shape.model_type=qwen2", "model.shape.tie_word_embeddings=false"),
        ("model.shape.dtype=float32",),
    ],
    ids=str,
)
def test_odd_sizes_run_and_what_rollouts_hold_is_what_they_sample_from(overrides: tuple[str, ...]) -> None:
    result, record = made("inprocess", "workload.steps=3", *overrides)
    assert result["verdict"]["ok"], result["verdict"]["text"]
    assert all(step["mismatch"] < 1e-4 for step in curve(record))
    assert len(curve(record)) == len(record.outcomes) - 1


def test_the_reward_rises() -> None:
    _, record = made(
        "inprocess",
        "workload.steps=40",
        "workload.lr=1e-2",
        "workload.rl.prompts=48",
        "policy.verify_every=0",
    )
    rewards = [step["reward"] for step in curve(record)]
    assert sum(rewards[-5:]) / 5 - sum(rewards[:5]) / 5 > 0.3


@pytest.mark.parametrize("times", [2, 4])
def test_a_batch_in_several_optimizer_steps_has_the_same_bits_on_every_backend(times: int) -> None:
    asked = (f"workload.rl.num_iters_per_train_update={times}", "workload.steps=3")
    (plain, first), *others = [made(backend, *asked) for backend in ("inprocess", "sim", "gloo")]
    assert plain["verdict"]["ok"], plain["verdict"]["text"]
    assert [step["optimizer_steps"] for step in curve(first)] == [times] * 2
    for result, record in others:
        assert result["verdict"]["ok"], result["verdict"]["text"]
        assert digests(result) == digests(plain)
        assert curve(record) == curve(first)
    unsplit, _ = made("inprocess", "workload.steps=3")
    assert digests(unsplit)[0] == digests(plain)[0]  # the first weights
    assert digests(unsplit)[1] != digests(plain)[1]


def test_a_split_that_leaves_samples_over_is_refused_by_name() -> None:
    with pytest.raises(ScenarioError, match="num_iters_per_train_update 5 does not divide the 24 samples"):
        load("tiny-hybrid", [*SMALL, "workload.rl.num_iters_per_train_update=5"])


def test_modelled_training_takes_longer_in_more_optimizer_steps() -> None:
    def trained(times: int) -> int:
        return made("sim", f"workload.rl.num_iters_per_train_update={times}", "workload.steps=2")[0][
            "job_ns"
        ]["train"]

    one = trained(1)
    assert [trained(times) for times in (2, 4)] == [2 * one, 4 * one]
