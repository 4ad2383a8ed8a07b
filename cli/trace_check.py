"""What makes a Chrome Trace Event file one that Perfetto shows whole: a validator of our own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.cli.chrome_trace import Event, microseconds, nanoseconds


def validate(chrome: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace, one sentence per problem; empty when Perfetto will show all of it.

    Checked: required keys and their types, times that are whole nanoseconds and not negative, names for every
    process and thread, slices of one thread that nest, slices in a lane of their kind, a ``paused`` slice for every
    pause and for nothing else, flows whose two ends lie inside a slice and in order,
    counters whose times never go back and whose values stay at or above zero and end there.
    """
    events = chrome.get("traceEvents")
    if not isinstance(events, list):
        return [f"traceEvents is a {type(events).__name__}; expected a list of events"]
    problems = [f"event {number}: {what}" for number, one in enumerate(events) for what in _shape(one)]
    if problems:
        return problems
    checks = (_unnamed, _crossing, _misplaced, _wrong_pauses, _loose_flows, _bad_counters)
    return [problem for check in checks for problem in check(events)]


def phase_ns(chrome: Mapping[str, Any]) -> dict[str, int]:
    """Nanoseconds per category summed over all slices: what the result's phases must equal."""
    totals: dict[str, int] = {}
    for event in chrome["traceEvents"]:
        if event["ph"] == "X":
            totals[event["cat"]] = totals.get(event["cat"], 0) + nanoseconds(event["dur"])
    return totals


_KEYS = {
    "M": ("name", "pid", "tid", "args"),
    "X": ("name", "cat", "ts", "dur", "pid", "tid", "args"),
    "s": ("name", "cat", "id", "ts", "pid", "tid"),
    "f": ("name", "cat", "id", "ts", "pid", "tid", "bp"),
    "C": ("name", "ts", "pid", "args"),
}


_LANE = re.compile(r"(training|engine|protocol)( \d+)?")
_HOMES = {"training": r"trainer\.\d+", "engine": r"rollout\d+\.0", "protocol": r".+"}
"""Kind of lane -> the ranks that may have one: engines run on the leaders of rollouts only."""
_KINDS = {"train": "training", "generate": "engine", "paused": "engine"}
"""Category of a slice -> the kind of lane it lies in; verbs lie in protocol lanes."""


def _shape(event: Any) -> list[str]:
    if not isinstance(event, dict) or event.get("ph") not in _KEYS:
        return [f"{event!r} has no known ph; expected one of {', '.join(_KEYS)}"]
    missing = [key for key in _KEYS[event["ph"]] if key not in event]
    problems = [f"ph {event['ph']} lacks {', '.join(missing)}"] if missing else []
    for key in ("ts", "dur"):
        time = event.get(key, 0)
        if isinstance(time, bool) or not isinstance(time, (int, float)) or not 0 <= time < 2**53:
            problems.append(f"{key} is {time!r}; expected microseconds, not negative")
        elif microseconds(nanoseconds(time)) != time:
            problems.append(f"{key} is {time!r}; expected whole nanoseconds, that is at most three decimals")
    for key in ("pid", "tid"):
        if not isinstance(event.get(key, 0), int):
            problems.append(f"{key} is {event[key]!r}; expected an integer")
    return problems


def _unnamed(events: Sequence[Event]) -> list[str]:
    named = {(one["name"], one["pid"], one["tid"]) for one in events if one["ph"] == "M"}
    problems: dict[str, None] = {}
    for one in events:
        if one["ph"] != "M" and ("process_name", one["pid"], 0) not in named:
            problems[f"process {one['pid']} has no process_name"] = None
        if one["ph"] == "X" and ("thread_name", one["pid"], one["tid"]) not in named:
            problems[f"thread {one['pid']}/{one['tid']} has no thread_name"] = None
    return list(problems)


def _crossing(events: Sequence[Event]) -> list[str]:
    threads: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for one in events:
        if one["ph"] == "X":
            start = nanoseconds(one["ts"])
            slices = threads.setdefault((one["pid"], one["tid"]), [])
            slices.append((start, start + nanoseconds(one["dur"]), one["name"]))
    problems = []
    for (pid, tid), slices in threads.items():
        stack: list[tuple[int, str]] = []
        for start, end, name in sorted(slices, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1][0] <= start:
                stack.pop()
            if stack and end > stack[-1][0]:
                problems.append(
                    f"slice {name!r} at {start} ns crosses the end of {stack[-1][1]!r} on {pid}/{tid}"
                )
            stack.append((end, name))
    return problems


def _misplaced(events: Sequence[Event]) -> list[str]:
    names = {(one["name"], one["pid"], one["tid"]): one["args"]["name"] for one in events if _is_name(one)}
    problems: dict[str, None] = {}
    for (kind, pid, _), lane in names.items():
        rank = names.get(("process_name", pid, 0), "")
        if kind == "thread_name" and not (
            (known := _LANE.fullmatch(lane)) and re.fullmatch(_HOMES[known[1]], rank)
        ):
            problems[f"lane {lane!r} has no place on {rank!r}"] = None
    for one in events:
        if one["ph"] == "X":
            lane = names.get(("thread_name", one["pid"], one["tid"]), "")
            kind = _KINDS.get(one["cat"], "protocol")
            if lane.split(" ")[0] != kind:
                problems[f"slice of {one['cat']!r} lies in lane {lane!r}; expected one of {kind!r}"] = None
    return list(problems)


def _is_name(event: Event) -> bool:
    return event["ph"] == "M" and event["name"] in ("process_name", "thread_name")


def _wrong_pauses(events: Sequence[Event]) -> list[str]:
    """Where the slices ``paused`` are not the times between the slices ``pause`` and ``resume``."""
    ends: dict[int, list[tuple[int, int, str]]] = {}
    shown: Counter[tuple[int, int, int]] = Counter()
    for one in events:
        if one["ph"] == "X":
            start, stop = nanoseconds(one["ts"]), nanoseconds(one["ts"]) + nanoseconds(one["dur"])
            if one["cat"] == "paused":
                shown[one["pid"], start, stop] += 1
            elif one["name"] in ("pause", "resume"):
                ends.setdefault(one["pid"], []).append((start, stop, one["name"]))
    due: Counter[tuple[int, int, int]] = Counter()
    for pid, verbs in ends.items():
        since = None
        for start, stop, name in sorted(verbs):
            if name == "pause":
                since = stop
            elif since is not None and since <= start:
                due[pid, since, start] += 1
                since = None
    return [
        f"process {pid} {what} a paused slice from {start} to {stop} ns"
        for what, some in (("lacks", due - shown), ("has without a pause", shown - due))
        for pid, start, stop in sorted(some.elements())
    ]


def _loose_flows(events: Sequence[Event]) -> list[str]:
    slices: dict[tuple[int, int], list[Event]] = {}
    for one in events:
        if one["ph"] == "X":
            slices.setdefault((one["pid"], one["tid"]), []).append(one)
    ends: dict[tuple[str, str, Any], dict[str, Event]] = {}
    problems = []
    for one in events:
        if one["ph"] in ("s", "f"):
            key = (one["cat"], one["name"], one["id"])
            if one["ph"] in ends.setdefault(key, {}):
                problems.append(f"flow {key} has two events of ph {one['ph']}")
            ends[key][one["ph"]] = one
            if not any(_inside(one, other) for other in slices.get((one["pid"], one["tid"]), ())):
                problems.append(f"flow {key} has its {one['ph']} outside of every slice of its thread")
    for key, pair in ends.items():
        if len(pair) < 2:
            problems.append(f"flow {key} has only its {next(iter(pair))}")
        elif pair["f"]["ts"] < pair["s"]["ts"]:
            problems.append(f"flow {key} ends before it starts")
    return problems


def _inside(end: Event, one: Event) -> bool:
    start = nanoseconds(one["ts"])
    return start <= nanoseconds(end["ts"]) <= start + nanoseconds(one["dur"])


def _bad_counters(events: Sequence[Event]) -> list[str]:
    last: dict[tuple[int, str], Event] = {}
    problems = []
    for one in events:
        if one["ph"] != "C":
            continue
        key = (one["pid"], one["name"])
        if key in last and one["ts"] <= last[key]["ts"]:
            problems.append(f"counter {key} goes back from {last[key]['ts']} to {one['ts']}")
        problems += [
            f"counter {key} is {value} at {one['ts']}" for value in one["args"].values() if value < 0
        ]
        last[key] = one
    problems += [
        f"counter {key} ends at {one['args']}" for key, one in last.items() if any(one["args"].values())
    ]
    return problems
