"""Where each span of a run stands in a picture of it: one process per rank, lanes in which slices nest.

A trainer rank has a lane ``training``, the leader of a rollout a lane ``engine``, for what goes on beside the
protocol; the verbs lie in ``protocol 1``, ``protocol 2``, ... Spans that merely overlap go to different lanes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.reference.trace import Span, Trace

TRAINING, ENGINE, PROTOCOL = "training", "engine", "protocol"
PAUSED = "paused"
"""Verb and phase of the slices from the end of a ``pause`` to the start of the next ``resume``."""


@dataclass(frozen=True, slots=True)
class Placed:
    """One span with its place in the picture.

    Attributes:
        span: the span.
        pid: number of its rank, from 1.
        tid: its lane within the rank, from 1.
        lane: the lane's name.
    """

    span: Span
    pid: int
    tid: int
    lane: str


def place(trace: Trace, job: Trace | None = None) -> list[Placed]:
    """Every span with its rank's number and a lane in which it nests, by rank, then lane kind, then start.

    Args:
        trace: the verbs of all ranks; their pauses become slices of the engine lanes.
        job: training and generation on the same clock, or None.
    """
    beside = [*(job.spans if job is not None else ()), *pauses(trace.spans)]
    ranks = sorted({span.rank for span in (*trace.spans, *beside)}, key=_rank_order)
    placed: list[Placed] = []
    for pid, rank in enumerate(ranks, start=1):
        kind = TRAINING if rank.startswith("trainer") else ENGINE
        mine = _laid(beside, rank)
        first = 1 + max((lane + 1 for _, lane in mine), default=0)
        placed += [Placed(span, pid, 1 + lane, f"{kind} {lane + 1}" if lane else kind) for span, lane in mine]
        placed += [
            Placed(span, pid, first + lane, f"{PROTOCOL} {lane + 1}")
            for span, lane in _laid(trace.spans, rank)
        ]
    return placed


def pauses(spans: Iterable[Span]) -> list[Span]:
    """The pauses that ended, each as a span from the end of its ``pause`` to the start of its ``resume``."""
    found = []
    since: dict[str, Span] = {}
    for span in sorted(spans, key=lambda one: (one.start_ns, one.end_ns, one.verb, one.update)):
        if span.verb == "pause" and span.ok:
            since[span.rank] = span
        elif span.verb == "resume" and span.ok and span.rank in since:
            pause = since[span.rank]
            if pause.end_ns <= span.start_ns:
                found.append(
                    Span(span.rank, PAUSED, PAUSED, pause.end_ns, span.start_ns, update=pause.update)
                )
                del since[span.rank]
    return found


def lanes(intervals: Sequence[tuple[int, int]]) -> list[int]:
    """The lowest lane, from 0, in which each interval lies beside or inside the earlier ones of that lane.

    ``intervals`` are (start, end), sorted by start and then the longest first.
    """
    open_ends: list[list[int]] = []
    chosen = []
    for start, end in intervals:
        lane = 0
        for ends in open_ends:
            while ends and ends[-1] <= start:
                ends.pop()
            if not ends or end <= ends[-1]:
                break
            lane += 1
        if lane == len(open_ends):
            open_ends.append([])
        open_ends[lane].append(end)
        chosen.append(lane)
    return chosen


def _laid(spans: Iterable[Span], rank: str) -> list[tuple[Span, int]]:
    mine = sorted((span for span in spans if span.rank == rank), key=_span_order)
    return list(zip(mine, lanes([(span.start_ns, span.end_ns) for span in mine]), strict=True))


def _rank_order(rank: str) -> tuple[Any, ...]:
    role, _, number = rank.rpartition(".")
    rollout = role.removeprefix("rollout")
    return (
        role != "trainer",
        int(rollout) if rollout.isdigit() else -1,
        role,
        int(number) if number.isdigit() else -1,
        number,
    )


def _span_order(span: Span) -> tuple[Any, ...]:
    return (span.start_ns, -span.end_ns, span.update, span.verb, span.phase, span.nbytes, span.ok)
