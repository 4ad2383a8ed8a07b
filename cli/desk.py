"""Words between the ranks of a run outside of the protocol: who is ready, what to audit. Queues on the run's store."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from weightsync.backends.store import Store, StoreTimeout, client_of
from weightsync.reference.errors import DeadlineExceeded

TOLD_S = 600.0
"""How long a rank waits for a word that its peers have yet to work for."""

READY = "ready"
"""What a rank tells the lead once, before it can be reached by the protocol: that it is there."""

GONE = "gone"
"""What the launcher tells the lead of a rank whose process ended before its part was done.

``rank`` is its name, ``again`` is True when another process is started in its place.
"""


class Desk:
    """One rank's place: others leave words there, in order, each read once. Not for two threads at a time.

    A rank that uses ``hear_all`` is told by several peers, which need not speak in step; it uses nothing else. It
    keeps count of who is gone: the launcher's word comes behind all of the ended process's, and before any of the
    next one's. What it tells a rank is for the process that it heard from; another one in its place skips that.

    Args:
        store: the run's store; a connection of its own is made, since waiting blocks it.
        prefix: of every key.
        me: name of the rank.

    Attributes:
        gone: names of the ranks that are gone at present; one whose next process said ``READY`` is not.
        ever_gone: names of the ranks that were gone at least once.
    """

    def __init__(self, store: Store, prefix: str, me: str) -> None:
        self.me = me
        self.gone: set[str] = set()
        self.ever_gone: set[str] = set()
        self._life = secrets.token_hex(6)
        self._prefix = f"{prefix}/desk"
        self._client: Any = client_of(store)
        self._early: list[Mapping[str, Any]] = []
        self._awaited: set[str] = set()
        self._lives: dict[str, str] = {}

    def tell(self, peers: Iterable[object], op: str, **body: Any) -> None:
        """Leave a word for each peer."""
        for peer in map(str, peers):
            word = {"op": op, "from": self.me, "life": self._life, "for": self._lives.get(peer), **body}
            self._client.queue_push(f"{self._prefix}/{peer}", json.dumps(word).encode())

    def drop(self, peers: Iterable[object]) -> None:
        """Drop every word that waits for these peers, whose processes have ended: the next ones must not act on it."""
        for key in (f"{self._prefix}/{peer}" for peer in peers):
            while self._client.queue_len(key):
                self._client.queue_pop(key)

    def hear(self, timeout_s: float = TOLD_S) -> Mapping[str, Any]:
        """The next word for this rank, and for this process of it; blocks. DeadlineExceeded when none comes."""
        while True:
            word = self._pop(timeout_s)
            if word["for"] in (None, self._life):
                return word

    def hear_all(
        self, peers: Iterable[object], op: str, timeout_s: float = TOLD_S
    ) -> dict[str, Mapping[str, Any]]:
        """Peer -> its word ``op``, once every peer has left one or is gone; other words wait for their turn. Blocks.

        A peer that is gone is not waited for, also when its next process is ready meanwhile.
        Raises DeadlineExceeded naming whoever was not heard for ``timeout_s``.
        """
        missing = {str(peer) for peer in peers}
        heard: dict[str, Mapping[str, Any]] = {}
        while True:
            for word in list(self._early):
                if word["op"] == op and word["from"] in missing:
                    missing.discard(word["from"])
                    heard[word["from"]] = word
                    self._early.remove(word)
            missing -= self.gone
            if not missing:
                return heard
            self._file(f"{op!r} of {', '.join(sorted(missing))}", timeout_s)

    def catch_up(self) -> None:
        """Take in what is there by now: ``gone`` is what the launcher and the ranks have said. Does not wait."""
        while self._client.queue_len(f"{self._prefix}/{self.me}"):
            word = self._pop(TOLD_S)
            if word["for"] in (None, self._life):
                self._sort(word)

    def all_back(self, killed: Iterable[object] = (), timeout_s: float = TOLD_S) -> set[str]:
        """Names of the ranks that were gone and are back, once no process is awaited any more. Blocks.

        Args:
            killed: ranks that must have been gone before this returns.
            timeout_s: DeadlineExceeded when none of the awaited is heard for so long.
        """
        wanted = {str(rank) for rank in killed}
        self.catch_up()
        while missing := self._awaited | (wanted - self.ever_gone):
            self._file(f"the return of {', '.join(sorted(missing))}", timeout_s)
        return self.ever_gone - self.gone

    def _pop(self, timeout_s: float) -> Mapping[str, Any]:
        self._client.set_timeout(timedelta(seconds=timeout_s))
        try:
            word: Mapping[str, Any] = json.loads(self._client.queue_pop(f"{self._prefix}/{self.me}"))
        except StoreTimeout:
            raise DeadlineExceeded(
                f"{self.me} waited {timeout_s:.0f} s for a word of its peers, which"
            ) from None
        return word

    def _file(self, what: str, timeout_s: float) -> None:
        try:
            self._sort(self.hear(timeout_s))
        except DeadlineExceeded:
            raise DeadlineExceeded(f"{what}, awaited {timeout_s:.0f} s by {self.me},") from None

    def _sort(self, word: Mapping[str, Any]) -> None:
        """A word about who is there changes that; any other waits for ``hear_all``."""
        name = word["from"]
        if word["op"] == GONE:
            name = word["rank"]
            self.gone.add(name)
            self.ever_gone.add(name)
            self._awaited = self._awaited | {name} if word["again"] else self._awaited - {name}
            self._early = [early for early in self._early if early["from"] != name]
            return
        self._lives[name] = word["life"]
        if word["op"] == READY and name in self.gone:
            self.gone.discard(name)
            self._awaited.discard(name)
        else:
            self._early.append(word)
