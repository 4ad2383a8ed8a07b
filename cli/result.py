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
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from weightsync.cli.chrome_trace import chrome_trace, dumps
from weightsync.cli.lanes import pauses
from weightsync.cli.losses import commit_row, return_rows
from weightsync.cli.per_update import forms_sent, tensors_sent, update_times
from weightsync.cli.record import RunRecord
from weightsync.cli.scenario import Scenario
from weightsync.cli.tables import CheckRow, VersionRow, in_order, verdict_text
from weightsync.cli.verify import group_digests
from weightsync.cli.workload import deployment
from weightsync.reference.deployment import Deployment
from weightsync.reference.metrics import exposed_ns, total_ns, update_metrics
from weightsync.reference.protocol import Outcome
from weightsync.reference.watched import hex_digest

FORMAT = 1
PACKAGES = (
    "weightsync",
    "torch",
    "numpy",
    "jinja2",
    "matplotlib",
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
    rows = [_update(outcome, record, elements) for outcome in record.outcomes]
    for row, outcome, times in zip(rows, record.outcomes, update_times(record), strict=True):
        row |= {
            "tensors": tensors_sent(outcome, layout.plan),
            "forms": forms_sent(outcome, layout.plan),
            **times,
        }
    return {
        "format": FORMAT,
        "backend": record.backend,
        "seed": record.seed,
        "scenario": _without_paths(scenario.to_dict()),
        "fingerprint": scenario.fingerprint(),
        "values": scenario.values,
        "tensors": len(layout.tensors),
        "elements": elements,
        "dense_bytes": layout.plan.update_bytes(None),
        "updates": rows,
        "received_bytes": received_bytes(record, layout),
        "curve": record.curve,
        "phases_ns": phases_ns(record),
        "job_ns": _ordered(record.job.phase_ns()),
        "phases_by_rank_ns": {rank: _ordered(record.trace.phase_ns(rank)) for rank in record.trace.ranks()},
        "events": record.events,
        "verbs": {rank: dict(sorted(record.trace.verbs(rank).items())) for rank in record.trace.ranks()},
        "checks": [asdict(row) for row in checks],
        "verdict": {"ok": all(row.ok for row in checks), "text": verdict(record, scenario.values)},
    }


def received_bytes(record: RunRecord, layout: Deployment) -> dict[str, int]:
    """Rollout rank -> bytes that it received over the whole run, those of updates that failed included."""
    found = {str(rank): 0 for rollout in layout.rollouts for rank in rollout.ranks}
    for span in record.trace.spans:
        if span.verb == "receive" and span.rank in found:
            found[span.rank] += span.nbytes
    return found


def phases_ns(record: RunRecord) -> dict[str, int]:
    """Nanoseconds per phase, with ``total``, ``paused`` and ``exposed``; a phase without spans is absent."""
    found = dict(record.trace.phase_ns())
    calls = [one.inside for one in record.trainers]
    if all(calls):
        found["total"] = sum(total_ns(update) for update in zip(*calls, strict=False))
        found["exposed"] = sum(exposed_ns([call]) for call in calls[0])
    stops = pauses(record.trace.spans)
    if stops:
        found["paused"] = sum(one.duration_ns for one in stops)
    return _ordered(found)


def check_rows(record: RunRecord) -> list[CheckRow]:
    """Every check of the run: per update its commit, every rank's bytes and digest; then returns, then races."""
    rows = []
    for outcome in record.outcomes:
        rows.append(commit_row(outcome, record))
        if outcome.committed:
            rows += [one.check for one in record.audits if one.version == outcome.version]
            rows += _digest_rows(outcome, record)
    rows += return_rows(record)
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


@dataclass(frozen=True)
class Run:
    """One run that a page shows.

    Attributes:
        result: as in ``result.json``.
        record: what it was made of.
        conditions: as in ``conditions.json``.
        folder: where these files are, relative to the page; "" beside it.
    """

    result: Result
    record: RunRecord
    conditions: dict[str, Any]
    folder: str = ""


def write(out: Path, result: Result, record: RunRecord) -> dict[str, Any]:
    """Write the three files into the folder ``out``, which is made if it is not there; returns the conditions."""
    out.mkdir(parents=True, exist_ok=True)
    found = conditions(record)
    other = {"backend": record.backend, "seed": record.seed, "fingerprint": result["fingerprint"]}
    (out / "result.json").write_text(_json(result), encoding="utf-8")
    (out / "conditions.json").write_text(_json(found), encoding="utf-8")
    (out / "trace.json").write_text(dumps(chrome_trace(record.trace, other, record.job)), encoding="utf-8")
    return found


def write_page(out: Path, runs: Sequence[Run], more: Sequence[CheckRow] = ()) -> None:
    """Write ``index.html`` and ``pictures/*.png`` of one or several runs into ``out``.

    Args:
        out: a folder that is there.
        runs: of one scenario.
        more: checks between the runs.
    """
    from weightsync.cli.page import render  # matplotlib takes a second to import; only this needs it

    page = render(runs, more)
    (out / "index.html").write_text(page.html, encoding="utf-8")
    (out / "pictures").mkdir(exist_ok=True)
    for name, png in page.pngs.items():
        (out / "pictures" / f"{name}.png").write_bytes(png)


def _without_paths(asked: dict[str, Any]) -> dict[str, Any]:
    """The scenario with the last name only of a checkpoint's folder; ``conditions.json`` has the command line."""
    folder = asked["model"].get("checkpoint")
    return (
        asked if folder is None else {**asked, "model": {**asked["model"], "checkpoint": Path(folder).name}}
    )


def _update(outcome: Outcome, record: RunRecord, elements: int) -> dict[str, Any]:
    named = {rank: hex_digest(digest) for rank, digest in _digests(outcome, record).items()}
    return update_metrics(outcome, elements).row() | {"digests": named}


def _digests(outcome: Outcome, record: RunRecord) -> dict[str, int]:
    """Rank name -> digest of the version, where it was committed and audited."""
    audits = [one for one in record.audits if one.version == outcome.version]
    if not outcome.committed or outcome.digest is None or not audits:
        return {}
    trainers = {f"trainer.{rank}": outcome.digest for rank in range(len(record.trainers))}
    return trainers | group_digests(audits)


def _digest_rows(outcome: Outcome, record: RunRecord) -> list[CheckRow]:
    digests = _digests(outcome, record)
    odd = [f"{rank} {hex_digest(digest)}" for rank, digest in digests.items() if digest != outcome.digest]
    detail = f"{', '.join(odd)}, expected {hex_digest(outcome.digest)}" if odd else ""
    return (
        [CheckRow(f"digest of version {outcome.version} on every rank", not odd, detail)] if digests else []
    )


def _ordered(phases: Mapping[str, int]) -> dict[str, int]:
    return {phase: phases[phase] for phase in in_order(phases)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _json(data: Any) -> str:
    return json.dumps(data, indent=1) + "\n"
