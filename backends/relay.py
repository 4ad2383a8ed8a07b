"""The leader of a rollout whose ranks are sessions elsewhere: from the protocol to plain calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weightsync.reference.buckets import ABORT, END, Bucket, End, Header, read_abort, read_end
from weightsync.reference.control import Request
from weightsync.reference.digest import combine
from weightsync.reference.members import RankId
from weightsync.reference.protocol import DELTA, FULL, ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.receiver import Receiving
from weightsync.reference.rollout import Rollout
from weightsync.reference.steps import Step, Touched, run

T = TypeVar("T")
CallAll = Callable[..., Sequence[Any]]
"""``call_all(method, *arguments)`` runs one session method on every rank and returns the answers in rank order.

It blocks, has a timeout of its own, and raises when any rank did; the shape of vLLM's ``collective_rpc``.
"""


@dataclass(frozen=True, eq=False, slots=True)
class Relayed:
    """A bucket that is handed on as it is; see ``target.Decoded`` for the attributes."""

    bucket: Bucket
    end: End | None = None
    aborted: str | None = None

    @property
    def header(self) -> Header:
        """Its header."""
        return self.bucket.header

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return self.bucket.nbytes


class SessionRelay(Rollout):
    """Serves the protocol for sessions that are called: labels, lease and verdicts are held here, bits there.

    The sessions have the settings of the protocol. Calls run in a thread, so the loop goes on meanwhile. A call
    that outlives its update is refused by the sessions, which know their version.

    Args:
        verbs: verbs of this rank from any backend; their engine pauses and resumes every rank. Their local
            bytes are not used.
        fingerprint: fingerprint of the transfer plan.
        trainer: the trainer's lead.
        settings: equal on every rank.
        call_all: calls the sessions.
    """

    def __init__(
        self, verbs: Verbs, fingerprint: int, trainer: RankId, settings: ProtocolSettings, call_all: CallAll
    ) -> None:
        threaded = _ThreadedVerbs(
            verbs.me, verbs.clock, verbs.control, verbs.fabric, _Sessions(self, call_all), verbs.engine,
            verbs.trace, verbs.hooks,
        )  # fmt: skip
        super().__init__(threaded, fingerprint, (verbs.me,), trainer, settings)
        self.call_all = call_all

    async def hello(self, request: Request) -> Mapping[str, Any]:
        """See ``Rollout.hello``; a session that is dirty, or has another label, makes the rollout dirty."""
        if self.dirty is None:
            for rank, status in enumerate(await asyncio.to_thread(self.call_all, "status")):
                if status.dirty is not None or status.version != self.version:
                    await self.pause()
                    self.dirty = f"session {rank} holds version {status.version} ({status.dirty or 'clean'})"
        return await super().hello(request)

    async def install_all(self, update: Receiving) -> int:
        """See ``Rollout.install_all``: every session applies what it holds, and all their shares are proved."""
        update.touched = True
        update.staged.clear()
        await self.verbs.apply(None, undo=update.kind == DELTA)
        return await self.verbs.digest(afresh=self.verifies())

    async def roll_back(self, update: Receiving) -> bool:
        """See ``Rollout.roll_back``: also what was only staged is dropped."""
        return await self.fanout.quietly(self.verbs.rollback)


class CalledEngine:
    """An engine that is paused and resumed by blocking calls; implements ``reference.rank.Engine``.

    Args:
        pause: returns once no request reads the weights of any rank; repeatable.
        resume: lets requests read them; repeatable.
    """

    def __init__(self, pause: Callable[[], object], resume: Callable[[], object]) -> None:
        self._pause = pause
        self._resume = resume

    async def pause(self) -> None:
        """Return once no request reads the weights."""
        await asyncio.to_thread(self._pause)

    async def resume(self) -> None:
        """Let requests read the weights."""
        await asyncio.to_thread(self._resume)


class _ThreadedVerbs(Verbs):
    """Verbs whose local steps run in a thread."""

    async def perform(self, name: str, step: Step[T]) -> T:
        return await asyncio.to_thread(run, step)


class _Sessions:
    """The local bytes of a relay, which are the sessions'; the steps of a ``Target``, as calls."""

    def __init__(self, relay: SessionRelay, call_all: CallAll) -> None:
        self._relay = relay
        self._call = call_all
        self._version: int | None = None
        self._shares: Sequence[int] | None = None

    @property
    def fingerprint(self) -> int:
        """That of the plan: the sessions, which hold different parts, are handed whole buckets."""
        return self._relay.fingerprint

    def decode(self, bucket: Bucket) -> Step[Relayed]:
        """The trailer is read here, everything else by the sessions."""
        yield Touched(bucket.nbytes)
        if bucket.header.kind == END:
            return Relayed(bucket, end=read_end(bucket))
        if bucket.header.kind == ABORT:
            return Relayed(bucket, aborted=read_abort(bucket))
        return Relayed(bucket)

    def validate(self, decoded: Relayed, *, version: int, base: int, epoch: int, sequence: int) -> Step[None]:
        """The sessions prove the bucket, and stage or apply it."""
        yield Touched(decoded.nbytes)
        if decoded.aborted is not None:
            return
        if self._version != version:
            self._version, self._shares = (
                version,
                None,
            )  # before the call, which may fail on some of the ranks
            self._call("start", version, base, DELTA if base else FULL, self._relay.verbs.update)
        self._call("receive", decoded.bucket.header.pack(), decoded.bucket.payload)

    def apply(self, decoded: Relayed | None, undo: bool) -> Step[int]:
        """Given None, the sessions apply and prove the version; a single bucket they have applied already."""
        yield Touched(0, writes=("weights",))
        if decoded is None:
            shares: Sequence[int] = self._call("prepare", self._version)
            self._call("prove", self._version, shares)
            self._shares = shares
        return 0

    def digest(self, *, afresh: bool = False) -> Step[int]:
        """Of the prepared version, which the sessions have proved; between updates what they recount, or report."""
        yield Touched(0, reads=("weights",))
        if self._shares is not None:
            return combine(self._shares)
        if afresh:
            return combine(self._call("recount"))
        relay = self._relay
        reports = self._call("hello", relay.epoch, relay.fingerprint, relay.verbs.update)
        relay.highest = max([relay.highest, *(report["highest"] for report in reports)])
        return combine(report["digest"] for report in reports)

    def same_digest(self, found: int, expected: int) -> bool:
        """True when two digests are equal."""
        return found == expected

    def rollback(self) -> Step[int]:
        """The sessions give the version up."""
        yield Touched(0, writes=("weights",))
        if self._version is not None:
            self._call("abort", self._version)
        self._version, self._shares = None, None
        return 0

    def commit(self) -> Step[None]:
        """The sessions commit the version; nothing more happens once all of them have."""
        yield Touched(0)
        if self._version is not None:
            self._call("commit", self._version)
        self._version, self._shares = None, None
