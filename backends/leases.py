"""Leases: each rank counts upwards under a key of its own, and watches the counts of its peers. Pure, no clock.

A value is ``LIFE.COUNT``: the process that holds the lease, and how often it renewed it. Another life under a peer's
key is another process in its place, so the one before is lost, however short the time was in which nobody was there.
Only a rank's own monotonic clock is used, so hosts may disagree about the time. Time in which no count could be
read says nothing about anybody: a store that answers nobody for a while ends no lease.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

LEFT = b"left"
"""What a rank that ends in order writes instead of a count."""

ENDED = b"ended"
"""What whoever started a rank's process writes under its key on seeing it dead: nobody need wait for the lease to end.

To a process that starts later this is nobody yet, not a loss.
"""

BEATS_PER_LEASE = 4


class Change(Enum):
    """What became of a peer: its lease ended, it is held again, or the peer left in order."""

    LOST = "lost"
    FOUND = "found"
    LEFT = "left"


@dataclass
class _Watched:
    value: bytes | None = None
    life: bytes | None = None
    former: set[bytes] = field(default_factory=set)
    silent_ns: int = 0
    held: bool = True


class LeaseWatch:
    """What one rank knows of its peers' leases.

    Args:
        peers: names of the ranks to watch.
        lease_ns: a peer whose count stands still for so long is lost.
        grace_ns: a peer that has never been seen is lost after so long.
    """

    def __init__(self, peers: Iterable[str], lease_ns: int, grace_ns: int) -> None:
        self.lease_ns = lease_ns
        self.grace_ns = grace_ns
        self._peers = {peer: _Watched() for peer in peers}
        self._looked_ns: int | None = None

    @property
    def unseen(self) -> tuple[str, ...]:
        """Peers that have never been seen."""
        return tuple(peer for peer, watched in self._peers.items() if watched.value is None)

    @property
    def seen(self) -> tuple[str, ...]:
        """Peers that have been seen at least once."""
        return tuple(peer for peer, watched in self._peers.items() if watched.value is not None)

    def life(self, peer: str) -> bytes | None:
        """The last process known to hold the lease of ``peer``; None when none was seen, or nobody watches it."""
        watched = self._peers.get(peer)
        return None if watched is None else watched.life

    def heard(self, peer: str, life: bytes) -> list[tuple[Change, str]]:
        """What changed by a message of this life of ``peer``, which may have been under way for long."""
        watched = self._peers.get(peer)
        if watched is None or life in watched.former:
            return []
        return [(change, peer) for change in self._meet(watched, life)]

    def look(self, now_ns: int, counts: Mapping[str, bytes]) -> list[tuple[Change, str]]:
        """What changed since the last look, given what stands under each peer's key now.

        Args:
            now_ns: this rank's monotonic clock. A pause since the last look counts for two beats at most.
            counts: peer -> its count; a peer without one is left out.
        """
        passed_ns = 0 if self._looked_ns is None else now_ns - self._looked_ns
        passed_ns = min(passed_ns, 2 * self.lease_ns // BEATS_PER_LEASE)
        self._looked_ns = now_ns
        return [
            (change, peer)
            for peer, watched in self._peers.items()
            for change in self._judge(watched, counts.get(peer, watched.value), passed_ns)
        ]

    def _judge(self, watched: _Watched, value: bytes | None, passed_ns: int) -> list[Change]:
        if value == watched.value or (value == ENDED and watched.life is None):
            watched.silent_ns += passed_ns
            limit_ns = self.grace_ns if watched.life is None else self.lease_ns
            return self._lose(watched, Change.LOST) if watched.silent_ns >= limit_ns else []
        watched.value, watched.silent_ns = value, 0
        if value is None or value == ENDED:
            return self._lose(watched, Change.LOST)
        life, _, count = value.rpartition(b".")
        changes = self._meet(watched, life)
        if count == LEFT:
            return changes + self._lose(watched, Change.LEFT)
        if not watched.held:
            watched.held = True
            changes.append(Change.FOUND)
        return changes

    def _meet(self, watched: _Watched, life: bytes) -> list[Change]:
        """A life shows itself. Another one than before means that the one before is over."""
        if life == watched.life:
            return []
        changes = []
        if watched.life is not None:
            watched.former.add(watched.life)
            changes = self._lose(watched, Change.LOST)
        watched.life, watched.silent_ns = life, 0
        if not watched.held:
            watched.held = True
            changes.append(Change.FOUND)
        return changes

    def _lose(self, watched: _Watched, how: Change) -> list[Change]:
        """The loss, unless it was told before."""
        told, watched.held = not watched.held, False
        return [] if told else [how]
