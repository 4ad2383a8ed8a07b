"""Ranks as processes over gloo: they end well, end together, and none is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weightsync.backends.store import host_store
from weightsync.cli.desk import GONE, READY, Desk
from weightsync.cli.launch import run_gloo
from weightsync.cli.processes import Processes, RankDied
from weightsync.cli.rank_run import Errand
from weightsync.cli.record import RunRecord
from weightsync.cli.result import check_rows, make_result
from weightsync.cli.run import run
from weightsync.cli.scenario_files import load
from weightsync.cli.workload import deployment
from weightsync.reference.errors import DeadlineExceeded

LIMIT_S = 150


@pytest.fixture(scope="module")
def tiny() -> tuple[RunRecord, list[int]]:
    """One run of tiny-sync with a bit flipped after its last version, and the progress it told."""
    told: list[int] = []
    flip = "faults.flip_bit={rollout=1,rank=1,version=3}"
    record = run_gloo(load("tiny-sync", [flip, "policy.lease_ms=30000"]), told.append)
    assert record is not None
    return record, told


def test_processes_show_the_verbs_and_versions_of_sim(tiny: tuple[RunRecord, list[int]]) -> None:
    record, told = tiny
    sim = run(load("tiny-sync"), "sim")
    assert sim is not None
    assert told == [1, 2, 3]
    ranks = sim.trace.ranks()
    assert {rank: record.trace.verbs(rank) for rank in ranks} == {
        rank: sim.trace.verbs(rank) for rank in ranks
    }
    assert record.outcomes == sim.outcomes


def test_every_rank_is_audited_and_the_flipped_bit_is_named(tiny: tuple[RunRecord, list[int]]) -> None:
    record, _ = tiny
    assert len(record.audits) == 9
    failed = [row for row in check_rows(record) if not row.ok]
    assert [row.name for row in failed] == [
        "rollout 1, rank 1, version 3", "digest of version 3 on every rank",
    ]  # fmt: skip
    assert "1 of" in failed[0].detail
    assert not make_result(load("tiny-sync"), record)["verdict"]["ok"]


def test_measured_phases_are_there(tiny: tuple[RunRecord, list[int]]) -> None:
    phases = make_result(load("tiny-sync"), tiny[0])["phases_ns"]
    assert {
        "connect",
        "snapshot",
        "broadcast",
        "apply",
        "digest",
        "total",
        "paused",
        "exposed",
    } <= phases.keys()


def test_a_dead_rank_ends_the_run_named_and_takes_the_others_with_it(tmp_path: Path) -> None:
    scenario = load("tiny-sync", ["workload.steps=100000"])
    store = host_store()
    with Processes(Errand(scenario, tmp_path, None), deployment(scenario).ranks, store) as processes:
        victim = next(rank for rank in processes.ranks if str(rank) == "rollout1.1")
        killed: list[int] = []

        def kill(done: int) -> None:
            if not killed:
                killed.append(processes.running[victim].pid)
                os.kill(killed[0], signal.SIGKILL)

        with pytest.raises(RankDied, match=r"rollout1\.1 was ended by SIGKILL") as caught:
            processes.watch(kill)
    assert caught.value.rank == "rollout1.1"
    assert all(process.returncode is not None for process in processes.running.values())


def test_a_rank_that_fails_is_quoted(tmp_path: Path) -> None:
    scenario = load("tiny-sync")
    rank = deployment(scenario).ranks[0]
    processes = Processes(Errand(scenario, tmp_path, None), [rank], host_store())
    processes._start(rank, [sys.executable, "-c", "raise SystemExit('first\\nit said no')"], os.environ)
    with pytest.raises(RankDied, match=r"trainer\.0 ended with exit code 1 and said: it said no"):
        processes.watch(lambda done: None)
    processes.stop()


def heed_interrupts() -> None:
    """A shell that runs this suite in the background has its children ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "weightsync.cli.main", "run", "tiny-sync", "--backend", "gloo"]
    command += ["--set", "workload.steps=100000"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    launcher = subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=heed_interrupts,
    )
    try:
        until = time.monotonic() + LIMIT_S
        while len(children(launcher.pid)) < 5 and time.monotonic() < until and launcher.poll() is None:
            time.sleep(0.05)
        ranks = children(launcher.pid)
        assert len(ranks) == 5
        launcher.send_signal(signal.SIGINT)
        output, _ = launcher.communicate(timeout=LIMIT_S)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode != 0
    assert "Traceback" not in output
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    assert list(tmp_path.glob("weightsync-*")) == []


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it ended meanwhile
            continue
        if parent == pid and b"rank_main" in (stat.parent / "cmdline").read_bytes():
            found.append(int(stat.parent.name))
    return found


def test_a_rank_ends_when_its_launcher_is_gone(tmp_path: Path) -> None:
    told = {"scenario": load("tiny-sync").to_dict(), "scratch": str(tmp_path), "checkpoint": None}
    store = host_store()
    errand = tmp_path / "errand.json"
    errand.write_text(json.dumps({**told, "host": "127.0.0.1", "port": store.port}))
    command = [sys.executable, "-m", "weightsync.cli.rank_main", str(errand), "rollout0.0"]
    environ = {**os.environ, "WEIGHTSYNC_SECRET": "s" * 32}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environ) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 1


def test_words_are_heard_once_whoever_is_early_and_nobody_waits_for_the_gone() -> None:
    store = host_store()
    lead, *others = (Desk(store, "test", name) for name in ("lead", "a", "b", "c"))
    a, b, c = others
    b.tell(["lead"], "stepped")
    for desk in others:
        desk.tell(["lead"], "ready", number=7)
    assert {word["number"] for word in lead.hear_all("abc", "ready").values()} == {7}
    a.tell(["lead"], "stepped")
    c.tell(["lead"], GONE, rank="c", again=False)
    assert sorted(lead.hear_all("abc", "stepped")) == ["a", "b"]
    a.tell(["lead"], "stepped")
    with pytest.raises(DeadlineExceeded, match="'stepped' of b"):
        lead.hear_all("abc", "stepped", timeout_s=1.0)


def test_a_rank_that_was_started_again_is_there_once_it_is_ready_and_hears_nothing_that_was_said_before() -> (
    None
):
    store = host_store()
    lead, launcher, former = (Desk(store, "test", name) for name in ("lead", "launcher", "a"))
    former.tell(["lead"], READY)
    assert set(lead.hear_all("a", READY)) == {"a"}
    lead.tell("a", "audit", version=1)
    assert former.hear()["version"] == 1
    former.tell(["lead"], "audited", version=1)
    lead.tell("a", "audit", version=2)  # it is gone before it reads this
    launcher.tell(["lead"], GONE, rank="a", again=True)
    lead.catch_up()
    assert (lead.gone, lead.ever_gone) == ({"a"}, {"a"})
    assert lead.hear_all("a", "audited") == {}  # not even what the former one said
    with pytest.raises(DeadlineExceeded, match="the return of a"):
        lead.all_back(timeout_s=0.1)
    later = Desk(store, "test", "a")
    later.tell(["lead"], READY)
    assert lead.all_back() == {"a"}
    assert (lead.gone, lead.ever_gone) == (set(), {"a"})
    lead.tell("a", "audit", version=3)
    assert later.hear()["version"] == 3
    later.tell(["lead"], "audited", version=3)
    assert lead.hear_all("a", "audited")["a"]["version"] == 3


def test_words_that_a_follower_left_unread_are_not_for_the_process_in_its_place() -> None:
    store = host_store()
    leader, launcher = Desk(store, "test", "leader"), Desk(store, "test", "launcher")
    leader.tell("ab", "generate", step=1)  # it never heard of their processes, so that it is for any
    leader.catch_up()  # a round trip, after which the store has what was told
    launcher.drop("a")
    leader.tell("a", "generate", step=2)
    assert Desk(store, "test", "a").hear()["step"] == 2
    assert Desk(store, "test", "b").hear()["step"] == 1


def test_nobody_waits_for_a_rank_that_is_not_started_again_but_for_one_that_is_to_be_killed() -> None:
    store = host_store()
    lead, launcher = Desk(store, "test", "lead"), Desk(store, "test", "launcher")
    assert lead.all_back() == set()
    with pytest.raises(DeadlineExceeded, match="the return of a"):
        lead.all_back("a", timeout_s=0.1)
    launcher.tell(["lead"], GONE, rank="a", again=True)
    launcher.tell(["lead"], GONE, rank="a", again=False)
    assert lead.all_back("a") == set()
    assert lead.gone == {"a"}
