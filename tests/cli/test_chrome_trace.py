from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.cli import chrome_trace as chrome
from weightsync.cli.lanes import lanes, pauses, place
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
            Span("rollout0.0", "pause", "pause_flush", 1_000_900, 1_000_910, 0, 1),
            Span("rollout0.0", "commit", "commit", 1_000_950, 1_000_950, 0, 1),
            Span("rollout0.0", "resume", "continue", 1_000_960, 1_000_970, 0, 1),
            Span("rollout10.0", "commit", "commit", 1_000_950, 1_000_990, 0, 1),
            Span("rollout2.0", "commit", "commit", 1_000_950, 1_000_990, 0, 1, ok=False),
        ]
    )


def its_job() -> Trace:
    return Trace(
        [
            Span("trainer.0", "train", "train", 999_000, 1_000_000),
            Span("trainer.1", "train", "train", 999_100, 1_000_005),
            Span("rollout0.0", "generate", "generate", 1_000_500, 1_000_955),
            Span("rollout10.0", "generate", "generate", 1_000_500, 1_000_955),
        ]
    )


def with_job() -> dict[str, Any]:
    return chrome.chrome_trace(one_update(), job=its_job())


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
    assert len(slices) == 11
    assert slices[0]["ts"] == 0
    assert slices[0]["dur"] == 0.493
    assert [event["name"] for event in slices if not event["args"]["ok"]] == ["commit (failed)"]


def test_overlapping_spans_go_to_different_lanes_and_nested_ones_share() -> None:
    assert lanes([(0, 10), (2, 5), (3, 4), (5, 10), (10, 12)]) == [0, 0, 0, 0, 0]
    assert lanes([(0, 10), (5, 15), (9, 20), (15, 16)]) == [0, 1, 2, 0]


def test_job_and_pauses_have_lanes_of_their_own_beside_the_protocols() -> None:
    made = with_job()
    assert validate(made) == []
    ranks = {one["pid"]: one["args"]["name"] for one in of_kind(made, "M") if one["name"] == "process_name"}
    found: dict[str, list[str]] = {}
    for one in of_kind(made, "M"):
        if one["name"] == "thread_name":
            found.setdefault(ranks[one["pid"]], []).append(one["args"]["name"])
    assert found == {
        "trainer.0": ["training", "protocol 1", "protocol 2"],
        "trainer.1": ["training", "protocol 1"],
        "rollout0.0": ["engine", "engine 2", "protocol 1"],
        "rollout2.0": ["protocol 1"],
        "rollout10.0": ["engine", "protocol 1"],
    }
    assert of_kind(made, "X")[0]["ts"] == 0  # training began first
    assert phase_ns(made)["paused"] == 50
    assert phase_ns(made)["generate"] == 2 * 455


def test_a_pause_that_never_ended_is_none() -> None:
    spans = one_update().spans
    (only,) = pauses(spans)
    assert (only.rank, only.start_ns, only.end_ns, only.update) == ("rollout0.0", 1_000_910, 1_000_960, 1)
    assert pauses([span for span in spans if span.verb != "resume"]) == []
    assert pauses([span for span in spans if span.verb != "pause"]) == []


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


PHASES = {"send": "broadcast", "pause": "pause_flush", "resume": "continue"}
starts = st.integers(0, 40) | st.integers(10**15, 10**15 + 10**6)
lengths = st.integers(0, 20) | st.integers(0, 10**12)


def spans_of(ranks: list[str], verbs: list[str]) -> st.SearchStrategy[Span]:
    def span(rank: str, verb: str, start: int, length: int, nbytes: int, update: int) -> Span:
        return Span(rank, verb, PHASES.get(verb, verb), start, start + length, nbytes, update)

    return st.builds(
        span,
        st.sampled_from(ranks),
        st.sampled_from(verbs),
        starts,
        lengths,
        st.integers(0, 100),
        st.integers(0, 3),
    )


verbs = spans_of(["trainer.0", "trainer.1", "rollout0.0", "rollout1.1"], ["snapshot", "send", "commit"])
pausing = spans_of(["rollout0.0", "rollout1.0"], ["pause", "resume"])
jobs = spans_of(["trainer.0", "trainer.1"], ["train"]) | spans_of(["rollout0.0", "rollout1.0"], ["generate"])


@given(st.lists(verbs | pausing, max_size=30), st.lists(jobs, max_size=10))
def test_any_trace_is_valid_and_loses_no_nanosecond(drawn: list[Span], job: list[Span]) -> None:
    made = chrome.chrome_trace(Trace(drawn), job=Trace(job))
    assert validate(made) == []
    every = [*drawn, *job, *pauses(drawn)]
    assert phase_ns(made) == Trace(every).phase_ns()
    end = max(
        (chrome.nanoseconds(one["ts"]) + chrome.nanoseconds(one["dur"]) for one in of_kind(made, "X")),
        default=0,
    )
    assert end == max((s.end_ns for s in every), default=0) - min((s.start_ns for s in every), default=0)
    assert validate(json.loads(chrome.dumps(made))) == []


@given(st.lists(verbs | pausing, max_size=30), st.lists(jobs, max_size=10), st.randoms())
def test_places_do_not_depend_on_the_order_of_spans(
    drawn: list[Span], job: list[Span], rng: random.Random
) -> None:
    placed = place(Trace(drawn), Trace(job))
    shuffled = [list(drawn), list(job)]
    for some in shuffled:
        rng.shuffle(some)
    assert place(*map(Trace, shuffled)) == placed


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


def lane_of(trace: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in of_kind(trace, "M") if one["args"].get("name") == name)


def in_category(trace: dict[str, Any], category: str) -> dict[str, Any]:
    return next(one for one in of_kind(trace, "X") if one["cat"] == category)


def rename_a_lane(trace: dict[str, Any]) -> None:
    lane_of(trace, "engine")["args"]["name"] = "lane 1"


def train_on_a_rollout(trace: dict[str, Any]) -> None:
    lane_of(trace, "engine")["args"]["name"] = "training"


def generate_on_a_member(trace: dict[str, Any]) -> None:
    lane_of(trace, "rollout0.0")["args"]["name"] = "rollout0.1"


def train_in_a_protocol_lane(trace: dict[str, Any]) -> None:
    in_category(trace, "train")["tid"] = 2


def a_verb_in_the_engine_lane(trace: dict[str, Any]) -> None:
    commit = next(one for one in of_kind(trace, "X") if one["name"] == "commit" and one["dur"] == 0)
    commit["tid"] = 1


def pause_too_long(trace: dict[str, Any]) -> None:
    in_category(trace, "paused")["dur"] = 0.06


def lose_a_pause(trace: dict[str, Any]) -> None:
    trace["traceEvents"].remove(in_category(trace, "paused"))


def pause_twice(trace: dict[str, Any]) -> None:
    trace["traceEvents"].append(dict(in_category(trace, "paused")))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (rename_a_lane, "lane 'lane 1' has no place on 'rollout0.0'"),
        (train_on_a_rollout, "lane 'training' has no place on 'rollout0.0'"),
        (generate_on_a_member, "lane 'engine' has no place on 'rollout0.1'"),
        (train_in_a_protocol_lane, "slice of 'train' lies in lane 'protocol 1'"),
        (a_verb_in_the_engine_lane, "slice of 'commit' lies in lane 'engine'"),
        (pause_too_long, "lacks a paused slice"),
        (pause_too_long, "has without a pause a paused slice"),
        (lose_a_pause, "lacks a paused slice"),
        (pause_twice, "has without a pause"),
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
    made = copy.deepcopy(with_job())
    assert validate(made) == []
    damage(made)
    assert any(words in problem for problem in validate(made)), validate(made)
