"""A Trace as Chrome Trace Event JSON, which Perfetto opens; ``trace_check`` validates it.

One process per rank, one thread per lane, as ``lanes`` places them. Times are microseconds from the first span on,
with the nanoseconds as three decimals: every ``ts * 1000`` is a whole number and no digit is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.cli.lanes import Placed, place
from weightsync.reference.trace import Trace

Event = dict[str, Any]

COUNTER = "bytes in flight"
MOVING = ("broadcast", "tp_gather")
"""Phases whose spans count as bytes in flight on their rank."""


def chrome_trace(
    trace: Trace, other: Mapping[str, Any] | None = None, job: Trace | None = None
) -> dict[str, Any]:
    """The JSON object for ``trace``; equal traces give equal objects, whatever the order of their spans.

    Args:
        trace: the spans of one run, of any number of ranks on one clock.
        other: what stands under ``otherData``: seed, scenario fingerprint, version; no clock, path or host.
        job: training and generation on the same clock; they and the pauses of generation get lanes of their own.
    """
    placed = place(trace, job)
    origin = min((one.span.start_ns for one in placed), default=0)
    events = _names(placed)
    events += [_slice(one, origin) for one in placed]
    events += _flows(placed, origin)
    events += _counters(placed, origin)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(other or {})}


def dumps(chrome: Mapping[str, Any]) -> str:
    """JSON text, one event a line; equal objects give equal bytes."""
    lines = [json.dumps(event, sort_keys=True, separators=(",", ":")) for event in chrome["traceEvents"]]
    other = json.dumps(chrome["otherData"], sort_keys=True)
    unit = json.dumps(chrome["displayTimeUnit"])
    body = ",\n".join(lines)
    return f'{{"displayTimeUnit":{unit},"otherData":{other},"traceEvents":[\n{body}\n]}}\n'


def microseconds(time_ns: int) -> int | float:
    """Time as the format writes it; an int where no nanosecond is left over."""
    whole, rest = divmod(time_ns, 1000)
    return time_ns / 1000 if rest else whole


def nanoseconds(time_us: int | float) -> int:
    """The exact inverse of ``microseconds``."""
    return round(time_us * 1000)


def _names(placed: Sequence[Placed]) -> list[Event]:
    ranks = {one.pid: one.span.rank for one in placed}
    events: list[Event] = []

    def name(kind: str, pid: int, tid: int, **args: Any) -> None:
        events.append({"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": args})

    for pid, rank in ranks.items():
        name("process_name", pid, 0, name=rank)
        name("process_sort_index", pid, 0, sort_index=pid)
        for tid, lane in sorted({(one.tid, one.lane) for one in placed if one.pid == pid}):
            name("thread_name", pid, tid, name=lane)
            name("thread_sort_index", pid, tid, sort_index=tid)
    return events


def _slice(one: Placed, origin: int) -> Event:
    span = one.span
    return {
        "name": span.verb if span.ok else f"{span.verb} (failed)",
        "cat": span.phase,
        "ph": "X",
        "ts": microseconds(span.start_ns - origin),
        "dur": microseconds(span.duration_ns),
        "pid": one.pid,
        "tid": one.tid,
        "args": {"update": span.update, "bytes": span.nbytes, "ok": span.ok},
    }


def _flows(placed: Sequence[Placed], origin: int) -> list[Event]:
    """One arrow per update and rollout rank, from the trainer's first snapshot of it to the rank's commit."""
    snapshots: dict[int, Placed] = {}
    commits: dict[tuple[int, int], Placed] = {}
    for one in placed:
        span = one.span
        if not span.ok or span.update == 0:
            continue
        if span.verb == "snapshot" and span.rank.startswith("trainer"):
            snapshots.setdefault(span.update, one)
        elif span.verb == "commit" and not span.rank.startswith("trainer"):
            commits[span.update, one.pid] = one
    events: list[Event] = []
    number = 0
    for (update, _), commit in sorted(commits.items(), key=lambda item: item[0]):
        snapshot = snapshots.get(update)
        if snapshot is None or commit.span.start_ns < snapshot.span.start_ns:
            continue
        number += 1
        for phase, end in (("s", snapshot), ("f", commit)):
            event = {
                "name": "update",
                "cat": "update",
                "ph": phase,
                "id": number,
                "ts": microseconds(end.span.start_ns - origin),
                "pid": end.pid,
                "tid": end.tid,
                "args": {"update": update},
            }
            events.append({**event, "bp": "e"} if phase == "f" else event)
    return events


def _counters(placed: Sequence[Placed], origin: int) -> list[Event]:
    events: list[Event] = []
    for pid in sorted({one.pid for one in placed}):
        steps: dict[int, int] = {}
        for one in placed:
            span = one.span
            if one.pid == pid and span.phase in MOVING and span.nbytes and span.duration_ns:
                steps[span.start_ns] = steps.get(span.start_ns, 0) + span.nbytes
                steps[span.end_ns] = steps.get(span.end_ns, 0) - span.nbytes
        level = 0
        for time_ns in sorted(steps):
            level += steps[time_ns]
            sample = {"name": COUNTER, "ph": "C", "ts": microseconds(time_ns - origin), "pid": pid, "tid": 0}
            events.append({**sample, "args": {"bytes": level}})
    return events
