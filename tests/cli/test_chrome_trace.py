from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.cli import chrome_trace as chrome
from weightsync.cli.trace_check import phase_ns, validate
from weightsync.reference.trace import Span, Trace


def one_update() -> Trace:
    return Trace(
        [
            Span("trainer.0", "snapshot", "snapshot", 1_000_007, 1_000_500, 64, 1),
            Span("trainer.0", "encode", "encode", 1_000_500, 1_000_700, 32, 1),
            Span("trainer.0", "send", "broadcast", 1_000_600, 1_000_900, 96, 1),
            Span("trainer.1", "snapshot", "snapshot", 1_000_010, 1_000_400, 64, 1),
            Span("rollout0.0", "receive", "broadcast", 1_000_600, 1_000_900, 96, 1),
            Span("rollout0.0", "commit", "commit", 1_000_950, 1_000_950, 0, 1),
            Span("rollout10.0", "commit", "commit", 1_000_950, 1_000_990, 0, 1),
            Span("rollout2.0", "commit", "commit", 1_000_950, 1_000_990, 0, 1, ok=False),
        ]
    )


def of_kind(trace: dict[str, Any], *kinds: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in kinds]


def test_one_update_is_valid_and_tells_all_of_it() -> None:
    made = chrome.chrome_trace(one_update(), {"seed": 3})
    assert validate(made) == []
    assert made["otherData"] == {"seed": 3}
    names = {
        event["pid"]: event["args"]["name"] for event in of_kind(made, "M") if event["name"] == "process_name"
    }
    assert list(names.values()) == ["trainer.0", "trainer.1", "rollout0.0", "rollout2.0", "rollout10.0"]
    slices = of_kind(made, "X")
    assert len(slices) == 8
    assert slices[0]["ts"] == 0
    assert slices[0]["dur"] == 0.493
    assert [event["name"] for event in slices if not event["args"]["ok"]] == ["commit (failed)"]


def test_overlapping_spans_go_to_different_lanes_and_nested_ones_share() -> None:
    assert chrome.lanes([(0, 10), (2, 5), (3, 4), (5, 10), (10, 12)]) == [0, 0, 0, 0, 0]
    assert chrome.lanes([(0, 10), (5, 15), (9, 20), (15, 16)]) == [0, 1, 2, 0]


def test_flows_run_from_the_snapshot_to_each_commit_that_held() -> None:
    made = chrome.chrome_trace(one_update())
    flows = of_kind(made, "s", "f")
    assert len(flows) == 4
    starts = [event for event in flows if event["ph"] == "s"]
    assert {event["pid"] for event in starts} == {1}
    assert {event["pid"] for event in flows if event["ph"] == "f"} == {3, 5}


def test_bytes_in_flight_rise_and_end_at_zero() -> None:
    made = chrome.chrome_trace(one_update())
    samples = [(event["ts"], event["args"]["bytes"]) for event in of_kind(made, "C") if event["pid"] == 1]
    assert samples == [(0.593, 96), (0.893, 0)]


def test_an_empty_trace_is_valid() -> None:
    assert validate(chrome.chrome_trace(Trace())) == []


def test_the_text_is_json_and_does_not_depend_on_the_order_of_spans() -> None:
    trace = one_update()
    text = chrome.dumps(chrome.chrome_trace(trace))
    assert json.loads(text)["displayTimeUnit"] == "ms"
    random.Random(1).shuffle(trace.spans)
    assert chrome.dumps(chrome.chrome_trace(trace)) == text


spans = st.builds(
    lambda rank, verb, start, length, nbytes, update: Span(
        rank, verb, "broadcast" if verb == "send" else verb, start, start + length, nbytes, update
    ),
    st.sampled_from(["trainer.0", "trainer.1", "rollout0.0", "rollout1.1"]),
    st.sampled_from(["snapshot", "send", "commit"]),
    st.integers(0, 40) | st.integers(10**15, 10**15 + 10**6),
    st.integers(0, 20) | st.integers(0, 10**12),
    st.integers(0, 100),
    st.integers(0, 3),
)


@given(st.lists(spans, max_size=30))
def test_any_trace_is_valid_and_loses_no_nanosecond(drawn: list[Span]) -> None:
    made = chrome.chrome_trace(Trace(drawn))
    assert validate(made) == []
    assert phase_ns(made) == Trace(drawn).phase_ns()
    end = max(
        (chrome.nanoseconds(one["ts"]) + chrome.nanoseconds(one["dur"]) for one in of_kind(made, "X")),
        default=0,
    )
    assert end == max((s.end_ns for s in drawn), default=0) - min((s.start_ns for s in drawn), default=0)
    assert validate(json.loads(chrome.dumps(made))) == []


def drop_names(trace: dict[str, Any]) -> None:
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["ph"] != "M"]


def cross(trace: dict[str, Any]) -> None:
    for event in of_kind(trace, "X"):
        event["tid"] = 1


def lose_an_end(trace: dict[str, Any]) -> None:
    trace["traceEvents"].remove(of_kind(trace, "f")[0])


def move_an_end(trace: dict[str, Any]) -> None:
    of_kind(trace, "f")[0]["ts"] = 10_000


def turn_a_flow(trace: dict[str, Any]) -> None:
    start, end = of_kind(trace, "s", "f")[:2]
    for key in ("ts", "pid", "tid"):
        start[key], end[key] = end[key], start[key]


def go_back(trace: dict[str, Any]) -> None:
    of_kind(trace, "C")[1]["ts"] = 0


def leave_bytes(trace: dict[str, Any]) -> None:
    trace["traceEvents"].remove(of_kind(trace, "C")[-1])


def split_a_nanosecond(trace: dict[str, Any]) -> None:
    of_kind(trace, "X")[0]["dur"] = 0.0005


def lose_a_key(trace: dict[str, Any]) -> None:
    del of_kind(trace, "X")[0]["dur"]


def unknown_kind(trace: dict[str, Any]) -> None:
    of_kind(trace, "X")[0]["ph"] = "Q"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (drop_names, "has no process_name"),
        (cross, "crosses the end of"),
        (lose_an_end, "has only its s"),
        (move_an_end, "outside of every slice"),
        (turn_a_flow, "ends before it starts"),
        (go_back, "goes back"),
        (leave_bytes, "ends at"),
        (split_a_nanosecond, "whole nanoseconds"),
        (lose_a_key, "lacks dur"),
        (unknown_kind, "no known ph"),
    ],
)
def test_the_validator_sees_each_kind_of_damage(damage: Any, words: str) -> None:
    made = copy.deepcopy(chrome.chrome_trace(one_update()))
    damage(made)
    assert any(words in problem for problem in validate(made)), validate(made)
