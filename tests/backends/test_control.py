"""The control plane over a store: order, secrets, leases, leaving, and a store that goes away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.control import Events, StoreMail, end_lease
from weightsync.backends.envelopes import Envelopes, Rejected
from weightsync.backends.store import client_of, connect_store, host_store, local_store
from weightsync.reference.control import Control, Message
from weightsync.reference.errors import PeerLost, RemoteError, WeightSyncError

LIMIT_NS = 60_000_000_000
LEASE_NS = 400_000_000
LONG_NS = 600_000_000_000
SECRET = b"0123456789abcdef"

Take = Callable[[str, Any], None]


class Rank:
    """A mail with a loop of its own; what it was told is kept in order."""

    def __init__(
        self, store: Any, name: str, peers: tuple[str, ...], secret: bytes, lease_ns: int, grace_ns: int
    ) -> None:
        self.clock = AsyncioClock(rank_name=name)
        self.mail = StoreMail(
            name, self.clock, store, peers, secret=secret, prefix="test", lease_ns=lease_ns, grace_ns=grace_ns
        )
        self.control = Control(name, self.clock, self.mail)
        self.told: list[tuple[str, Any]] = []
        self._more = self.clock.future()
        self.mail.start(Events(self._deliver, self._lost, self._found))

    def until(self, count: int) -> list[tuple[str, Any]]:
        """Run the loop until so many things were told."""

        async def wait() -> None:
            while len(self.told) < count:
                self._more = self.clock.future()
                await self.clock.wait(self._more, self.clock.now_ns() + LIMIT_NS)

        self.run(wait())
        return self.told

    def run(self, work: Any) -> Any:
        """Run the loop until the work is done; its result."""
        task = self.clock.spawn(work, "test")
        self.clock.run([task])
        return task.result()

    def _deliver(self, message: Message) -> None:
        self.control.deliver(message)
        self._note("message", message)

    def _lost(self, peer: str) -> None:
        self.control.lost(peer)
        self._note("lost", peer)

    def _found(self, peer: str) -> None:
        self.control.found(peer)
        self._note("found", peer)

    def _note(self, kind: str, what: Any) -> None:
        self.told.append((kind, what))
        self._more.set_result(None)


class Ranks:
    """Makes ranks on one store and ends them with the test."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.made: list[Rank] = []

    def __call__(
        self, name: str, *peers: str, secret: bytes = SECRET, lease_ns: int = LONG_NS, grace_ns: int = LONG_NS
    ) -> Rank:
        rank = Rank(self.store, name, peers, secret, lease_ns, grace_ns)
        self.made.append(rank)
        return rank

    def close(self) -> None:
        for rank in self.made:
            rank.mail.leave()
        left = [name for rank in self.made for name in rank.mail.join(30)]
        for rank in self.made:
            rank.clock.close()
        assert left == []


@contextmanager
def ranks_on(store: Any) -> Iterator[Ranks]:
    before = threading.active_count()
    made = Ranks(store)
    try:
        yield made
    finally:
        made.close()
    assert threading.active_count() == before


@pytest.fixture(params=["tcp", "local"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with ranks_on(host_store() if request.param == "tcp" else local_store()) as made:
        yield made


@pytest.fixture
def few() -> Iterator[Ranks]:
    with ranks_on(local_store()) as made:
        yield made


def post(number: int) -> Message:
    asked = {"op": "note", "body": {"n": number}, "number": None, "remaining_ns": None}
    return {"kind": "request", "from": "a", **asked}


# ---- messages ------------------------------------------------------------------------------------------------


def test_messages_arrive_in_order_and_own_their_memory(ranks: Ranks) -> None:
    a, b = ranks("a"), ranks("b")
    for number in range(50):
        message = post(number)
        a.mail.put("b", message)
        message["body"]["n"] = -1
    assert [message["body"]["n"] for _, message in b.until(50)] == list(range(50))


def test_a_message_waits_for_a_rank_that_comes_up_later(ranks: Ranks) -> None:
    ranks("a").mail.put("b", post(1))
    assert ranks("b").until(1) == [("message", post(1))]


def test_a_call_gets_its_reply_between_loops(ranks: Ranks) -> None:
    a, b = ranks("a"), ranks("b")
    ended: list[BaseException] = []

    async def answer() -> None:
        request = await b.control.serve(b.clock.now_ns() + LIMIT_NS, None)
        b.control.reply(request, {"got": dict(request.body)})
        request = await b.control.serve(b.clock.now_ns() + LIMIT_NS, None)
        b.control.reply(request, error="no room")

    def serve() -> None:
        try:
            b.run(answer())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    body = {"text": "\0é\u2028", "number": -(1 << 63)}
    assert a.run(a.control.call("b", "look", body, a.clock.now_ns() + LIMIT_NS)) == {"got": body}
    with pytest.raises(RemoteError, match="b answered: no room"):
        a.run(a.control.call("b", "look", {}, a.clock.now_ns() + LIMIT_NS))
    thread.join(60)
    assert ended == []


def test_a_reply_to_a_former_life_of_the_rank_is_not_taken_for_an_answer(few: Ranks) -> None:
    former, b = few("a"), few("b")
    with pytest.raises(WeightSyncError, match="did not finish by its deadline"):
        former.run(former.control.call("b", "look", {}, former.clock.now_ns() + 1))
    asked = b.until(1)[0][1]
    former.mail.kill()
    assert former.mail.join(30) == ()
    later = few("a")
    b.mail.put("a", {"kind": "reply", "number": asked["number"], "body": {}, "error": None, "lost": None})
    b.mail.put("a", post(1))
    assert later.until(1) == [("message", post(1))]


def know_and_kill(a: Rank, former: Rank) -> None:
    while a.mail._watch.life("b") is None:
        former.mail.put("a", post(0))
        a.until(len(a.told) + 1)
    former.mail.kill()
    assert former.mail.join(30) == ()


def test_what_was_meant_for_a_former_life_is_dropped_by_the_next_one(ranks: Ranks) -> None:
    a, former = ranks("a", "b", lease_ns=LEASE_NS), ranks("b", "a", lease_ns=LEASE_NS)
    know_and_kill(a, former)
    a.mail.put("b", post(1))
    end_lease(a.mail._store, "test", "b")
    heard = len(a.told)
    assert a.until(heard + 1)[heard:] == [("lost", "b")]
    a.mail.put("b", post(2))  # nor is the next one there yet
    later = ranks("b", "a", lease_ns=LEASE_NS)
    assert a.until(heard + 2)[heard + 1 :] == [("found", "b")]
    a.mail.put("b", post(3))
    assert later.until(1) == [("message", post(3))]
    assert later.mail.outlived == 2


def test_a_call_to_a_process_that_was_replaced_unseen_fails_and_the_next_one_is_answered(few: Ranks) -> None:
    a, former = few("a", "b", lease_ns=LEASE_NS), few("b", "a", lease_ns=LEASE_NS)
    know_and_kill(a, former)
    later = few("b", "a", lease_ns=LEASE_NS)

    async def answer() -> None:
        request = await later.control.serve(later.clock.now_ns() + LIMIT_NS, None)
        later.control.reply(request, {"life": 2})

    async def ask() -> Any:
        with pytest.raises(PeerLost, match="b was lost"):
            await a.control.call("b", "look", {}, a.clock.now_ns() + LIMIT_NS)
        await a.control.until_found(["b"], a.clock.now_ns() + LIMIT_NS)
        return await a.control.call("b", "look", {}, a.clock.now_ns() + LIMIT_NS)

    with ThreadPoolExecutor() as threads:
        threads.submit(later.run, answer())
        assert a.run(ask()) == {"life": 2}
    assert a.control.losses("b") == 1


# ---- the secret ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forged", ["another secret", "no secret", "another address", "a bit flipped", "a repetition"]
)
def test_a_message_that_is_not_signed_for_this_rank_is_dropped_and_counted(
    few: Ranks, forged: str, caplog: pytest.LogCaptureFixture
) -> None:
    b, client = few("b"), client_of(few.store)
    good = Envelopes("a", SECRET)
    first = good.wrap("b", good.freeze(post(1)))
    raw = {
        "another secret": Envelopes("a", b"another secret!!").wrap("b", good.freeze(post(2))),
        "no secret": b'{"from":"a","life":1,"count":1}\n{"kind":"request"}',
        "another address": good.wrap("c", good.freeze(post(2))),
        "a bit flipped": first[:-1] + bytes([first[-1] ^ 1]),
        "a repetition": first,
    }[forged]
    with caplog.at_level(logging.ERROR):
        for one in (first, raw, good.wrap("b", good.freeze(post(3)))):
            client.queue_push("test/inbox/b", one)
        client.set("test/wake", "")
        assert [message["body"]["n"] for _, message in b.until(2)] == [1, 3]
    assert b.mail.rejected == 1
    assert len(caplog.records) == 1
    assert "b dropped: " in caplog.text


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(WeightSyncError, match="has 5 bytes, expected at least 16; make one per run"):
        Envelopes("a", b"guess")


def test_an_envelope_is_for_one_reader() -> None:
    envelopes = Envelopes("a", SECRET)
    raw = envelopes.wrap("b", envelopes.freeze(post(1)))
    assert Envelopes("b", SECRET).unwrap(raw) == ("a", envelopes.life.encode(), post(1))
    with pytest.raises(Rejected, match="not signed"):
        Envelopes("c", SECRET).unwrap(raw)


# ---- leases --------------------------------------------------------------------------------------------------


def test_a_killed_rank_is_lost_when_its_lease_ended(ranks: Ranks) -> None:
    a, b = ranks("a", "a", "b", lease_ns=LEASE_NS), ranks("b", "a", "b", lease_ns=LEASE_NS)
    a.mail.put("b", post(1))
    b.until(1)
    b.mail.kill()
    assert a.until(1) == [("lost", "b")]
    with pytest.raises(PeerLost, match="b was lost"):
        a.run(a.control.call("b", "look", {}, a.clock.now_ns() + LIMIT_NS))


def test_a_rank_that_never_comes_up_is_lost_after_its_grace(few: Ranks) -> None:
    assert few("a", "b", lease_ns=LEASE_NS, grace_ns=LEASE_NS).until(1) == [("lost", "b")]


def test_a_rank_that_comes_back_is_found(few: Ranks) -> None:
    a = few("a", "b", lease_ns=LEASE_NS, grace_ns=1)
    assert a.until(1) == [("lost", "b")]
    few("b", "a", lease_ns=LEASE_NS)
    assert a.until(2)[1:] == [("found", "b")]


def test_a_rank_that_leaves_is_lost_at_once_but_after_its_last_message(ranks: Ranks) -> None:
    """Its lease would last for ten minutes; and who serves must hear ``bye`` before it hears of a loss."""
    a, b = ranks("a", "b", lease_ns=LEASE_NS), ranks("b", "a", lease_ns=LEASE_NS)
    b.mail.put("a", post(0))
    a.until(1)
    for number in (1, 2, 3):
        b.mail.put("a", post(number))
    b.mail.leave()
    told = [what if kind == "lost" else what["body"]["n"] for kind, what in a.until(5)]
    assert told == [0, 1, 2, 3, "b"]


def test_a_store_that_is_gone_loses_everybody(caplog: pytest.LogCaptureFixture) -> None:
    server = host_store()
    with ranks_on(connect_store("127.0.0.1", server.port)) as ranks:
        a = ranks("a", "b", "c", lease_ns=LEASE_NS)
        a.mail.put("a", post(1))
        a.until(1)
        del server
        assert sorted(a.until(3)[1:]) == [("lost", "b"), ("lost", "c")]
        assert a.mail.failure is not None
    assert "a lost the store" in caplog.text
