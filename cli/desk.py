"""Words between the ranks of a run outside of the protocol: who is ready, what to audit. Queues on the run's store."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from weightsync.backends.store import Store, StoreTimeout, client_of
from weightsync.reference.errors import DeadlineExceeded

TOLD_S = 600.0
"""How long a rank waits for a word that its peers have yet to work for."""


GONE = "gone"
"""What the launcher tells the lead of a rank whose process ended before its part was done."""


class Desk:
    """One rank's place: others leave words there, in order, each read once. Not for two threads at a time.

    A rank that uses ``hear_all`` is told by several peers, which need not speak in step; it uses nothing else.

    Args:
        store: the run's store; a connection of its own is made, since waiting blocks it.
        prefix: of every key.
        me: name of the rank.
    """

    def __init__(self, store: Store, prefix: str, me: str) -> None:
        self.me = me
        self._prefix = f"{prefix}/desk"
        self._client: Any = client_of(store)
        self._early: list[Mapping[str, Any]] = []
        self._gone: set[str] = set()

    def tell(self, peers: Iterable[object], op: str, **body: Any) -> None:
        """Leave a word for each peer."""
        word = json.dumps({"op": op, "from": self.me, **body}).encode()
        for peer in peers:
            self._client.queue_push(f"{self._prefix}/{peer}", word)

    def hear(self, timeout_s: float = TOLD_S) -> Mapping[str, Any]:
        """The next word for this rank; blocks. DeadlineExceeded when none comes."""
        self._client.set_timeout(timedelta(seconds=timeout_s))
        try:
            word: Mapping[str, Any] = json.loads(self._client.queue_pop(f"{self._prefix}/{self.me}"))
        except StoreTimeout:
            raise DeadlineExceeded(
                f"{self.me} waited {timeout_s:.0f} s for a word of its peers, which"
            ) from None
        return word

    def hear_all(
        self, peers: Iterable[object], op: str, timeout_s: float = TOLD_S
    ) -> dict[str, Mapping[str, Any]]:
        """Peer -> its word ``op``, once every peer has left one or is gone; other words wait for their turn. Blocks.

        Raises DeadlineExceeded naming whoever was not heard for ``timeout_s``.
        """
        missing = {str(peer) for peer in peers} - self._gone
        heard: dict[str, Mapping[str, Any]] = {}
        words, self._early = self._early, []
        while missing:
            try:
                word = words.pop(0) if words else self.hear(timeout_s)
            except DeadlineExceeded:
                names = ", ".join(sorted(missing))
                raise DeadlineExceeded(
                    f"{op!r} of {names}, awaited {timeout_s:.0f} s by {self.me},"
                ) from None
            if word["op"] == GONE:
                self._gone.add(word["rank"])
                missing.discard(word["rank"])
            elif word["op"] == op and word["from"] in missing:
                missing.discard(word["from"])
                heard[word["from"]] = word
            else:
                self._early.append(word)
        self._early += words
        return heard
