"""One process per rank over gloo: start them, watch them, and leave none behind, however the run ends."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightsync.backends.store import host_store
from weightsync.backends.torchrun import SECRET, torchrun_world
from weightsync.cli.desk import GONE, Desk
from weightsync.cli.parts import MS
from weightsync.cli.rank_run import PREFIX, Errand, rank_run
from weightsync.cli.record import RankRecord, RunRecord
from weightsync.cli.scenario import Scenario, check
from weightsync.cli.telling import Tell, hear, unheard
from weightsync.cli.workload import deployment, prepare
from weightsync.reference.errors import DeadlineExceeded, WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.trace import Trace

HOST = "127.0.0.1"
STARTUP_S = 300.0
"""How long the processes may take to come up and to end, over and above what the policy gives the updates."""

STOP_S = 5.0
"""How long a process may take to end when it is told to, before it is killed."""


class RankDied(WeightSyncError):
    """A rank's process ended before its part was done.

    Attributes:
        rank: name of the rank.
    """

    def __init__(self, rank: str, how: str) -> None:
        super().__init__(f"the run is over: {rank} {how}")
        self.rank = rank


def run_gloo(
    scenario: Scenario,
    progress: Callable[[int], None],
    environ: Mapping[str, str] = os.environ,
    tell: Tell = unheard,
) -> RunRecord | None:
    """The scenario over gloo, one process per rank; see ``run.run``. Under torchrun this process is one of them."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _under_torchrun(scenario, progress, environ, tell)
    ranks = deployment(scenario).ranks
    with tempfile.TemporaryDirectory(prefix="weightsync-") as scratch, _sigterm_raises():
        store = host_store(HOST)
        errand = Errand(scenario, Path(scratch), prepare(scenario, Path(scratch)))
        with Processes(errand, ranks, store) as processes:
            processes.watch(progress, tell)
        return collect(errand, processes.alive_at_end)


class Processes:
    """The processes of one run; a context manager, after which none of them is left.

    Args:
        errand: what each is told.
        ranks: one process each.
        store: the store that this process hosts.

    Attributes:
        alive_at_end: ranks that did their part.
        running: rank -> its process.
    """

    def __init__(self, errand: Errand, ranks: Sequence[RankId], store: Any) -> None:
        self.errand = errand
        self.ranks = tuple(ranks)
        self.alive_at_end: list[RankId] = []
        self.running: dict[RankId, subprocess.Popen[str]] = {}
        self._store = store
        self._desk = Desk(store, PREFIX, "launcher")
        self._events: queue.SimpleQueue[tuple[RankId, str | int]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        told = self.errand.scratch / "errand.json"
        folder = self.errand.checkpoint
        body = {
            "scenario": self.errand.scenario.to_dict(),
            "scratch": str(self.errand.scratch),
            "checkpoint": None if folder is None else str(folder),
            "host": HOST,
            "port": self._store.port,
        }
        told.write_text(json.dumps(body), encoding="utf-8")
        environ = {**os.environ, SECRET: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
        try:
            for rank in self.ranks:
                self._start(
                    rank, [sys.executable, "-m", "weightsync.cli.rank_main", str(told), str(rank)], environ
                )
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def watch(self, progress: Callable[[int], None], tell: Tell = unheard) -> None:
        """Return when every rank did its part; a rollout may be lost under ``on_rollout_loss = "continue"``.

        Raises:
            RankDied: a rank's process ended otherwise.
            DeadlineExceeded: they take longer than every deadline together; names those that still run.
        """
        policy, steps = self.errand.scenario.policy, self.errand.scenario.workload.steps
        until = time.monotonic() + STARTUP_S + steps * (STARTUP_S + 2 * policy.update_ms / 1000)
        left = set(self.ranks)
        while left:
            try:
                rank, event = self._events.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise DeadlineExceeded(
                    f"the run, in which {', '.join(map(str, sorted(left)))} still works,"
                ) from None
            if isinstance(event, str):
                hear(event, progress, tell)
                continue
            left.discard(rank)
            if event == 0:
                self.alive_at_end.append(rank)
            elif rank.role == "trainer" or policy.on_rollout_loss == "fail":
                raise RankDied(str(rank), self._how(rank, event))
            else:
                self._desk.tell([self.ranks[0]], GONE, rank=str(rank))

    def stop(self) -> None:
        """End every process that still runs; returns when none does."""
        for process in self.running.values():
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + STOP_S
        for process in self.running.values():
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()

    def _start(self, rank: RankId, command: list[str], environ: Mapping[str, str]) -> None:
        with self._log(rank).open("w") as log:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                start_new_session=True,  # Ctrl-C reaches the launcher, which ends them
            )  # fmt: skip
        self.running[rank] = process
        threading.Thread(target=self._listen, args=(rank, process), daemon=True).start()

    def _listen(self, rank: RankId, process: subprocess.Popen[str]) -> None:
        if process.stdout is not None:
            with process.stdout:
                for line in process.stdout:
                    self._events.put((rank, line))
        self._events.put((rank, process.wait()))

    def _log(self, rank: RankId) -> Path:
        return self.errand.scratch / f"{rank}.log"

    def _how(self, rank: RankId, code: int) -> str:
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        lines = self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"ended with exit code {code} and said: {lines[-1] if lines else 'nothing'}"


def collect(errand: Errand, ranks: Sequence[RankId]) -> RunRecord:
    """The record of a run from the files that its ranks left, in rank order."""
    trace, records = Trace(), {}
    for rank in sorted(ranks, key=lambda one: (one.role != "trainer", one)):
        record = RankRecord.of(json.loads(errand.record_file(rank).read_text(encoding="utf-8")))
        trace.extend(record.spans)
        records[rank] = record
    trainers = [record for rank, record in records.items() if rank.role == "trainer"]
    processes = len(deployment(errand.scenario).ranks)
    conditions = f"gloo, {processes} processes on {os.cpu_count()} CPUs"
    return RunRecord(
        "gloo", errand.scenario.workload.seed, trace, trainers, trainers[0].audits, conditions=conditions
    )


def _under_torchrun(
    scenario: Scenario, progress: Callable[[int], None], environ: Mapping[str, str], tell: Tell
) -> RunRecord | None:
    """This process's rank; the lead's process returns the record. All ranks are of one host."""
    ranks = deployment(scenario).ranks
    me, world = torchrun_world(
        ranks, environ, lease_ns=scenario.policy.lease_ms * MS, grace_ns=int(STARTUP_S * 1000) * MS
    )
    lead, others = ranks[0], ranks[1:]
    desk = Desk(world.store, f"{world.prefix}/launch", str(me))
    if me != lead:
        told = desk.hear()
        folder = told["checkpoint"]
        errand = Errand(
            check(told["scenario"], "scenario"),
            Path(told["scratch"]),
            None if folder is None else Path(folder),
        )
        rank_run(me, world, errand, progress).run()
        desk.tell([lead], "done")
        desk.hear()
        return None
    with tempfile.TemporaryDirectory(prefix="weightsync-") as scratch:
        errand = Errand(scenario, Path(scratch), prepare(scenario, Path(scratch)))
        body: dict[str, Any] = {"scenario": scenario.to_dict(), "scratch": scratch}
        body["checkpoint"] = None if errand.checkpoint is None else str(errand.checkpoint)
        desk.tell(others, "errand", **body)
        rank_run(me, world, errand, progress, tell).run()
        desk.hear_all(others, "done")
        desk.tell(others, "bye")
        return collect(errand, ranks)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Have SIGTERM unwind this thread like Ctrl-C, so that whatever was started is ended; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
