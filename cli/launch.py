"""One process per rank over gloo: start them, watch them, and leave none behind, however the run ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightsync.backends.store import host_store
from weightsync.backends.torchrun import torchrun_world
from weightsync.cli.desk import Desk
from weightsync.cli.losses import in_order, rejoins
from weightsync.cli.parts import MS
from weightsync.cli.processes import HOST, STARTUP_S, Processes
from weightsync.cli.rank_run import Errand, rank_run
from weightsync.cli.record import Event, RankRecord, RunRecord
from weightsync.cli.scenario import Scenario, ScenarioError, check
from weightsync.cli.telling import Tell, unheard
from weightsync.cli.workload import deployment, prepare
from weightsync.reference.members import RankId
from weightsync.reference.trace import Trace


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
        return collect(errand, processes.alive_at_end, processes.events)


def collect(errand: Errand, ranks: Sequence[RankId], events: Sequence[Event] = ()) -> RunRecord:
    """The record of a run from the files that its ranks left, in rank order, and what its launcher saw."""
    trace, job, records = Trace(), Trace(), {}
    for rank in sorted(ranks, key=lambda one: (one.role != "trainer", one)):
        record = RankRecord.of(json.loads(errand.record_file(rank).read_text(encoding="utf-8")))
        trace.extend(record.spans)
        job.extend(record.job)
        records[rank] = record
    trainers = [record for rank, record in records.items() if rank.role == "trainer"]
    lead = trainers[0]
    events = in_order(
        [*events, *rejoins(lead.outcomes, lead.inside)], min(span.start_ns for span in trace.spans)
    )
    processes = len(deployment(errand.scenario).ranks)
    return RunRecord(
        "gloo", errand.scenario.workload.seed, trace, trainers, lead.audits,
        conditions=f"gloo, {processes} processes on {os.cpu_count()} CPUs", events=events, job=job,
    )  # fmt: skip


def _under_torchrun(
    scenario: Scenario, progress: Callable[[int], None], environ: Mapping[str, str], tell: Tell
) -> RunRecord | None:
    """This process's rank; the lead's process returns the record. All ranks are of one host."""
    if scenario.faults.kill is not None:
        raise ScenarioError(
            "faults.kill needs --backend gloo without torchrun, where nobody would start it again"
        )
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
