"""The receiver's way in for an engine that is called: a session per rollout rank, driven by plain calls."""

from __future__ import annotations

import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from weightsync.backends.inline import inline_verbs, run_inline
from weightsync.backends.session_status import SessionStatus
from weightsync.reference.buckets import Bucket, Header
from weightsync.reference.control import Request
from weightsync.reference.digest import combine
from weightsync.reference.errors import PatchMismatch, PlanMismatch, StaleVersion, WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.protocol import DELTA, FULL, ProtocolSettings
from weightsync.reference.rank import Hooks
from weightsync.reference.receiver import Receiving
from weightsync.reference.rollout import Rollout
from weightsync.reference.target import Target
from weightsync.reference.trace import Trace

T = TypeVar("T")
LEAD = RankId("trainer", 0, 0)


class ReceiverSession:
    """One rollout rank that takes an update in by calls: start, receive, prepare, (prove,) commit or abort.

    It runs the methods of ``reference.rollout.Rollout`` and owns no loop, no thread and no timer: nothing
    happens between two calls. Whoever calls it is the leader of the rollout: it calls every rank, pauses
    generation before ``prepare`` (with ``receive = "stream"`` before ``start``), resumes after every rank
    committed or aborted, and aborts when no decision comes. A call that raises leaves the session as it was,
    or, where it says so, rolled back. Calls from several threads take turns; ``status`` does not wait.

    Args:
        target: the rank's bytes; they stay the caller's, who must not write them while an update runs.
        fingerprint: that of the transfer plan.
        rank: this rank, for error texts and to find its digest share.
        world: ranks of the rollout.
        settings: ``receive`` and ``verify_every`` count here; equal on every rank.
        trace: where spans go.
        hooks: sees every verb; must not wait.
        rollout: the protocol's half to drive; a wrong protocol is a subclass.
    """

    def __init__(
        self,
        target: Target,
        fingerprint: int,
        *,
        rank: RankId | None = None,
        world: int = 1,
        settings: ProtocolSettings | None = None,
        trace: Trace | None = None,
        hooks: Hooks | None = None,
        rollout: type[Rollout] = Rollout,
    ) -> None:
        me = RankId("rollout", 0, 0) if rank is None else rank
        if not 0 <= me.rank < world:
            raise PlanMismatch(
                f"session of {me} was told of {world} ranks, expected more than {me.rank}; pass world"
            )
        self.me = me
        self.world = world
        self.fingerprint = fingerprint
        self.target = target
        self.verbs = inline_verbs(me, target, trace=trace, hooks=hooks)
        self._rollout = rollout(self.verbs, fingerprint, (me,), LEAD, settings or ProtocolSettings())
        self._last: tuple[bytes, bool] | None = None
        self._share: int | None = None
        self._proved = False
        self._turn = threading.RLock()
        self._calling: str | None = None

    def hello(self, epoch: int, fingerprint: int, update: int = 0) -> Mapping[str, Any]:
        """Join a group epoch, giving up what is in progress, and report what this rank holds.

        Returns ``version``, ``dirty``, ``highest``, ``new`` (True for the first greeting) and ``digest`` (this rank's
        share, signed 64 bit; see ``digest.combine``), from which a trainer chooses between a delta and a full
        update. A session that nobody greets is in epoch 0.

        Args:
            epoch: the group epoch that the headers of its buckets will name.
            fingerprint: that of the trainer's plan.
            update: the trainer's number of the update.

        Raises:
            StaleVersion: the epoch is over; nothing changed.
            PlanMismatch: the trainer has another plan; nothing changed.
        """
        with self._call("hello"):
            body = {"epoch": epoch, "fingerprint": fingerprint, "update": update}
            return self._run(self._rollout.hello(self._request("hello", body)))

    def start(self, version: int, base: int = 0, kind: str = FULL, update: int | None = None) -> None:
        """Get ready to receive ``version``; an update in progress is rolled back first.

        Args:
            version: its number, above every number ever tried here.
            base: the version that a delta is made for; 0 for a full update.
            kind: ``"full"`` or ``"delta"``.
            update: the trainer's number of the update, which decides whether it is verified; ``version`` if
                left out.

        Raises:
            StaleVersion: the number was tried before, or this rank does not hold ``base``; nothing changed.
        """
        if kind not in (FULL, DELTA) or (kind == FULL and base != 0):
            raise PlanMismatch(
                f"update of kind {kind!r} on base version {base} was started, expected 'full' on 0 or "
                "'delta' on the version held; correct the call"
            )
        with self._call("start"):
            rollout, number = self._rollout, version if update is None else update
            body = {
                "epoch": rollout.epoch, "version": version, "base": base, "kind": kind, "update": number,
                "lanes": [{"group": "session", "members": [str(self.me)], "holding": self.verbs.holding()}],
            }  # fmt: skip
            self._run(rollout.begin(body, self.verbs.now_ns() + rollout.settings.update_ns))
            self._last, self._share, self._proved = None, None, False

    def receive(self, header: bytes, payload: bytes | bytearray | memoryview | Tensor) -> bool:
        """Take in the next bucket: True at the trailer. ``payload`` may be overwritten once this returns.

        The same header again, after a lost reply, gets the same answer and does nothing.

        Args:
            header: its 64 bytes.
            payload: exactly the bytes it announces; a tensor is uint8 (nbytes,), of any device.

        Raises:
            PatchMismatch: the bucket is damaged, or not the next one; it can be sent again.
            StaleVersion: nothing is in progress, or the bucket is of another version; nothing changed.
            UpdateAborted: it was the trailer of a failure; the update is rolled back.
        """
        with self._call("receive"):
            update = self._rollout.update
            if update is None:
                raise StaleVersion(
                    f"a bucket came to {self.me}, expected start() before it; nothing is in progress"
                )
            raw = bytes(header)
            if self._last is not None and self._last[0] == raw:
                return self._last[1]
            if update.digest is not None:
                raise StaleVersion(
                    f"a bucket came to {self.me} after the trailer of version {update.version}, expected "
                    "none; prepare or abort that version"
                )
            bucket = Bucket(Header.unpack(raw), _own(payload))
            before = update.sequence
            try:
                ended = self._run(self._rollout.accept(update, bucket))
            except Exception as error:
                if update.sequence != before:
                    self._give_up(error)
                raise
            self._last = (raw, ended)
            return ended

    def prepare(self, version: int) -> int:
        """Apply what came; this rank's digest share. The caller has paused generation. Repeatable.

        With one rank the share is proved here; with more, collect all shares and ``prove`` them on each.

        Raises:
            StaleVersion: ``version`` is not in progress, or its trailer has not come; nothing changed.
            PatchMismatch: the digest is not the trainer's; rolled back and dirty: a full update heals it.
        """
        with self._call("prepare"):
            update = self._rollout.expect(version)
            if update.digest is None:
                raise StaleVersion(
                    f"version {version} has {update.sequence} buckets on {self.me} and no trailer, expected "
                    "one; receive until it is there"
                )
            if self._share is None:
                try:
                    self._run(self._rollout.pause())
                    body = self._run(self._rollout.apply(self._request("apply", {"version": version})))
                except Exception as error:
                    self._give_up(error)
                    raise
                self._share = body["digest"]
                if self.world == 1:
                    self._prove(update, (self._share,))
            return self._share

    def prove(self, version: int, shares: Sequence[int]) -> None:
        """Compare the rollout's digest, from every rank's share, with the trainer's. Repeatable.

        Args:
            version: the prepared version.
            shares: what ``prepare`` returned on every rank, in rank order.

        Raises:
            StaleVersion: ``version`` is not prepared here; nothing changed.
            PlanMismatch: the shares are not those of this rollout's ranks; nothing changed.
            PatchMismatch: the digest is not the trainer's; rolled back and dirty: a full update heals it.
        """
        with self._call("prove"):
            update = self._rollout.expect(version)
            if self._share is None:
                raise StaleVersion(
                    f"version {version} is not prepared on {self.me}, expected that; prepare it first"
                )
            if len(shares) != self.world or shares[self.me.rank] != self._share:
                raise PlanMismatch(
                    f"{self.me} was given {len(shares)} digest shares, expected {self.world} in rank order "
                    f"with {self._share} at {self.me.rank}; pass what prepare() returned on every rank"
                )
            if not self._proved:
                self._prove(update, shares)

    def commit(self, version: int) -> None:
        """Make a prepared version the label. Repeating it, also after a lost reply, does nothing.

        Raises:
            StaleVersion: ``version`` is not in progress, not prepared, or not proved; nothing changed.
        """
        with self._call("commit"):
            update = self._rollout.update
            if update is not None and update.version == version and update.prepared and not self._proved:
                raise StaleVersion(
                    f"version {version} is prepared on {self.me} and not proved, expected that; call prove() "
                    "with the digest shares of all ranks"
                )
            self._run(self._rollout.commit(self._request("commit", {"version": version})))

    def abort(self, version: int, reason: str = "its caller gave it up") -> bool:
        """Give ``version`` up: True when it was in progress and is rolled back. Repeatable.

        After a delta every old bit is back and the old label holds; after a full update the rank is dirty
        if anything was written. A version that was committed stays.
        """
        with self._call("abort"):
            running = self._rollout.update
            self._run(self._rollout.abort(self._request("abort", {"version": version, "reason": reason})))
            return running is not None and self._rollout.update is None

    def recount(self) -> int:
        """This rank's share of the digest, every element read now; to be called while nothing is in progress.

        The shares of all ranks add up to the digest of the version held (``digest.combine``). What was kept since the
        last recount cannot show a bit that changed where nothing was written.

        Raises:
            StaleVersion: a version is in progress; nothing changed.
        """
        with self._call("recount"):
            if self._rollout.update is not None:
                raise StaleVersion(
                    f"recount() of {self.me} was called while version {self._rollout.update.version} is in progress, "
                    "expected none; commit or abort it first"
                )
            return self._run(self.verbs.digest(afresh=True))

    def status(self) -> SessionStatus:
        """What this rank holds now; may be called from any thread, also during another call."""
        rollout, update = self._rollout, self._rollout.update
        return SessionStatus(
            rollout.version, rollout.dirty, rollout.highest, update.version if update is not None else None,
            update is not None and update.prepared, rollout.generating and rollout.dirty is None,
        )  # fmt: skip

    def _prove(self, update: Receiving, shares: Sequence[int]) -> None:
        try:
            self._run(self._rollout.prove(update, combine(shares)))
        except PatchMismatch as error:
            self._give_up(error)
            raise
        self._proved = True

    def _give_up(self, error: Exception) -> None:
        self._run(self._rollout.end_update(str(error)))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return run_inline(coroutine, f"{self._calling}() of {self.me}")

    def _request(self, op: str, body: Mapping[str, Any]) -> Request:
        return Request("caller", op, body, None, None)

    @contextmanager
    def _call(self, name: str) -> Iterator[None]:
        with self._turn:
            if self._calling is not None:
                raise WeightSyncError(
                    f"{name}() was called within {self._calling}() of {self.me}, expected one call at a "
                    "time; call it when the other has returned"
                )
            self._calling = name
            try:
                yield
            finally:
                self._calling = None


def _own(payload: bytes | bytearray | memoryview | Tensor) -> Tensor:
    """The payload in new memory on the host."""
    if isinstance(payload, Tensor):
        return torch.empty(payload.numel(), dtype=payload.dtype).copy_(payload.detach().reshape(-1))
    raw = bytearray(memoryview(payload))
    return torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
