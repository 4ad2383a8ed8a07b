"""The control plane of one rank over a store: an inbox, a thread that reads it, one that writes and keeps the lease.

Messages wait in a queue per rank on the store, so they arrive in order, once, whether or not the receiver runs yet.
The queue outlives a process: what was meant for one that is gone is dropped by the one in its place.
Nothing here blocks the rank's loop.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.envelopes import Envelopes, Rejected
from weightsync.backends.leases import BEATS_PER_LEASE, ENDED, LEFT, Change, LeaseWatch
from weightsync.backends.store import Store, StoreTimeout, client_of, push
from weightsync.reference.control import Message

WAKE = b""
"""Pushed by a rank into its own inbox, so that its reader looks whether it shall stop."""


def end_lease(store: Store, prefix: str, rank: str) -> None:
    """Tell every rank that the process of ``rank`` has ended, before another one is started in its place.

    For whoever started it and saw it end. Without this word its peers wait for its lease to end, and a process that
    starts later takes that old lease for a rank that is silent.

    Args:
        store: the run's store.
        prefix: of every key.
        rank: name of the rank.
    """
    store.set(f"{prefix}/lease/{rank}", ENDED)


@dataclass(frozen=True, slots=True)
class Events:
    """What a ``StoreMail`` tells its rank, each on the rank's own loop.

    Attributes:
        deliver: a message came in.
        lost: a peer's lease ended, or it left in order and its last message was delivered.
        found: a lost peer is back, or another process in its place.
    """

    deliver: Callable[[Message], None]
    lost: Callable[[str], None]
    found: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class _Letter:
    peer: str
    frozen: bytes


@dataclass(frozen=True, slots=True)
class _Heard:
    """Which process of a peer wrote what was just read; the thread that writes holds what is known of the peers."""

    peer: str
    life: bytes


class StoreMail:
    """One rank's inbox, way out, and lease; implements ``control.Transport``.

    Args:
        me: name of this rank.
        clock: its clock.
        store: the run's store; it is cloned, two connections per rank.
        peers: names of the ranks whose leases are watched.
        secret: shared by all ranks of the run.
        prefix: of every key.
        lease_ns: how long a silent peer counts as alive.
        grace_ns: how long a peer that has not come up yet counts as alive.

    Attributes:
        rejected: messages that were dropped: unsigned, wrongly signed, or repeated.
        outlived: messages that were dropped because they were meant for a former process of this rank.
        failure: why the store is out of reach, or None.
    """

    def __init__(
        self, me: str, clock: AsyncioClock, store: Store, peers: Sequence[str], *,
        secret: bytes, prefix: str, lease_ns: int, grace_ns: int,
    ) -> None:  # fmt: skip
        self.me = me
        self.clock = clock
        self.rejected = 0
        self.outlived = 0
        self.failure: Exception | None = None
        self._store = store
        self._prefix = prefix
        self._watch = LeaseWatch([peer for peer in peers if peer != me], lease_ns, grace_ns)
        self._period_ns = lease_ns // BEATS_PER_LEASE
        self._envelopes = Envelopes(me, secret)
        self._events: Events
        self._beats = 0
        self._lives: dict[str, bytes] = {}
        self._out: queue.SimpleQueue[_Letter | _Heard | None] = queue.SimpleQueue()
        self._stopping = False
        self._leaving = False
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"{me} {name}", daemon=True)
            for name, work in (("reads", self._read), ("writes", self._write))
        ]

    def start(self, events: Events) -> None:
        """Begin to read the inbox and to hold the lease; call it first, and once."""
        self._events = events
        for thread in self._threads:
            thread.start()

    def put(self, peer: str, message: Message) -> None:
        """See ``control.Transport.put``."""
        self._out.put(_Letter(peer, self._envelopes.freeze(message)))

    def leave(self) -> None:
        """Send what is still to be sent, then end in order: peers need not wait for the lease. From any thread."""
        self._leaving = True
        self._out.put(None)

    def kill(self) -> None:
        """Fall silent at once, as if the process had died; the lease runs out. From any thread."""
        self._stopping = True
        self._out.put(None)

    def join(self, timeout_s: float) -> tuple[str, ...]:
        """Wait for both threads after ``leave`` or ``kill``; names of those that still run."""
        until = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        return tuple(thread.name for thread in self._threads if thread.is_alive())

    # ---- threads ---------------------------------------------------------------------------------------------

    def _guard(self, work: Callable[[Store], None]) -> None:
        try:
            work(client_of(self._store))
        except Exception as error:
            self._give_up(error)

    def _read(self, client: Store) -> None:
        inbox = self._inbox(self.me)
        while not self._stopping:
            try:
                raw = client.queue_pop(inbox)
            except StoreTimeout:  # nothing came for very long
                continue
            if raw != WAKE and not self._stopping:
                self._take(raw)

    def _write(self, client: Store) -> None:
        due_ns = time.monotonic_ns()
        while True:
            now_ns = time.monotonic_ns()
            if now_ns >= due_ns:
                self._beat(client, now_ns)
                due_ns = now_ns + self._period_ns
            try:
                letter = self._out.get(timeout=max(0, due_ns - time.monotonic_ns()) / 1e9)
            except queue.Empty:
                continue
            if self._stopping or letter is None:
                break
            if isinstance(letter, _Heard):
                self._tell_all(client, self._watch.heard(letter.peer, letter.life))
            else:
                self._push(client, letter)
        if self._leaving and not self._stopping:
            client.set(self._lease(self.me), f"{self._envelopes.life}.".encode() + LEFT)
        self._stopping = True
        push(client, self._inbox(self.me), WAKE)

    def _take(self, raw: bytes) -> None:
        try:
            sender, life, message = self._envelopes.unwrap(raw)
        except Rejected as rejected:
            self.rejected += 1
            logging.getLogger(__name__).error("%s dropped: %s", self.me, rejected)
            return
        if message is None:
            self.outlived += 1
            return
        if self._lives.get(sender) != life:
            self._lives[sender] = life
            self._out.put(_Heard(sender, life))
        if sender == self.me and message["kind"] == Change.LEFT.value:
            self._tell(self._events.lost, message["peer"])
        else:
            self._tell(self._events.deliver, message)

    def _beat(self, client: Store, now_ns: int) -> None:
        self._beats += 1
        client.set(self._lease(self.me), f"{self._envelopes.life}.{self._beats}".encode())
        peers = list(self._watch.seen)
        peers += [peer for peer in self._watch.unseen if client.check([self._lease(peer)])]
        counts = client.multi_get([self._lease(peer) for peer in peers]) if peers else []
        self._tell_all(client, self._watch.look(now_ns, dict(zip(peers, counts, strict=True))))

    def _tell_all(self, client: Store, changes: Sequence[tuple[Change, str]]) -> None:
        for change, peer in changes:
            if change is Change.LEFT:
                # What it sent before it left is in the inbox by now; the news goes behind it.
                frozen = json.dumps({"kind": Change.LEFT.value, "peer": peer}).encode()
                self._push(client, _Letter(self.me, frozen))
            elif change is Change.LOST:
                self._tell(self._events.lost, peer)
            else:
                self._tell(self._events.found, peer)

    def _push(self, client: Store, letter: _Letter) -> None:
        life = self._watch.life(letter.peer)
        envelope = self._envelopes.wrap(letter.peer, letter.frozen, None if life is None else life.decode())
        push(client, self._inbox(letter.peer), envelope)

    def _give_up(self, error: Exception) -> None:
        """The store is gone, so nobody can be reached any more."""
        if self._stopping:
            return
        self._stopping = True
        self.failure = error
        self._out.put(None)
        logging.getLogger(__name__).error("%s lost the store: %s", self.me, error)
        for peer in (*self._watch.seen, *self._watch.unseen):
            self._tell(self._events.lost, peer)

    def _tell(self, event: Callable[[Any], None], what: Any) -> None:
        self.clock.call_soon_threadsafe(event, what)

    def _inbox(self, rank: str) -> str:
        return f"{self._prefix}/inbox/{rank}"

    def _lease(self, rank: str) -> str:
        return f"{self._prefix}/lease/{rank}"
