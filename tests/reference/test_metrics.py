"""Metrics of an update: what the outcome and the spans say, flat and JSON-ready; and callbacks that fail."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.errors import PeerLost
from weightsync.reference.metrics import UpdateMetrics, deliver, update_metrics
from weightsync.reference.protocol import Outcome
from weightsync.reference.trace import Span

FULL = Outcome(1, 1, True, members=(0, 1), full=(0, 1), full_bytes=900, digest=5)
DELTA = Outcome(2, 2, True, members=(0, 1), changed=10, counts=(10,), delta_bytes=90, digest=6)


@pytest.mark.parametrize(
    ("outcome", "kind", "changed", "bits"),
    [
        (FULL, "full", 100, 72.0),
        (DELTA, "delta", 10, 72.0),
        (Outcome(3, 3, True, members=(0,), changed=0, counts=(0,), delta_bytes=64), "empty", 0, None),
        (
            Outcome(4, 4, True, "", (0, 1), (1,), 4, (4,), full_bytes=900, delta_bytes=100),
            "mixed",
            4,
            2000.0,
        ),
        (Outcome(5, None, False, "nobody answered"), "empty", 0, None),
    ],
    ids=["full", "delta", "nothing changed", "one was behind", "ended before it began"],
)
def test_kind_and_counts_follow_from_the_outcome(
    outcome: Outcome, kind: str, changed: int, bits: float | None
) -> None:
    found = update_metrics(outcome, 100)
    assert (found.kind, found.changed, found.density) == (kind, changed, changed / 100)
    assert found.bits_per_change == bits
    assert found.wire_bytes == outcome.nbytes


def test_a_rank_that_does_not_send_tells_no_bytes() -> None:
    found = update_metrics(DELTA, 100, sends=False)
    assert (found.full_bytes, found.delta_bytes, found.wire_bytes, found.bits_per_change) == (None,) * 4
    told = {key for key in found.to_dict() if "bytes" in key or "bits" in key}
    assert told == {"weightsync/history_bytes"}, "what it keeps itself"


spans = st.builds(
    Span,
    rank=st.sampled_from(["trainer.0", "trainer.1", "rollout0.0"]),
    verb=st.just("v"),
    phase=st.sampled_from(["snapshot", "diff", "broadcast"]),
    start_ns=st.integers(0, 50),
    end_ns=st.integers(50, 99),
    update=st.integers(0, 3),
)


@given(st.lists(spans))
def test_phases_are_those_of_one_rank_in_one_update_and_nothing_is_counted_twice(
    spans: list[Span],
) -> None:
    found = [
        update_metrics(Outcome(update, update, True), 1, spans=spans, rank=rank).phases_ns
        for update in range(4)
        for rank in ("trainer.0", "trainer.1", "rollout0.0")
    ]
    assert sum(sum(phases.values()) for phases in found) == sum(span.duration_ns for span in spans)
    for phase in ("snapshot", "diff", "broadcast"):
        here = [s for s in spans if (s.rank, s.update, s.phase) == ("trainer.1", 2, phase)]
        phases = update_metrics(Outcome(2, 2, True), 1, spans=spans, rank="trainer.1").phases_ns
        assert phases.get(phase) == (sum(s.duration_ns for s in here) if here else None)


def test_total_spans_all_known_ranks_and_exposed_is_the_first() -> None:
    found = update_metrics(FULL, 100, inside=[(10, 30), (5, 25)])
    assert (found.total_ns, found.exposed_ns) == (25, 20)


values = st.builds(
    UpdateMetrics,
    update=st.integers(1, 9),
    version=st.none() | st.integers(1, 9),
    committed=st.booleans(),
    reason=st.text(max_size=5),
    kind=st.sampled_from(["full", "delta", "mixed", "empty"]),
    members=st.lists(st.integers(0, 3), unique=True).map(tuple),
    full=st.lists(st.integers(0, 3), unique=True).map(tuple),
    changed=st.integers(0, 100),
    elements=st.integers(0, 100),
    full_bytes=st.none() | st.integers(0, 1000),
    delta_bytes=st.none() | st.integers(0, 1000),
    phases_ns=st.dictionaries(st.sampled_from(["snapshot", "tp_gather"]), st.integers(0, 9)),
    lost=st.dictionaries(st.integers(0, 3), st.text(max_size=5)),
)


@given(values)
def test_the_dictionary_is_flat_and_survives_json_and_its_keys_carry_the_prefix(
    metrics: UpdateMetrics,
) -> None:
    found = metrics.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert all(key.startswith("weightsync/") for key in found)
    assert all(isinstance(value, str | int | float | bool) for value in found.values())
    assert found["weightsync/lost_rollouts"] == len(metrics.lost)
    assert ("weightsync/version" in found) == (metrics.version is not None)
    for phase, spent in metrics.phases_ns.items():
        assert found[f"weightsync/phase/{phase}_ns"] == spent


def test_a_callback_that_fails_is_heard_and_does_not_hide_the_error_of_the_update() -> None:
    def fail(metrics: UpdateMetrics) -> None:
        raise OSError("dashboard is down")

    with pytest.raises(OSError, match="dashboard is down"):
        deliver(fail, update_metrics(FULL, 100))
    lost = PeerLost("rollout0.0", "commit")
    deliver(fail, update_metrics(FULL, 100), lost)
    assert any("dashboard is down" in note for note in lost.__notes__)
