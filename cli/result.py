"""One run as a result: ``result.json`` without wall clock, path or host, ``conditions.json`` with them, ``trace.json``.

Beside the phases of the verbs, each summed over all ranks, a result has three times of its own, in ns:

- ``total``: from the first trainer rank's entry into ``update()`` until the last one's return, summed over updates;
- ``exposed``: what the lead trainer rank spent inside ``update()``, summed over updates: training waits for it;
- ``paused``: from the end of each ``pause`` to the start of the next ``resume``, summed over rollouts.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weightsync.cli.chrome_trace import chrome_trace, dumps
from weightsync.cli.record import RunRecord
from weightsync.cli.scenario import Scenario
from weightsync.cli.tables import CheckRow, VersionRow, in_order, verdict_text
from weightsync.cli.verify import group_digests
from weightsync.cli.workload import deployment
from weightsync.reference.metrics import exposed_ns, total_ns, update_metrics
from weightsync.reference.protocol import Outcome
from weightsync.reference.trace import Span
from weightsync.reference.watched import hex_digest

FORMAT = 1
PACKAGES = (
    "weightsync",
    "torch",
    "numpy",
    "simpy",
    "safetensors",
    "xxhash",
    "zstandard",
    "typer",
    "rich",
    "pydantic",
)

Result = dict[str, Any]


def make_result(scenario: Scenario, record: RunRecord) -> Result:
    """What ``result.json`` holds; equal runs on ``sim`` give equal results, byte for byte.

    Args:
        scenario: as it was asked for, before a seed of the command line replaced its own.
        record: what the run left behind.
    """
    layout = deployment(scenario)
    elements = sum(meta.numel for meta in layout.tensors)
    checks = check_rows(record)
    return {
        "format": FORMAT,
        "backend": record.backend,
        "seed": record.seed,
        "scenario": _without_paths(scenario.to_dict()),
        "fingerprint": scenario.fingerprint(),
        "values": scenario.values,
        "tensors": len(layout.tensors),
        "elements": elements,
        "updates": [_update(outcome, record, elements) for outcome in record.outcomes],
        "phases_ns": phases_ns(record),
        "phases_by_rank_ns": {rank: _ordered(record.trace.phase_ns(rank)) for rank in record.trace.ranks()},
        "verbs": {rank: dict(sorted(record.trace.verbs(rank).items())) for rank in record.trace.ranks()},
        "checks": [asdict(row) for row in checks],
        "verdict": {"ok": all(row.ok for row in checks), "text": verdict(record, scenario.values)},
    }


def phases_ns(record: RunRecord) -> dict[str, int]:
    """Nanoseconds per phase, with ``total``, ``paused`` and ``exposed``; a phase without spans is absent."""
    found = dict(record.trace.phase_ns())
    calls = [one.inside for one in record.trainers]
    if all(calls):
        found["total"] = sum(total_ns(update) for update in zip(*calls, strict=False))
        found["exposed"] = sum(exposed_ns([call]) for call in calls[0])
    pauses = _pauses(record.trace.spans)
    if pauses:
        found["paused"] = sum(pauses)
    return _ordered(found)


def check_rows(record: RunRecord) -> list[CheckRow]:
    """Every check of the run, in the order in which they were made: commits, bytes on every rank, races."""
    rows = []
    for outcome in record.outcomes:
        reason = "" if outcome.committed else f"not committed: {outcome.reason}"
        rows.append(CheckRow(f"update {outcome.update} commits", outcome.committed, reason))
        if outcome.committed:
            rows += [one.check for one in record.audits if one.version == outcome.version]
    if record.races is not None:
        rows.append(CheckRow("no read races a write", not record.races, "; ".join(record.races)))
    return rows


def verdict(record: RunRecord, values: bool) -> str:
    """One sentence: what held, or what did not first."""
    rows = check_rows(record)
    if not values and all(row.ok for row in rows):
        return (
            f"verdict: all {len(record.outcomes)} updates commit; values = false, so no bytes were compared"
        )
    return verdict_text(rows).plain


def version_rows(result: Result) -> list[VersionRow]:
    """The committed versions of a result, for a table."""
    return [
        VersionRow(
            update["version"],
            update["kind"],
            update["changed"],
            update["elements"],
            update["full_bytes"] + update["delta_bytes"],
            {rank: int(digest, 16) for rank, digest in update["digests"].items()},
        )
        for update in result["updates"]
        if update["committed"]
    ]


def conditions(record: RunRecord) -> dict[str, Any]:
    """What ``conditions.json`` holds: machine, packages, date, command line."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "seed": record.seed,
        "times": record.conditions,
        "machine": {
            "host": platform.node(),
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "cpus": os.cpu_count(),
            "load": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
        },
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
    }


def write(out: Path, result: Result, record: RunRecord) -> None:
    """Write the three files into the folder ``out``, which is made if it is not there."""
    out.mkdir(parents=True, exist_ok=True)
    other = {"backend": record.backend, "seed": record.seed, "fingerprint": result["fingerprint"]}
    (out / "result.json").write_text(_json(result), encoding="utf-8")
    (out / "conditions.json").write_text(_json(conditions(record)), encoding="utf-8")
    (out / "trace.json").write_text(dumps(chrome_trace(record.trace, other)), encoding="utf-8")


def _without_paths(asked: dict[str, Any]) -> dict[str, Any]:
    """The scenario with the last name only of a checkpoint's folder; ``conditions.json`` has the command line."""
    folder = asked["model"].get("checkpoint")
    return (
        asked if folder is None else {**asked, "model": {**asked["model"], "checkpoint": Path(folder).name}}
    )


def _update(outcome: Outcome, record: RunRecord, elements: int) -> dict[str, Any]:
    audits = [one for one in record.audits if one.version == outcome.version]
    digests: dict[str, int] = {}
    if outcome.committed and outcome.digest is not None and audits:
        digests = {f"trainer.{rank}": outcome.digest for rank in range(len(record.trainers))} | group_digests(
            audits
        )
    named = {rank: hex_digest(digest) for rank, digest in digests.items()}
    return update_metrics(outcome, elements).row() | {"digests": named}


def _pauses(spans: Sequence[Span]) -> list[int]:
    """Lengths of the pauses that ended, in ns."""
    found = []
    since: dict[str, int] = {}
    for span in sorted(spans, key=lambda one: (one.start_ns, one.end_ns)):
        if span.verb == "pause" and span.ok:
            since[span.rank] = span.end_ns
        elif span.verb == "resume" and span.ok and span.rank in since:
            found.append(span.start_ns - since.pop(span.rank))
    return found


def _ordered(phases: Mapping[str, int]) -> dict[str, int]:
    return {phase: phases[phase] for phase in in_order(phases)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _json(data: Any) -> str:
    return json.dumps(data, indent=1) + "\n"
