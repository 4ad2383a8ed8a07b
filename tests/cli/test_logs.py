"""Logs: one JSON object a line, events with their keys, from which the run's outcomes can be told again."""

from __future__ import annotations

import json
import logging
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from weightsync.cli import logs
from weightsync.cli.log_check import EVENTS, faults_of, lines, outcomes_of, rows_of
from weightsync.cli.main import app
from weightsync.cli.record import RankRecord
from weightsync.cli.run import run
from weightsync.cli.scenario_files import load
from weightsync.cli.telling import Wire, hear
from weightsync.reference.events import TRAINER, log
from weightsync.testing.faults import FaultRun

# ---- runs and commands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sim", "inprocess", "gloo"])
def test_a_run_writes_a_line_an_event_and_they_tell_its_result(tmp_path: Path, backend: str) -> None:
    file, out = tmp_path / "log.jsonl", tmp_path / "out"
    flip = "faults.flip_bit={rollout=1,rank=0,version=2}"
    options = ["--backend", backend, "--set", flip, "--set", "policy.lease_ms=30000"]
    done = CliRunner().invoke(app, ["run", "tiny-sync", *options, "--log-json", str(file), "--out", str(out)])
    assert done.exit_code == 1, done.output
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [fault for line in found for fault in faults_of(line)] == []
    names = [line["event"] for line in found]
    assert names[0] == "run_started"
    assert names[-1] == "run_ended"
    assert names.count("update_started") == 3
    assert [name for name in names if name in ("update_committed", "update_aborted")] == [
        "update_committed", "update_committed", "update_aborted",  # whose digest finds the flipped bit
    ]  # fmt: skip
    result = json.loads((out / "result.json").read_text())
    assert outcomes_of(found) == rows_of(result)
    digests = [line["digest"] for line in found if line["event"] == "update_committed"]
    assert digests == [row["digests"]["trainer.0"] for row in result["updates"] if row["committed"]]
    assert {key: found[-1][key] for key in ("ok", "verdict")} == {
        "ok": False,
        "verdict": result["verdict"]["text"],
    }
    assert found[0]["fingerprint"] == result["fingerprint"]
    (failed,) = [line for line in found if line["event"] == "audit_failed"]
    assert (failed["rank"], failed["version"]) == ("rollout1.0", 2)
    if backend == "sim":
        exposed = sum(line["exposed_ns"] for line in found if "exposed_ns" in line)
        assert exposed == result["phases_ns"]["exposed"]


def test_on_sim_equal_runs_log_equal_lines_and_logging_changes_no_result(tmp_path: Path) -> None:
    written = []
    for number in range(2):
        file, out = tmp_path / f"{number}.jsonl", tmp_path / f"out{number}"
        options = ["--backend", "sim", "--out", str(out)] + (["--log-json", str(file)] if number < 2 else [])
        assert CliRunner().invoke(app, ["run", "tiny-sync", *options]).exit_code == 0
        written.append(file.read_bytes())
    assert written[0] == written[1]
    plain = tmp_path / "plain"
    assert (
        CliRunner().invoke(app, ["run", "tiny-sync", "--backend", "sim", "--out", str(plain)]).exit_code == 0
    )
    assert (plain / "result.json").read_bytes() == (tmp_path / "out0" / "result.json").read_bytes()


def test_a_dash_writes_to_stderr_and_a_run_that_fails_ends_with_its_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: Any, **more: Any) -> None:
        raise logs.LogFileError("it broke")

    monkeypatch.setattr("weightsync.cli.main.run", fail)
    done = CliRunner().invoke(app, ["run", "tiny-sync", "--log-json", "-"])
    assert done.exit_code == 2
    found = [json.loads(line) for line in done.stderr.splitlines() if line.startswith("{")]
    assert [line["event"] for line in found] == ["run_started", "run_ended"]
    assert (found[1]["ok"], found[1]["verdict"], found[1]["level"]) == (False, "it broke", "ERROR")


def test_a_file_that_cannot_be_written_is_a_sentence_and_code_2(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "tiny-sync", "--log-json", str(tmp_path / "no" / "log")])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


def test_under_torchrun_only_the_first_process_opens_the_file(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    with logs.log_json(str(file), {"TORCHELASTIC_RUN_ID": "x", "RANK": "1"}):
        log(logs.RUN, logging.INFO, "step", {"step": 1})
    assert not file.exists()


def test_without_the_option_the_library_says_nothing_and_sets_no_handler(
    capfd: pytest.CaptureFixture[str],
) -> None:
    record = run(load("tiny-sync"), "inprocess")
    assert record is not None
    log(TRAINER, logging.ERROR, "update_aborted", {"reason": "x"})
    assert capfd.readouterr() == ("", "")
    assert [type(handler) for handler in logging.getLogger("weightsync").handlers] == [logging.NullHandler]


# ---- lines ------------------------------------------------------------------------------------------------------


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=5) | st.floats()
events = st.fixed_dictionaries(
    {
        "event": st.sampled_from(sorted(EVENTS)),
        "data": st.dictionaries(st.sampled_from("abcde"), scalars | st.lists(scalars, max_size=2)),
        "rank": st.none() | st.just("trainer.0"),
        "update": st.none() | st.integers(0, 9),
        "time_ns": st.none() | st.integers(0, 2**62),
    }
)


@given(events, st.sampled_from([logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR]))
def test_a_line_is_strict_json_and_the_same_after_the_way_to_the_launcher(
    what: dict[str, Any], level: int
) -> None:
    stream = StringIO()
    with lines() as said, logs.attached(logs.ToLauncher(Wire(stream).say)):
        log(TRAINER, level, **what)
    (line,) = stream.getvalue().splitlines()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    with lines() as heard:
        hear(line, sys.exit, sys.exit)
    assert heard == said


def test_a_record_without_an_event_is_a_message() -> None:
    with lines() as found:
        logging.getLogger("weightsync.backends.control").error("%s lost the store: %s", "trainer.0", "gone")
    (line,) = found
    assert (line["event"], line["message"]) == ("message", "trainer.0 lost the store: gone")
    assert faults_of(line) == []
    assert faults_of({**line, "message": None}) == ["a message has no text"]


def test_the_lead_logs_what_the_curve_says_of_the_step_before_its_update() -> None:
    faulty = FaultRun()
    record = RankRecord(curve=[{"step": 1, "loss": 2.5}, {"step": 2, "loss": float("nan")}])
    with lines() as found:
        for half in faulty.trainers:
            logs.step(half, record)
        logs.step(faulty.trainers[0], RankRecord())
    (line,) = found
    assert faults_of(line) == []
    assert (line["rank"], line["update"], line["step"], line["loss"]) == ("trainer.0", 1, 2, "nan")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"event": "update_done"}, "is none"),
        ({"more": 1}, "too many"),
        ({"logger": "weightsync.run"}, "is logged by"),
        ({"time_ns": None}, "time None"),
        ({"rank": None}, "rank None"),
    ],
)
def test_a_line_that_is_not_as_documented_is_seen(change: dict[str, Any], sentence: str) -> None:
    with lines() as found:
        FaultRun().run()
    line = next(line for line in found if line["event"] == "update_committed")
    assert faults_of(line) == []
    assert any(sentence in fault for fault in faults_of(line | change))


def test_every_event_is_in_the_docs_and_the_docs_know_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "running.md").read_text()
    table = page.split("| event |")[1].split("\n\n")[0]
    named = {row.split("`")[1] for row in table.splitlines()[2:]}
    assert named == set(EVENTS) | {logs.MESSAGE}
