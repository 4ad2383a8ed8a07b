"""The commands: what they print, what they write, and with which code they end."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from weightsync.cli import fuzzing, main, scenario_files
from weightsync.cli.main import app
from weightsync.cli.scenario import Scenario
from weightsync.testing.fuzz import Case, Finding, fuzz
from weightsync.testing.wrong_protocols import ReusedVersion


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def said(result: Result) -> str:
    return " ".join((result.stdout + result.stderr).split())


def test_version(cli: CliRunner) -> None:
    assert cli.invoke(app, ["--version"]).stdout.strip() == version("weightsync")


def test_run_writes_its_files_and_says_the_verdict(cli: CliRunner, tmp_path: Path) -> None:
    done = cli.invoke(
        app, ["run", "tiny-sync", "--backend", "sim", "--seed", "2", "--out", str(tmp_path / "out")]
    )
    assert done.exit_code == 0, done.output
    assert "all 16 checks hold, bit for bit" in said(done)
    assert "modelled" in said(done)
    assert "measured" not in said(done)
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == [
        "conditions.json", "index.html", "pictures", "result.json", "status.json", "status.lock", "trace.json",
    ]  # fmt: skip
    assert "page: " in said(done)
    conditions = json.loads((tmp_path / "out" / "conditions.json").read_text())
    assert conditions["seed"] == 2


def test_a_planted_flip_ends_with_code_1_and_its_place(cli: CliRunner) -> None:
    flip = "faults.flip_bit={rollout=1,rank=0,version=3}"
    done = cli.invoke(app, ["run", "tiny-sync", "--backend", "inprocess", "--set", flip])
    assert done.exit_code == 1
    assert "rollout 1, rank 0, version 3: model." in said(done)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "tiny-sync", "--set", "policy.recieve=stream"], "near names: policy.receive"),
        (["run", "tiny-synk"], "near names: tiny-sync"),
        (["run", "tiny-sync", "--backend", "simm"], "near names: sim"),
        (["run", "tiny-sync", "--backend", "sim", "--set", "hardware=lap"], "laptop"),
        (["run", "tiny-sync", "--backend", "gloo", "--set", "values=false"], "take sim"),
        (["demo", "--checkpoint", "no-such-folder"], "no-such-folder"),
        (["plan", "tiny-sync", "--set", "rollouts.7.tp=1"], "names entry '7'"),
        (["plan", "tiny-sync", "--set", "trainer.ep=2"], "'trainer.ep' shares experts out"),
        (
            ["run", "tiny-sync", "--set", "trainer.etp=1"],
            "'trainer.etp' shares experts out, and this model has none",
        ),
        (
            ["run", "tiny-sync", "--backend", "sim", "--set", "rollouts.1.ep=2"],
            "'rollouts.1.ep' shares experts out",
        ),
        (["fuzz", "--receive", "all"], "expected stage or stream"),
        (["scenarios", "show", "tiny"], "near names"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else "",
)
def test_a_wrong_request_is_a_sentence_and_code_2(
    cli: CliRunner, arguments: list[str], sentence: str
) -> None:
    done = cli.invoke(app, arguments)
    assert done.exit_code == 2
    assert sentence in said(done)
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", [["demo"], ["run", "tiny-sync", "--backend", "sim"]])
def test_a_wrong_request_leaves_the_log_of_a_former_run_alone(
    cli: CliRunner, tmp_path: Path, command: list[str]
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("a former run\n")
    assert cli.invoke(app, [*command, "--set", "policy.recieve=stage", "--log-json", str(log)]).exit_code == 2
    assert log.read_text() == "a former run\n"


def test_plan_as_json_and_as_tables(cli: CliRunner) -> None:
    found = json.loads(cli.invoke(app, ["plan", "tiny-sync", "--json"]).stdout)
    assert found["exact"]
    assert found["nbytes"] == sum(update["nbytes"] for update in found["updates"])
    assert {one["rank"] for one in found["memory"]} == {
        "trainer.0", "trainer.1", "rollout0.0", "rollout1.0", "rollout1.1",
    }  # fmt: skip
    text = said(cli.invoke(app, ["plan", "demo"]))
    assert "trainer.0 broadcasts to rollout0.0, rollout1.0, rollout1.1" in text
    assert "deltas are estimated at workload.density = 3 %" in text


def test_scenarios_are_listed_shown_and_copied_to_run(cli: CliRunner, tmp_path: Path) -> None:
    assert {"demo", "tiny-fault", "tiny-sync"} <= set(cli.invoke(app, ["scenarios", "list"]).stdout.split())
    text = cli.invoke(app, ["scenarios", "show", "tiny-sync"]).stdout
    copy = tmp_path / "mine.toml"
    assert cli.invoke(app, ["scenarios", "copy", "tiny-sync", str(copy)]).exit_code == 0
    assert copy.read_text() == text
    copy.write_text(text.replace("steps = 3", "steps = 2"))
    assert "all 11 checks hold" in said(cli.invoke(app, ["run", str(copy), "--backend", "sim"]))
    assert cli.invoke(app, ["scenarios", "copy", "tiny-sync", str(copy)]).exit_code == 2


def test_backends_says_what_is_here(cli: CliRunner) -> None:
    words = said(cli.invoke(app, ["backends"]))
    for name in ("inprocess", "gloo", "sim"):
        assert f"{name} │ yes" in words


def test_fuzz_finds_nothing_in_the_right_protocol(cli: CliRunner) -> None:
    done = cli.invoke(app, ["fuzz", "--seeds", "3"])
    assert done.exit_code == 0, done.output
    assert "no promise was broken in 3 runs" in said(done)


def test_fuzz_prints_what_it_found_and_ends_with_code_1(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(cases: list[Case], **more: object) -> Finding | None:
        return fuzz(ReusedVersion, seeds=40)

    monkeypatch.setattr(fuzzing, "fuzz", wrong)
    done = cli.invoke(app, ["fuzz", "--seeds", "1"])
    assert done.exit_code == 1, done.output
    text = said(done)
    assert "found in run" in text
    assert "its trace:" in text
    assert "seed" in text


def taken_by_the_demo(cli: CliRunner, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Scenario:
    """The scenario that ``weightsync demo`` runs; it is not run."""
    taken: list[Scenario] = []

    def note(console: object, scenario: Scenario, *more: object) -> None:
        taken.append(scenario)

    monkeypatch.setattr(main, "_run_all", note)
    done = cli.invoke(app, ["demo", *arguments])
    assert done.exit_code == 0, done.output
    return taken[0]


def test_the_rl_demo_runs_tiny_hybrid_and_a_pretrained_model_gently(
    cli: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert taken_by_the_demo(cli, monkeypatch) == scenario_files.load("demo")
    assert taken_by_the_demo(cli, monkeypatch, "--rl") == scenario_files.load("tiny-hybrid")
    own = taken_by_the_demo(
        cli, monkeypatch, "--rl", "--checkpoint", "folder", "--steps", "3", "--set", "workload.lr=1e-6"
    )
    assert (own.model.checkpoint, own.model.shape, own.workload.steps) == ("folder", None, 3)
    assert own.workload.lr == 1e-6  # the last word is the user's
    assert (own.workload.rl.entropy, own.workload.rl.base) == (0.0, 10)


def sides(kind: str, *events: dict[str, Any], wrong: int) -> list[dict[str, Any]]:
    """A measured and a modelled result of three updates, whose digests differ from update ``wrong`` on."""
    found = []
    for name in ("measured", "modelled"):
        updates = [
            {"update": n, "committed": True, "digests": {"trainer.0": name if n >= wrong else "equal"}}
            for n in (1, 2, 3)
        ]
        found.append({"scenario": {"workload": {"kind": kind}}, "events": list(events), "updates": updates})
    return found


def test_digests_of_both_clocks_are_compared_up_to_what_makes_the_job_another() -> None:
    lost = {"event": "lost", "update": 2}
    assert main._same_digests(*sides("train", wrong=4)).ok
    assert not main._same_digests(*sides("train", wrong=3)).ok
    assert not main._same_digests(*sides("train", lost, wrong=3)).ok  # a loss changes no step of this job
    assert not main._same_digests(*sides("rl", wrong=3)).ok
    row = main._same_digests(*sides("rl", lost, wrong=3))  # others draw its samples from update 3 on
    assert (row.ok, row.name) == (True, "digests on gloo and on sim, up to the loss after update 2")
    assert not main._same_digests(*sides("rl", lost, wrong=2)).ok
