"""Runs of one process: the same bytes for a seed, what a result holds, and checks that can fail."""

from __future__ import annotations

import dataclasses
import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.cli import result as results
from weightsync.cli.dry_run import dry_run
from weightsync.cli.model.checkpoint import make_checkpoint
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.per_update import tensors_sent
from weightsync.cli.record import RankRecord, RunRecord
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError
from weightsync.cli.scenario_files import load
from weightsync.cli.trace_check import phase_ns, validate
from weightsync.cli.verify import Audit, differences, flip_bit, group_digests
from weightsync.cli.workload import deployment
from weightsync.reference.errors import BackendUnavailable
from weightsync.reference.model import ModelShape
from weightsync.reference.protocol import Outcome
from weightsync.reference.trace import Span, Trace

OWN = {"total", "exposed"}
"""Phases that are no sums of slices."""
NINE_TO_THREE = ("model.shape.num_attention_heads=9", "model.shape.num_key_value_heads=3")
"""Query and key/value heads that two ranks cannot divide."""


def made(*overrides: str, backend: str = "sim", seed: int | None = None) -> tuple[results.Result, RunRecord]:
    scenario = load("tiny-sync", overrides)
    record = run(scenario, backend, seed)
    assert record is not None
    return results.make_result(scenario, record), record


def written(folder: Path, seed: int) -> dict[str, bytes]:
    result, record = made(seed=seed)
    results.write(folder, result, record)
    return {name: (folder / name).read_bytes() for name in ("result.json", "trace.json")}


def test_sim_is_byte_identical_for_a_seed_and_other_for_another(tmp_path: Path) -> None:
    first, again, other = (written(tmp_path / str(n), seed) for n, seed in enumerate((7, 7, 8)))
    assert first == again
    assert json.loads(first["result.json"])["phases_ns"] != json.loads(other["result.json"])["phases_ns"]
    assert first["trace.json"] != other["trace.json"]


def test_the_trace_is_valid_and_sums_to_the_phases(tmp_path: Path) -> None:
    files = written(tmp_path, 0)
    trace, result = json.loads(files["trace.json"]), json.loads(files["result.json"])
    assert validate(trace) == []
    assert phase_ns(trace) == {phase: ns for phase, ns in result["phases_ns"].items() if phase not in OWN}
    assert result["phases_ns"].keys() >= OWN | {"paused"}
    assert 0 < result["phases_ns"]["exposed"] <= result["phases_ns"]["total"]


def test_a_result_names_no_machine_and_conditions_do(tmp_path: Path) -> None:
    result, record = made()
    results.write(tmp_path, result, record)
    text = (tmp_path / "result.json").read_text()
    for secret in (platform.node(), platform.platform(), str(Path.cwd()), str(tmp_path)):
        assert secret not in text
    conditions = json.loads((tmp_path / "conditions.json").read_text())
    assert conditions["machine"]["host"] == platform.node()
    assert conditions["packages"]["torch"]


def test_a_checkpoint_stands_in_a_result_by_its_name(tmp_path: Path) -> None:
    shape = ModelShape(
        vocab=5, hidden=4, intermediate=4, layers=1, heads=2, kv_heads=2, head_dim=2, tied=False
    )
    folder = make_checkpoint(tmp_path / "mine", DecoderConfig("llama", shape), 0)
    result, _ = made(f"model.checkpoint={folder}")
    assert result["verdict"]["ok"]
    assert result["scenario"]["model"]["checkpoint"] == "mine"
    assert str(tmp_path) not in json.dumps(result)


@pytest.mark.parametrize(
    "overrides", [(), ("workload.density=0.0",), ("policy.receive=stream",), NINE_TO_THREE], ids=str
)
@pytest.mark.parametrize("seed", [0, 5])
def test_planned_bytes_are_the_bytes_sent(overrides: tuple[str, ...], seed: int) -> None:
    dry = dry_run(load("tiny-sync", overrides), seed)
    result, _ = made(*overrides, seed=seed)
    assert dry.exact
    assert [u.nbytes for u in dry.updates] == [u["full_bytes"] + u["delta_bytes"] for u in result["updates"]]
    assert [(u.kind, u.changed) for u in dry.updates] == [
        (u["kind"], u["changed"]) for u in result["updates"]
    ]


def test_training_makes_the_plan_an_estimate_that_says_so() -> None:
    dry = dry_run(load("demo"))
    assert not dry.exact
    assert "workload.density = 3 %" in dry.note


def test_a_plan_gives_each_rank_the_memory_of_the_heads_it_holds() -> None:
    memory = {one.rank: one for one in dry_run(load("tiny-sync", NINE_TO_THREE)).memory}
    head = 2 * 2 * 2  # bytes: head_dim * hidden * itemsize
    # Five heads and four; q and o have one row or column per query head, k and v two heads on either rank.
    for side in ("trainer", "rollout1"):
        assert memory[f"{side}.0"].weights - memory[f"{side}.1"].weights == 2 * head
    assert memory["rollout1.0"].undo > memory["rollout1.1"].undo
    assert memory["trainer.1"].buckets < memory["trainer.0"].buckets


@pytest.mark.parametrize("overrides", [(), NINE_TO_THREE], ids=str)
def test_without_values_the_verbs_bytes_and_messages_are_those_of_a_run_with_values(
    overrides: tuple[str, ...],
) -> None:
    (real, _), (counted, record) = made(*overrides), made(*overrides, "values=false")
    assert real["verbs"] == counted["verbs"]
    keys = ("kind", "changed", "full_bytes", "delta_bytes", "committed")
    assert [[u[k] for k in keys] for u in real["updates"]] == [
        [u[k] for k in keys] for u in counted["updates"]
    ]
    assert record.audits == []
    assert "no bytes were compared" in counted["verdict"]["text"]


@pytest.mark.parametrize("overrides", [(), NINE_TO_THREE], ids=str)
def test_inprocess_shows_the_verbs_of_sim(overrides: tuple[str, ...]) -> None:
    (sim, _), (inprocess, _) = made(*overrides), made(*overrides, backend="inprocess")
    assert inprocess["verdict"]["ok"]
    assert inprocess["verbs"] == sim["verbs"]
    assert [u["digests"] for u in inprocess["updates"]] == [u["digests"] for u in sim["updates"]]


@pytest.mark.parametrize("backend", ["sim", "inprocess"])
@pytest.mark.parametrize(("rollout", "rank"), [(0, 0), (1, 1)])
def test_a_flipped_bit_is_named(backend: str, rollout: int, rank: int) -> None:
    flip = f"faults.flip_bit={{rollout = {rollout}, rank = {rank}, version = 2}}"
    result, record = made(flip, backend=backend)
    verdict = result["verdict"]
    assert not verdict["ok"]
    assert f"rollout {rollout}, rank {rank}, version 2: model." in verdict["text"]
    assert ".weight: 1 of " in verdict["text"]
    assert all(one.check.ok for one in record.audits if one.version == 1)


def test_a_seed_of_the_command_line_leaves_the_scenario() -> None:
    (own, _), (given, _) = made(), made(seed=3)
    assert (own["scenario"], own["fingerprint"]) == (given["scenario"], given["fingerprint"])
    assert (own["seed"], given["seed"]) == (0, 3)


def test_an_unknown_backend_lists_near_names() -> None:
    with pytest.raises(BackendUnavailable, match="near names: gloo"):
        run(load("tiny-sync"), "glo")


def test_only_sim_counts_without_values() -> None:
    with pytest.raises(ScenarioError, match="take sim"):
        run(load("tiny-sync", ["values=false"]), "inprocess")


def test_differences_name_tensor_place_and_bits() -> None:
    right = {"a": torch.tensor([0.0, 1.0, float("nan")]), "b": torch.zeros(2, dtype=torch.bfloat16)}
    held = {name: tensor.clone() for name, tensor in right.items()}
    assert differences(right, held) == ()
    held["a"][0] = -0.0
    assert differences(right, held) == ("a: 1 of 3 elements, first at 0: 0x80000000, expected 0x00000000",)
    assert flip_bit(held) == "a"
    assert differences(right, held)[0].startswith("a: 2 of 3 elements, first at 0")
    assert differences(right, {"b": held["b"]}) == ("a: missing",)
    held["b"] = torch.zeros(3, dtype=torch.bfloat16)
    assert differences({"b": right["b"]}, held) == ("b: torch.bfloat16 [3], expected torch.bfloat16 [2]",)


def test_a_wrong_label_or_a_dirty_rank_fails_its_audit() -> None:
    assert Audit(2, "rollout0.0", 2, None, 1).check.ok
    assert "says it holds version 1 (clean)" in Audit(2, "rollout0.0", 1, None, 1).check.detail
    assert "says it holds version 2 (torn)" in Audit(2, "rollout0.0", 2, "torn", 1).check.detail


def test_digest_shares_add_up_per_rollout_and_wrap() -> None:
    top = (1 << 63) - 1
    shares = [("rollout0.0", 3), ("rollout1.0", top), ("rollout1.1", 1)]
    found = group_digests([Audit(1, rank, 1, None, share) for rank, share in shares])
    assert found == {"rollout0.0": 3, "rollout1.0": -(1 << 63), "rollout1.1": -(1 << 63)}


def record_of(spans: list[Span], outcomes: list[Outcome], **more: Any) -> RunRecord:
    trainers = [
        RankRecord(outcomes=outcomes, inside=[(10, 30), (50, 90)]),
        RankRecord(outcomes=outcomes, inside=[(12, 31), (49, 88)]),
    ]
    return RunRecord("sim", 0, Trace(spans), trainers, **more)


def test_total_exposed_and_paused_are_what_they_are_defined_as() -> None:
    def span(rank: str, verb: str, phase: str, start: int, end: int) -> Span:
        return Span(rank, verb, phase, start, end)

    spans = [
        span("rollout0.0", "resume", "continue", 5, 6),  # no pause before it
        span("rollout0.0", "pause", "pause_flush", 20, 22),
        span("rollout0.0", "resume", "continue", 28, 29),
        span("rollout1.0", "pause", "pause_flush", 21, 22),  # never resumed
    ]
    phases = results.phases_ns(record_of(spans, []))
    assert phases["total"] == (31 - 10) + (90 - 49)
    assert phases["exposed"] == 20 + 40
    assert phases["paused"] == 28 - 22
    assert "apply" not in phases
    assert "paused" not in results.phases_ns(record_of(spans[:1], []))


def test_an_aborted_update_and_a_race_fail_the_run() -> None:
    outcomes = [Outcome(1, 1, True), Outcome(2, 2, False, "update aborted in stage 'start': it said no")]
    rows = results.check_rows(record_of([], outcomes, races=["race on weights"]))
    assert [(row.name, row.ok) for row in rows] == [
        ("update 1 commits", True), ("update 2 commits", False), ("no read races a write", False),
    ]  # fmt: skip
    assert "it said no" in rows[1].detail


def test_times_of_the_updates_add_up_to_those_of_the_run() -> None:
    for backend in ("sim", "inprocess"):
        result, _ = made(backend=backend)
        for key, of in (("total", "total_ns"), ("exposed", "exposed_ns")):
            assert result["phases_ns"][key] == sum(update[of] for update in result["updates"])
        paused = [update["paused_ns"] for update in result["updates"]]
        assert paused[0] == {}  # nothing generates before the first version
        assert all(set(one) == {"rollout0.0", "rollout1.0"} for one in paused[1:])
        assert result["phases_ns"]["paused"] == sum(sum(one.values()) for one in paused)


@pytest.mark.parametrize("density", [0.0, 0.2, 0.9])
def test_tensors_are_counted_as_the_plan_decided(density: float) -> None:
    result, record = made(f"workload.density={density}")
    scenario = load("tiny-sync", [f"workload.density={density}"])
    plan = deployment(scenario).plan
    assert result["dense_bytes"] == plan.update_bytes(None) == result["updates"][0]["full_bytes"]
    for update, outcome in zip(result["updates"], record.outcomes, strict=True):
        sent = update["tensors"]
        assert sum(sent.values()) == result["tensors"]
        if update["kind"] == "full":
            assert sent == {"dense": result["tensors"], "sparse": 0, "unchanged": 0}
        else:
            counts = outcome.counts or ()
            smaller = [6 * n < 2 * meta.numel for n, meta in zip(counts, plan.tensors, strict=True) if n]
            assert (sent["sparse"], sent["dense"]) == (smaller.count(True), smaller.count(False))
            assert sent["unchanged"] == counts.count(0)


def test_tensors_of_an_update_that_sent_nothing_or_of_cut_tensors_are_not_guessed() -> None:
    plan = deployment(load("tiny-sync")).plan
    assert tensors_sent(Outcome(1, None, False, "no"), plan) is None
    cut = dataclasses.replace(plan, piece_elements=4)
    assert tensors_sent(Outcome(1, 1, True, full=(0,)), cut) is None
    assert tensors_sent(Outcome(1, 1, True, full=(0,)), plan) is not None


def test_a_digest_that_differs_turns_the_verdict_even_where_every_byte_is_right() -> None:
    result, record = made()
    assert [row["name"] for row in result["checks"]].count("digest of version 2 on every rank") == 1
    lead = record.trainers[0]
    lead.outcomes[1] = dataclasses.replace(lead.outcomes[1], digest=5)
    (wrong,) = [row for row in results.check_rows(record) if not row.ok]
    assert wrong.name == "digest of version 2 on every rank"
    assert wrong.detail.endswith("expected 0000000000000005")
    assert "rollout1.1 " in wrong.detail


def test_a_rank_record_survives_its_file() -> None:
    record = RankRecord(
        [Span("trainer.0", "diff", "diff", 1, 2, 3, 4, False)],
        [Outcome(1, 1, True, members=(0, 1), full=(1,), changed=2, counts=(2, 0), digest=-5)],
        [(1, 2)],
        [Audit(1, "rollout0.0", 1, None, 7, ("a: missing",))],
    )
    assert RankRecord.of(json.loads(json.dumps(record.to_dict()))) == record
