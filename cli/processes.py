"""The processes of one run: started, watched, a lost rollout's started again, and none left behind."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightsync.backends.control import end_lease
from weightsync.backends.torchrun import SECRET
from weightsync.cli.desk import GONE, Desk
from weightsync.cli.losses import RESTARTS
from weightsync.cli.rank_run import PREFIX, Errand
from weightsync.cli.record import Event
from weightsync.cli.telling import Tell, hear, unheard
from weightsync.reference.errors import DeadlineExceeded, WeightSyncError
from weightsync.reference.members import RankId

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


class Processes:
    """The processes of one run; a context manager, after which none of them is left.

    Under ``on_rollout_loss = "continue"`` a rollout of which a process ended is ended whole and started again.

    Args:
        errand: what each is told.
        ranks: one process each.
        store: the store that this process hosts.

    Attributes:
        alive_at_end: ranks that did their part.
        running: rank -> its process, the one that was started last.
        over: updates that are over, as the lead said.
        events: what happened to rollouts, in order; see ``losses``.
    """

    def __init__(self, errand: Errand, ranks: Sequence[RankId], store: Any) -> None:
        self.errand = errand
        self.ranks = tuple(ranks)
        self.alive_at_end: list[RankId] = []
        self.running: dict[RankId, subprocess.Popen[str]] = {}
        self.over = 0
        self.events: list[Event] = []
        self._restarts: Counter[int] = Counter()
        self._store = store
        self._desk = Desk(store, PREFIX, "launcher")
        self._heard: queue.SimpleQueue[tuple[RankId, subprocess.Popen[str], str | int]] = queue.SimpleQueue()
        self._environ = {**os.environ, SECRET: secrets.token_hex(32), "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Self:
        folder = self.errand.checkpoint
        body = {
            "scenario": self.errand.scenario.to_dict(),
            "scratch": str(self.errand.scratch),
            "checkpoint": None if folder is None else str(folder),
            "host": HOST,
            "port": self._store.port,
        }
        self._told.write_text(json.dumps(body), encoding="utf-8")
        try:
            self._start_all(self.ranks)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def watch(self, progress: Callable[[int], None], tell: Tell = unheard) -> None:
        """Return when every rank did its part, apart from rollouts that could not be brought back.

        Raises:
            RankDied: a process ended otherwise, of the trainer, or of a rollout under ``on_rollout_loss = "fail"``.
            DeadlineExceeded: they take longer than every deadline together; names those that still run.
        """

        def over(done: int) -> None:
            self.over = done
            progress(done)
            self._kill_as_planned()

        policy, steps = self.errand.scenario.policy, self.errand.scenario.workload.steps
        limit_s = STARTUP_S + steps * (STARTUP_S + 2 * policy.update_ms / 1000)
        began, left = time.monotonic(), set(self.ranks)
        while left:
            until = began + limit_s + STARTUP_S * self._restarts.total()
            try:
                rank, process, event = self._heard.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                raise DeadlineExceeded(
                    f"the run, in which {', '.join(map(str, sorted(left)))} still works,"
                ) from None
            if isinstance(event, str):
                hear(event, over, tell)
                continue
            if process is not self.running[rank] or rank not in left:
                continue  # one that was replaced, or left out
            if event == 0:
                left.discard(rank)
                self.alive_at_end.append(rank)
            elif rank.role == "trainer" or policy.on_rollout_loss == "fail":
                raise RankDied(str(rank), self._how(rank, event))
            else:
                left -= set(self._lose(rank, self._how(rank, event)))

    def stop(self) -> None:
        """End every process that still runs; returns when none does."""
        self._end(self.ranks)

    def _lose(self, rank: RankId, how: str) -> Sequence[RankId]:
        """A rollout's process ended: end the rest of it and start all of it again; ranks that stay away otherwise."""
        number, steps = rank.rollout, self.errand.scenario.workload.steps
        whole = [one for one in self.ranks if one[:2] == rank[:2]]
        self._note(
            "lost", number, rank=str(rank), how=how, planned=self._is_planned(rank), ranks=[*map(str, whole)]
        )
        if self.over >= steps:  # nothing to come back for; the others end by themselves
            whole = [rank]
        self._end(whole)
        again = self.over < steps and self._restarts[number] < RESTARTS
        for one in whole:
            end_lease(self._store, PREFIX, str(one))
            self._desk.tell([self.ranks[0]], GONE, rank=str(one), again=again)
        if not again:
            times = self._restarts[number]
            self._note("left out", number, why="every update was over" if self.over >= steps else
                       f"it was started again {times} times, which is as often as it is done")  # fmt: skip
            return whole
        self._restarts[number] += 1
        self._start_all(whole)
        self._note("restarted", number, ranks=[*map(str, whole)], times=self._restarts[number])
        return ()

    def _kill_as_planned(self) -> None:
        kill = self.errand.scenario.faults.kill
        if kill is not None and kill.step == self.over:
            self.running[RankId("rollout", kill.rollout, kill.rank)].kill()

    def _is_planned(self, rank: RankId) -> bool:
        kill = self.errand.scenario.faults.kill
        planned = kill is not None and rank[1:] == (kill.rollout, kill.rank) and self.over >= kill.step
        return planned and not any(event.get("planned") for event in self.events)

    def _note(self, what: str, rollout: int, **more: Any) -> None:
        event = {"event": what, "rollout": rollout, "update": self.over, "at_ns": time.monotonic_ns()}
        self.events.append({**event, **more})

    def _end(self, ranks: Sequence[RankId]) -> None:
        """End the processes of these ranks; returns when none of them runs."""
        ending = [self.running[rank] for rank in ranks if rank in self.running]
        for process in ending:
            if process.poll() is None:
                process.terminate()
        until = time.monotonic() + STOP_S
        for process in ending:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()

    @property
    def _told(self) -> Path:
        return self.errand.scratch / "errand.json"

    def _start_all(self, ranks: Sequence[RankId]) -> None:
        for rank in ranks:
            command = [sys.executable, "-m", "weightsync.cli.rank_main", str(self._told), str(rank)]
            self._start(rank, command, self._environ)

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
                    self._heard.put((rank, process, line))
        self._heard.put((rank, process, process.wait()))

    def _log(self, rank: RankId) -> Path:
        return self.errand.scratch / f"{rank}.log"

    def _how(self, rank: RankId, code: int) -> str:
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        lines = self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"ended with exit code {code} and said: {lines[-1] if lines else 'nothing'}"
