"""A killed rollout of a gloo run is started again, is taken in again, and the run ends well."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightsync.backends.store import host_store
from weightsync.cli.launch import run_gloo
from weightsync.cli.log_check import faults_of, gone_of, lines, outcomes_of, rows_of
from weightsync.cli.losses import RESTARTS
from weightsync.cli.main import app
from weightsync.cli.processes import Processes
from weightsync.cli.rank_run import Errand
from weightsync.cli.record import RunRecord
from weightsync.cli.result import check_rows, make_result
from weightsync.cli.run import run
from weightsync.cli.scenario import ScenarioError
from weightsync.cli.scenario_files import load
from weightsync.cli.status import status_of_run
from weightsync.cli.workload import deployment
from weightsync.reference.members import RankId

CONTINUE = "policy.on_rollout_loss=continue"


def killing(rank: int, step: int, steps: int) -> list[str]:
    return [CONTINUE, f"faults.kill={{rollout=1,rank={rank},step={step}}}", f"workload.steps={steps}"]


@pytest.mark.parametrize(("rank", "step"), [(0, 1), (1, 2)])
def test_a_killed_rank_is_back_with_its_rollout_and_the_run_ends_well(
    tmp_path: Path, rank: int, step: int
) -> None:
    scenario = load("tiny-sync", killing(rank, step, 4))
    told: list[Mapping[str, Any]] = []
    with lines() as found:
        record = run_gloo(scenario, lambda done: None, tell=told.append)
    assert record is not None
    assert_logged(record, found)
    assert_shown(record, told, tmp_path)
    rows = check_rows(record)
    assert [row for row in rows if not row.ok] == []
    events = {event["event"]: event for event in record.events}
    assert [event["event"] for event in record.events] == ["lost", "restarted", "rejoined"]
    lost = {"rollout": 1, "rank": f"rollout1.{rank}", "how": "was ended by SIGKILL", "planned": True}
    assert lost.items() <= events["lost"].items()
    assert events["lost"]["update"] >= step
    back = record.outcomes[events["rejoined"]["update"] - 1]
    assert (back.committed, back.rejoined, 1 in back.full, 0 in back.full) == (True, (1,), True, False)
    assert f"rollout 1 rejoined in update {back.update}" in [row.name for row in rows]
    assert {one.rank for one in record.audits if one.version == record.outcomes[-1].version} == {
        "rollout0.0", "rollout1.0", "rollout1.1",
    }  # fmt: skip
    assert all(audit.check.ok for audit in record.audits)
    tried = [outcome.version for outcome in record.outcomes if outcome.version is not None]
    assert tried == sorted(set(tried))
    result = make_result(scenario, record)
    assert result["verdict"]["ok"]
    assert result["events"] == record.events
    times = [event["at_ns"] for event in result["events"]]
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 600 * 10**9


def assert_logged(record: RunRecord, found: list[dict[str, Any]]) -> None:
    """The log tells the loss, the return and every update again."""
    assert [fault for line in found for fault in faults_of(line)] == []
    assert outcomes_of(found) == rows_of(make_result(load("tiny-sync"), record))
    assert gone_of(found) == {}
    lost, back = [line for line in found if line["event"] in ("rollout_lost", "rollout_back")]
    assert (lost["rollout"], back["rollout"], back["full"]) == (1, 1, True)
    assert [line["update"] for line in found if line["event"] == "step"] == [1, 2, 3, 4]


def assert_shown(record: RunRecord, told: list[Mapping[str, Any]], folder: Path) -> None:
    """``weightsync status`` shows a rollout that is gone after an update, and that it is back after the last."""
    shown = []
    with status_of_run(folder, load("tiny-sync"), "gloo", None) as board:
        for status in told:
            board.told(status)
            done = CliRunner().invoke(app, ["status", str(folder)], env={"COLUMNS": "300"})
            shown.append((done.exit_code, "gone: rollout1." in done.output))
    assert [gone for _, gone in shown] == [bool(outcome.gone) for outcome in record.outcomes]
    assert all(code == 1 for code, gone in shown if gone)
    assert (shown[0], shown[-1]) == ((0, False), (0, False))


@pytest.mark.parametrize("backend", ["inprocess", "sim"])
def test_without_processes_there_is_nothing_to_kill(backend: str) -> None:
    with pytest.raises(ScenarioError, match="needs --backend gloo"):
        run(load("tiny-sync", killing(0, 1, 3)), backend)


def test_under_torchrun_nobody_would_start_it_again() -> None:
    with pytest.raises(ScenarioError, match="without torchrun"):
        run_gloo(load("tiny-sync", killing(0, 1, 3)), lambda done: None, {"TORCHELASTIC_RUN_ID": "1"})


def test_the_modelled_half_of_a_demo_runs_without_the_kill_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[Any] = []

    def fake(scenario: Any, backend: str, *more: Any) -> RunRecord | None:
        asked.append((backend, scenario.faults.kill))
        return run(scenario.model_copy(update={"faults": type(scenario.faults)()}), "inprocess", *more)

    monkeypatch.setattr("weightsync.cli.main.run", fake)
    sets = [part for one in [CONTINUE, "faults.kill={rollout=1,rank=0,step=1}"] for part in ("--set", one)]
    done = CliRunner().invoke(app, ["demo", "--steps", "2", "--out", str(tmp_path), *sets])
    assert done.exit_code == 0, done.output
    assert [(backend, kill is None) for backend, kill in asked] == [("gloo", False), ("sim", True)]
    assert "without faults.kill" in (tmp_path / "sim" / "conditions.json").read_text()
    assert "without faults.kill" not in (tmp_path / "gloo" / "conditions.json").read_text()


LEAD = """
import sys
from weightsync.backends.store import connect_store
from weightsync.cli.desk import Desk
from weightsync.cli.rank_run import PREFIX
print('{"done": 1}', flush=True)
desk = Desk(connect_store("127.0.0.1", int(sys.argv[1])), PREFIX, "trainer.0")
while desk.hear()["again"]:
    pass
"""


class Broken(Processes):
    """Rollout 1 cannot start; its rank 1 hangs beside a rank 0 that fails, and the lead waits for its fate."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.started: list[tuple[str, subprocess.Popen[str]]] = []

    def _start_all(self, ranks: Sequence[RankId]) -> None:
        programs = {
            "trainer.0": LEAD,
            "rollout1.0": "raise SystemExit('no weights')",
            "rollout1.1": "input()",
        }
        for rank in ranks:
            port = str(self._store.port)
            self._start(rank, [sys.executable, "-c", programs.get(str(rank), ""), port], self._environ)
            self.started.append((str(rank), self.running[rank]))


def test_a_rollout_that_keeps_ending_is_left_out_after_a_few_restarts_and_nothing_is_left(
    tmp_path: Path,
) -> None:
    scenario = load("tiny-sync", [CONTINUE, "workload.steps=9"])
    with Broken(Errand(scenario, tmp_path, None), deployment(scenario).ranks, host_store()) as processes:
        processes.watch(lambda done: None)
    names = [event["event"] for event in processes.events]
    assert names == ["lost", "restarted"] * RESTARTS + ["lost", "left out"]
    assert processes.events[0]["how"] == "ended with exit code 1 and said: no weights"
    assert f"it was started again {RESTARTS} times" in processes.events[-1]["why"]
    assert sorted(map(str, processes.alive_at_end)) == ["rollout0.0", "trainer.0", "trainer.1"]
    assert [name for name, _ in processes.started].count("rollout1.1") == 1 + RESTARTS
    for _, process in processes.started:
        assert process.returncode is not None
        assert process.stdin is not None
        assert process.stdin.closed
