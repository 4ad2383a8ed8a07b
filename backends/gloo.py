"""The verbs on host collectives: buckets over gloo in groups opened one by one, control messages over a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.control import Events, StoreMail
from weightsync.backends.gloo_fabric import NOTE, GlooFabric
from weightsync.backends.store import Store
from weightsync.reference.control import Control, Message
from weightsync.reference.errors import PlanMismatch, WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.rank import Engine, Hooks, Verbs
from weightsync.reference.trace import Trace

LEASE_NS = 30_000_000_000


@dataclass(frozen=True, slots=True)
class _Rank:
    clock: AsyncioClock
    mail: StoreMail
    fabric: GlooFabric


class GlooWorld:
    """What one process, or one thread rank, needs to take part in a run: the store, the secret, the lease.

    Args:
        store: the run's store, hosted by the launcher (see ``backends.store``); it stays the caller's.
        ranks: every rank of the run.
        secret: shared by all ranks, at least 16 bytes; control messages are signed with it.
        prefix: of every key on the store; unique to the run if runs share a store.
        hostname: address of this host that data groups bind to; the default serves ranks of one host.
        lease_ns: a rank that shows no sign of life for so long is lost.
        grace_ns: how long a rank may take to come up; by default ten leases.
    """

    def __init__(
        self, store: Store, ranks: Sequence[RankId], *, secret: bytes, prefix: str = "weightsync",
        hostname: str = "127.0.0.1", lease_ns: int = LEASE_NS, grace_ns: int | None = None,
    ) -> None:  # fmt: skip
        if lease_ns <= 0:
            raise WeightSyncError(f"lease_ns is {lease_ns}; expected a positive number of nanoseconds")
        self.store = store
        self.ranks = tuple(ranks)
        self.prefix = prefix
        self.hostname = hostname
        self.lease_ns = lease_ns
        self.grace_ns = 10 * lease_ns if grace_ns is None else grace_ns
        self._secret = secret
        self._made: dict[RankId, _Rank] = {}

    def verbs(
        self, me: RankId, local: Any, *, engine: Engine | None = None, trace: Trace | None = None,
        hooks: Hooks | None = None, clock: AsyncioClock | None = None,
    ) -> Verbs:  # fmt: skip
        """The verbs of one rank of this process. From now on it holds its lease and takes messages in.

        Args:
            me: the rank.
            local: its bytes, a ``Source`` or a ``Target``; they stay the caller's.
            engine: what generates, on the leader of a rollout.
            trace: where spans go.
            hooks: sees every verb.
            clock: the rank's clock; by default one on the running loop.
        """
        if me not in self.ranks:
            raise PlanMismatch(
                f"{me} is no rank of this run, which has {', '.join(map(str, self.ranks))}; pass them all"
            )
        clock = clock or AsyncioClock(asyncio.get_running_loop(), rank_name=str(me))
        mail = StoreMail(
            str(me), clock, self.store, [str(rank) for rank in self.ranks],
            secret=self._secret, prefix=self.prefix, lease_ns=self.lease_ns, grace_ns=self.grace_ns,
        )  # fmt: skip
        fabric = GlooFabric(me, clock, self.store, mail.put, self.prefix, self.hostname)
        control = Control(str(me), clock, mail)

        def deliver(message: Message) -> None:
            (fabric.hear if message["kind"] == NOTE else control.deliver)(message)

        def lost(peer: str) -> None:
            control.lost(peer)
            fabric.lost(peer)

        mail.start(Events(deliver, lost, control.found))
        self._made[me] = _Rank(clock, mail, fabric)
        return Verbs(me, clock, control, fabric, local, engine, trace, hooks)

    def kill(self, me: RankId) -> None:
        """Let a rank of this process do nothing any more, as if its process had died. From any thread.

        Its groups break for the peers as soon as what it has under way ended; its lease runs out.
        """
        rank = self._made[me]
        rank.clock.kill()
        rank.mail.kill()
        rank.fabric.release()

    def close(self, timeout_s: float = 10.0) -> tuple[str, ...]:
        """End in order: send what is still to be sent, let the peers know, drop every group. Blocks; idempotent.

        Returns the names of threads that still run after ``timeout_s``: gloo is waiting for a peer there, and they
        end by the deadline of what they wait for.
        """
        until = time.monotonic() + timeout_s
        for rank in self._made.values():
            rank.mail.leave()
            rank.fabric.release()
        left: list[str] = []
        for rank in self._made.values():
            left += rank.mail.join(max(0.0, until - time.monotonic()))
            left += rank.fabric.join(max(0.0, until - time.monotonic()))
        return tuple(left)
