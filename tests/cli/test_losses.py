"""The checks of a run in which rollouts were lost: what is right, and what is not."""

from __future__ import annotations

from typing import Any

from weightsync.cli.losses import in_order, rejoins, sentence
from weightsync.cli.record import Event, RankRecord, RunRecord
from weightsync.cli.result import check_rows
from weightsync.cli.verify import Audit
from weightsync.reference.protocol import Outcome

RANKS = ["rollout1.0", "rollout1.1"]
LOST: Event = {"event": "lost", "rollout": 1, "update": 1, "rank": "rollout1.1", "how": "was ended by SIGKILL",
               "ranks": RANKS, "at_ns": 20}  # fmt: skip
FIRST = Outcome(1, 1, True, members=(0, 1), full=(0, 1))
ABORTED = Outcome(2, 2, False, "it does not answer", members=(0, 1))
WITHOUT = Outcome(3, 3, True, members=(0,), gone=(1,))
BACK = Outcome(4, 4, True, members=(1, 0), full=(1,), rejoined=(1,))


def rows_of(*outcomes: Outcome, events: list[Event] | None = None, audited: Any = RANKS) -> dict[str, bool]:
    inside = [(10 * outcome.update, 10 * outcome.update + 5) for outcome in outcomes]
    happened = in_order([*([LOST] if events is None else events), *rejoins(outcomes, inside)], 0)
    version = outcomes[-1].version or 0
    audits = [Audit(version, rank, version, None, 0) for rank in audited]
    record = RunRecord(
        "gloo",
        0,
        trainers=[RankRecord(outcomes=list(outcomes), inside=inside)],
        events=happened,
        audits=audits,
    )
    return {row.name: row.ok for row in check_rows(record) if ", rank " not in row.name}


def test_an_update_that_a_lost_rollout_aborted_is_right_when_the_next_one_commits_without_it() -> None:
    assert rows_of(FIRST, ABORTED, WITHOUT, BACK) == {
        "update 1 commits": True,
        "update 2 ends with a lost rollout (rollout1.1 was ended by SIGKILL), update 3 commits": True,
        "update 3 commits": True,
        "update 4 commits": True,
        "rollout 1 rejoined in update 4": True,
    }


def test_it_is_right_as_well_when_it_is_back_at_once() -> None:
    back = Outcome(3, 3, True, members=(1, 0), full=(1,), rejoined=(1,))
    rows = rows_of(FIRST, ABORTED, back)
    assert rows["update 2 ends with a lost rollout (rollout1.1 was ended by SIGKILL), update 3 commits"]
    assert rows["rollout 1 rejoined in update 3"]


def test_an_update_without_anybody_left_is_excused_by_the_one_that_everybody_is_back_in() -> None:
    outcomes = [
        Outcome(1, 1, True, members=(1,), full=(1,)),
        Outcome(2, None, False, "none answered", gone=(1,)),
        Outcome(3, None, False, "none answered", gone=(1,)),
        Outcome(4, 2, True, members=(1,), full=(1,), rejoined=(1,)),
    ]
    assert all(rows_of(*outcomes).values())


def test_an_update_that_fails_while_nobody_is_lost_is_a_failure() -> None:
    assert rows_of(FIRST, ABORTED, Outcome(3, 3, True, members=(0, 1)), events=[]) == {
        "update 1 commits": True, "update 2 commits": False, "update 3 commits": True,
    }  # fmt: skip


def test_a_failure_of_those_who_are_there_is_not_excused_by_one_who_was_lost_before() -> None:
    failed = Outcome(4, 4, False, "rollout0.0 answered: a bad checksum", members=(0,), gone=(1,))
    rows = rows_of(
        FIRST, ABORTED, WITHOUT, failed, Outcome(5, 5, True, members=(0, 1), full=(1,), rejoined=(1,))
    )
    assert rows["update 4 commits"] is False
    assert rows["rollout 1 rejoined in update 5"]


def test_a_failure_before_the_rollout_was_lost_is_not_excused() -> None:
    healed = Outcome(3, 3, True, members=(0, 1))
    rows = rows_of(
        FIRST, ABORTED, healed, Outcome(4, 4, True, members=(0,), gone=(1,)), events=[{**LOST, "update": 3}]
    )
    assert rows["update 2 commits"] is False


def test_without_a_later_update_that_commits_it_is_a_failure() -> None:
    rows = rows_of(FIRST, ABORTED, Outcome(3, 3, False, "again", members=(0,), gone=(1,)))
    assert rows["update 2 commits"] is False
    assert rows["update 3 commits"] is False


def test_a_rollout_that_is_not_in_the_last_update_is_a_failure() -> None:
    assert rows_of(FIRST, ABORTED, WITHOUT)["rollout 1 rejoined"] is False
    left_out = [LOST, {"event": "left out", "rollout": 1, "update": 1, "why": "it keeps ending", "at_ns": 21}]
    assert rows_of(FIRST, ABORTED, WITHOUT, events=left_out)["rollout 1 rejoined"] is False
    gone_again = Outcome(5, 5, True, members=(0,), gone=(1,))
    assert rows_of(FIRST, ABORTED, WITHOUT, BACK, gone_again)["rollout 1 rejoined"] is False


def test_a_rollout_whose_loss_nobody_noticed_is_a_failure() -> None:
    unnoticed = [Outcome(number, number, True, members=(0, 1)) for number in (2, 3)]
    assert rows_of(FIRST, *unnoticed)["rollout 1 rejoined"] is False


def test_a_return_whose_bits_were_not_compared_is_a_failure() -> None:
    assert (
        rows_of(FIRST, ABORTED, WITHOUT, BACK, audited=RANKS[:1])["rollout 1 rejoined in update 4"] is False
    )


def test_a_loss_after_the_last_update_is_no_failure() -> None:
    assert all(rows_of(FIRST, Outcome(2, 2, True, members=(0, 1)), events=[{**LOST, "update": 2}]).values())


def test_every_event_has_its_sentence() -> None:
    happened = [
        LOST,
        {"event": "restarted", "rollout": 1, "update": 1, "ranks": RANKS, "times": 1},
        *rejoins([BACK], [(0, 1)]),
        {"event": "left out", "rollout": 1, "update": 5, "why": "it keeps ending"},
    ]
    assert [sentence(event) for event in happened] == [
        "rollout 1 is lost after update 1: rollout1.1 was ended by SIGKILL",
        "rollout 1 is started again, all 2 ranks, time 1 of 3",
        "rollout 1 rejoins in update 4, with a full update",
        "rollout 1 is left out: it keeps ending",
    ]
