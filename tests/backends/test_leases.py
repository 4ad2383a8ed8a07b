"""Leases, with the time passed in, so that every rule is exact."""

from __future__ import annotations

from weightsync.backends.leases import ENDED, Change, LeaseWatch


def watch_of_two() -> LeaseWatch:
    return LeaseWatch(["b", "c"], lease_ns=400, grace_ns=1000)


def test_a_count_that_stands_still_for_a_lease_is_a_loss_told_once() -> None:
    watch = watch_of_two()
    found = [watch.look(now, {"b": b"1.1", "c": b"1.%d" % now}) for now in range(0, 1001, 100)]
    assert found == [[], [], [], [], [(Change.LOST, "b")], [], [], [], [], [], []]


def test_counting_starts_when_a_peer_is_first_seen() -> None:
    watch = watch_of_two()
    assert [watch.look(now, {}) for now in range(0, 901, 100)] == [[]] * 10
    assert watch.unseen == ("b", "c")
    assert watch.look(950, {"b": b"1.1", "c": b"1.1"}) == []
    assert (watch.unseen, watch.seen) == ((), ("b", "c"))
    assert [watch.look(now, {}) for now in (1050, 1150, 1250)] == [[]] * 3
    assert watch.look(1350, {}) == [(Change.LOST, "b"), (Change.LOST, "c")]


def test_a_peer_that_is_never_seen_is_lost_after_its_grace() -> None:
    watch = watch_of_two()
    found = [(now, watch.look(now, {"c": b"%d" % now})) for now in range(0, 1101, 100)]
    assert [entry for entry in found if entry[1]] == [(1000, [(Change.LOST, "b")])]


def test_a_store_that_answers_nobody_ends_no_lease() -> None:
    watch = watch_of_two()
    watch.look(0, {"b": b"1.1", "c": b"1.1"})
    assert watch.look(1_000_000, {}) == []
    assert watch.look(1_000_100, {"b": b"1.2", "c": b"1.2"}) == []


def test_another_life_of_a_lost_peer_is_found_and_leaving_is_told_once() -> None:
    watch = watch_of_two()
    watch.look(0, {"b": b"1.1", "c": b"1.1"})
    for now in range(100, 501, 100):
        watch.look(now, {"c": b"1.%d" % now})
    assert watch.look(600, {"b": b"2.1", "c": b"1.left"}) == [(Change.FOUND, "b"), (Change.LEFT, "c")]
    assert watch.look(700, {"b": b"2.2", "c": b"1.left"}) == []
    assert watch.look(800, {"b": b"2.3", "c": b"2.1"}) == [(Change.FOUND, "c")]


def test_another_life_under_a_lease_that_is_held_is_a_loss_and_a_return() -> None:
    watch = watch_of_two()
    watch.look(0, {"b": b"1.1", "c": b"1.1"})
    assert watch.life("b") == b"1"
    assert watch.look(100, {"b": b"2.1", "c": b"1.2"}) == [(Change.LOST, "b"), (Change.FOUND, "b")]
    assert watch.life("b") == b"2"
    assert watch.look(200, {"b": b"2.2", "c": b"1.3"}) == []


def test_another_life_that_left_already_came_and_left() -> None:
    watch = watch_of_two()
    watch.look(0, {"b": b"1.1", "c": b"1.1"})
    came_and_left = [Change.LOST, Change.FOUND, Change.LEFT]
    assert watch.look(100, {"b": b"2.left", "c": b"1.2"}) == [(change, "b") for change in came_and_left]


def test_an_ended_process_is_lost_at_once_and_its_mail_stays_its_own_until_another_is_there() -> None:
    watch = watch_of_two()
    watch.look(0, {"b": b"1.1", "c": b"1.1"})
    assert watch.look(100, {"b": ENDED, "c": b"1.2"}) == [(Change.LOST, "b")]
    assert watch.life("b") == b"1"
    found = [watch.look(now, {"b": ENDED, "c": b"1.%d" % now}) for now in range(200, 3000, 100)]
    assert found == [[]] * len(found)
    assert watch.look(3000, {"b": b"2.1", "c": b"2.1"}) == [
        (Change.FOUND, "b"), (Change.LOST, "c"), (Change.FOUND, "c"),
    ]  # fmt: skip
    assert watch.life("b") == b"2"


def test_to_a_process_that_starts_later_an_ended_peer_is_nobody_yet() -> None:
    watch = watch_of_two()
    alive = (b"1.%d" % number for number in range(1000))
    found = [watch.look(now, {"b": ENDED, "c": next(alive)}) for now in range(0, 1000, 100)]
    assert found == [[]] * 10
    assert watch.life("b") is None
    assert watch.look(1000, {"b": ENDED, "c": next(alive)}) == [(Change.LOST, "b")]
    assert watch.look(1100, {"b": b"2.1", "c": next(alive)}) == [(Change.FOUND, "b")]


def test_a_message_tells_of_another_life_before_its_lease_does_and_an_old_message_tells_nothing() -> None:
    watch = watch_of_two()
    assert watch.heard("b", b"1") == []
    assert watch.life("b") == b"1"
    assert watch.look(0, {"b": b"1.1", "c": b"1.1"}) == []
    assert watch.heard("b", b"2") == [(Change.LOST, "b"), (Change.FOUND, "b")]
    assert watch.look(100, {"b": b"2.1", "c": b"1.2"}) == []
    assert watch.heard("b", b"1") == []
    assert watch.life("b") == b"2"
    assert watch.heard("stranger", b"1") == []


def test_a_message_of_a_process_that_ended_is_no_return() -> None:
    watch = watch_of_two()
    watch.look(0, {"b": b"1.1", "c": b"1.1"})
    assert watch.look(100, {"b": ENDED, "c": b"1.2"}) == [(Change.LOST, "b")]
    assert watch.heard("b", b"1") == []
    assert watch.heard("b", b"2") == [(Change.FOUND, "b")]
    assert watch.look(200, {"b": b"2.1", "c": b"1.3"}) == []
