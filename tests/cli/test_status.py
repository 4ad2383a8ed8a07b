"""``status.json`` and ``weightsync status``: what a run's folder says, while it runs, when it ended, when it died."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from weightsync.cli.main import app
from weightsync.cli.run import run
from weightsync.cli.scenario_files import load
from weightsync.cli.status import ERRORS, FolderInUse, NoStatus, StatusFile, owns_run, read
from weightsync.cli.status_view import print_json, print_table
from weightsync.cli.telling import Wire, hear

LIMIT_S = 120


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("COLUMNS", "200")
    return CliRunner()


def rank(name: str, version: int = 3, dirty: str | None = None, error: str | None = None) -> dict[str, Any]:
    generating = dirty is None if name.endswith(".0") else None
    return {
        "rank": name, "version": version, "dirty": dirty, "highest": version, "epoch": 1,
        "generating": generating, "receiving": None, "buckets": 0, "prepared": False, "error": error,
    }  # fmt: skip


def status(*ranks: dict[str, Any], gone: str | None = None, update: int = 3) -> dict[str, Any]:
    """A trainer at version 3 and one rollout of these ranks."""
    clean = gone is None and all(one.get("dirty", "") is None and one["version"] == 3 for one in ranks)
    rollout = {"rollout": 0, "clean": clean, "gone": gone, "behind": False, "ranks": list(ranks)}
    last = {"update": update, "committed": True, "reason": ""}
    return {
        "version": 3, "highest": 3, "epoch": 1, "update": update, "members": [0], "last": last,
        "clean": clean, "rollouts": [rollout],
    }  # fmt: skip


def board(folder: Path | None) -> StatusFile:
    return StatusFile(folder, scenario="mine", backend="sim", seed=0, steps=3)


def shown(folder: Path) -> str:
    console = Console(file=StringIO(), width=200)
    print_table(folder, None, console)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


# ---- runs write it ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sim", "inprocess", "gloo"])
def test_a_run_leaves_the_state_of_every_rollout_and_its_verdict(
    cli: CliRunner, tmp_path: Path, backend: str
) -> None:
    out = str(tmp_path / "out")
    lease = ["--set", "policy.lease_ms=30000"]
    done = cli.invoke(app, ["run", "tiny-sync", "--backend", backend, "--out", out, *lease])
    assert done.exit_code == 0, done.output
    asked = cli.invoke(app, ["status", out, "--json"])
    assert asked.exit_code == 0, asked.output
    found = json.loads(asked.stdout)
    assert (found["scenario"], found["backend"], found["steps"]) == ("tiny-sync", backend, 3)
    assert (found["state"], found["clean"], found["errors"]) == ("ended", True, [])
    assert "bit for bit" in found["verdict"]
    ranks = [one for rollout in found["status"]["rollouts"] for one in rollout["ranks"]]
    assert [(one["rank"], one["version"], one["dirty"]) for one in ranks] == [
        ("rollout0.0", 3, None), ("rollout1.0", 3, None), ("rollout1.1", 3, None),
    ]  # fmt: skip
    updates = json.loads((tmp_path / "out" / "result.json").read_text())["updates"]
    assert found["status"]["last"].items() <= updates[-1].items()
    table = cli.invoke(app, ["status", out])
    assert table.exit_code == 0
    assert "update 3 of 3, trainer at version 3" in table.stdout


@pytest.mark.parametrize("backend", ["sim", "inprocess"])
def test_it_is_told_after_every_update_and_nothing_of_it_is_in_the_run(backend: str) -> None:
    told: list[dict[str, Any]] = []
    asked = run(load("tiny-sync"), backend, tell=lambda status: told.append(dict(status)))
    plain = run(load("tiny-sync"), backend)
    assert asked is not None
    assert plain is not None
    assert [(one["update"], one["version"], one["clean"]) for one in told] == [
        (n, n, True) for n in (1, 2, 3)
    ]
    if backend == "sim":
        assert asked.trace.spans == plain.trace.spans


def test_a_failed_check_is_said(cli: CliRunner, tmp_path: Path) -> None:
    flip = "faults.flip_bit={rollout=1,rank=0,version=3}"
    assert cli.invoke(app, ["run", "tiny-sync", "--set", flip, "--out", str(tmp_path)]).exit_code == 1
    asked = cli.invoke(app, ["status", str(tmp_path)])
    assert asked.exit_code == 1
    assert "failed: verdict: 2 of 15 checks failed" in " ".join(asked.stdout.split())


# ---- one file, one owner ----------------------------------------------------------------------------------------


def test_a_run_that_fails_says_why_and_one_that_is_interrupted_too(tmp_path: Path) -> None:
    def fail() -> None:
        with board(tmp_path) as mine:
            mine.told(status(rank("rollout0.0")))
            raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        fail()
    found = read(tmp_path)
    assert (found.state, found.clean) == ("failed", False)
    assert found.data["verdict"] == "the run failed: no space"
    with pytest.raises(KeyboardInterrupt), board(tmp_path):
        raise KeyboardInterrupt
    assert read(tmp_path).data["verdict"] == "the run failed: it was interrupted"


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    with board(tmp_path):
        with pytest.raises(FolderInUse, match="choose another folder"), board(tmp_path):
            raise AssertionError
        assert read(tmp_path).state == "running"
    with board(tmp_path) as mine:
        mine.ended(True, "verdict: well")
    assert read(tmp_path).state == "ended"


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with board(None) as mine:
        mine.told(status(rank("rollout0.0")))
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_the_first_process_owns_the_run() -> None:
    assert owns_run({})
    assert owns_run({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"})
    assert not owns_run({"TORCHELASTIC_RUN_ID": "x", "RANK": "3"})


OWNER = """
import sys
from pathlib import Path
from weightsync.cli.status import StatusFile
with StatusFile(Path(sys.argv[1]), scenario="mine", backend="sim", seed=0, steps=3):
    print("owns", flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_is_recognised_whatever_its_file_says(cli: CliRunner, tmp_path: Path) -> None:
    command = [sys.executable, "-c", OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owns\n"
        assert read(tmp_path).state == "running"
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait(LIMIT_S)
    assert json.loads((tmp_path / "status.json").read_text())["state"] == "running"
    assert read(tmp_path).state == "dead"
    asked = cli.invoke(app, ["status", str(tmp_path), "--watch"])  # ends at once
    assert asked.exit_code == 1
    assert "ended without a verdict" in asked.stdout


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    stop = threading.Event()
    broken: list[Exception] = []

    def look() -> None:
        while not stop.is_set():
            try:
                read(tmp_path)
            except NoStatus as error:
                broken.append(error)

    with board(tmp_path) as mine:
        reader = threading.Thread(target=look)
        reader.start()
        for update in range(200):
            mine.told(status(*[rank(f"rollout0.{n}") for n in range(50)], update=update))
        stop.set()
        reader.join(LIMIT_S)
    assert broken == []


def test_the_last_errors_are_kept_each_once(tmp_path: Path) -> None:
    with board(tmp_path) as mine:
        for update in range(ERRORS + 5):
            one = status(rank("rollout0.0", error=f"update {update}: it broke"), update=update)
            mine.told(one)
            mine.told(one)
        found = read(tmp_path).data["errors"]
    assert [error["update"] for error in found] == list(range(5, ERRORS + 5))
    assert found[0] == {"update": 5, "of": "rollout0.0", "error": "update 5: it broke"}


# ---- what is said of it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (status(rank("rollout0.0", 1)), "│ 1 │ 2 │ behind │ yes │"),
        (status(rank("rollout0.0", 3, "torn by a fault")), "dirty: torn by a fault │ paused │"),
        (status(rank("rollout0.0"), gone="rollout0.0 was lost"), "gone: rollout0.0 was lost"),
        (status({"rank": "rollout0.0", "silent": "no answer", "version": 0}), "silent │ - │ no answer"),
        (status(rank("rollout0.0"), rank("rollout0.1", 2)), "│ 1 │ 2 │ 1 │ behind │ - │"),
        (status(rank("rollout0.0", 2, error="[/gloo/pair.cc] reset")), "│ yes │ [/gloo/pair.cc] reset"),
    ],
    ids=["behind", "dirty", "gone", "silent", "one rank behind", "an error with brackets"],
)
def test_what_is_not_clean_is_shown_with_why_and_code_1(
    cli: CliRunner, tmp_path: Path, what: dict[str, Any], sentence: str
) -> None:
    with board(tmp_path) as mine:
        mine.told(what)
        assert sentence in shown(tmp_path)
        assert cli.invoke(app, ["status", str(tmp_path)]).exit_code == 1
        mine.told(status(rank("rollout0.0")))
        assert cli.invoke(app, ["status", str(tmp_path)]).exit_code == 0


def test_before_the_first_update_nothing_is_called_clean(cli: CliRunner, tmp_path: Path) -> None:
    with board(tmp_path):
        asked = cli.invoke(app, ["status", str(tmp_path)])
    assert asked.exit_code == 1
    assert "no update is over yet" in asked.stdout


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "holds no status.json"),
        ("{", "is no JSON"),
        ('{"format": 9}', "has format 9"),
        ("[]", "'list'"),
    ],
)
def test_a_folder_without_a_status_is_a_sentence_and_code_2(
    cli: CliRunner, tmp_path: Path, text: str | None, sentence: str
) -> None:
    if text is not None:
        (tmp_path / "status.json").write_text(text)
    asked = cli.invoke(app, ["status", str(tmp_path)])
    assert asked.exit_code == 2
    assert sentence in " ".join(asked.stderr.split())
    assert "Traceback" not in asked.output


def test_a_folder_of_several_runs_names_them(cli: CliRunner, tmp_path: Path) -> None:
    with board(tmp_path / "gloo"):
        asked = cli.invoke(app, ["status", str(tmp_path)])
    assert asked.exit_code == 2
    assert str(tmp_path / "gloo") in asked.stderr.replace("\n", "")


def steps(*doing: Callable[[], None]) -> Callable[[], None]:
    """What happens between two looks, one thing at a time; one look too many fails."""
    left = list(doing)
    return lambda: left.pop(0)()


def test_watching_shows_every_change_and_ends_with_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with board(tmp_path) as mine:
        mine.told(status(rank("rollout0.0", 1), update=1))
        changes = steps(
            lambda: None,
            lambda: mine.told(status(rank("rollout0.0"))),
            lambda: mine.ended(True, "verdict: well"),
        )
        found = print_json(tmp_path, changes)
    assert found.clean
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["state"], line["clean"]) for line in lines] == [
        ("running", False), ("running", True), ("ended", True),
    ]  # fmt: skip
    with board(tmp_path) as mine:
        console = Console(file=StringIO(), width=200)
        found = print_table(tmp_path, steps(lambda: mine.ended(False, "verdict: wrong")), console)
    assert not found.clean
    assert "failed: verdict: wrong" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_word_on_the_wire_is_heard_and_what_a_library_prints_is_not() -> None:
    stream = StringIO()
    wire = Wire(stream)
    wire.done(2)
    wire.status({"version": 3})
    heard: list[object] = []
    for line in [*stream.getvalue().splitlines(), "warning: x", "7", '{"done": "two"}', "", "null"]:
        hear(line, heard.append, heard.append)
    assert heard == [2, {"version": 3}]
