"""The verbs of one rank, written once: each is an await with a span, a hook, and one effect.

A backend supplies four things: a clock, a control plane, a fabric that moves buckets, and the rank's local bytes
(``Source`` or ``Target``). It may override ``perform`` to say what a local step costs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from weightsync.reference.clock import Clock, Task
from weightsync.reference.control import INQUIRE, Control, Request
from weightsync.reference.errors import DeadlineExceeded
from weightsync.reference.members import Group, RankId
from weightsync.reference.phases import PHASES
from weightsync.reference.seams import Engine, Fabric, Hooks
from weightsync.reference.steps import Step, run
from weightsync.reference.trace import Span, Trace
from weightsync.reference.verdict import Verdict, Vote

__all__ = ["PHASES", "Engine", "Fabric", "Hooks", "Verbs"]

T = TypeVar("T")


class Verbs:
    """The verbs of one rank. Groups, ranks, clocks and deadlines are passed in; nothing is global.

    Args:
        me: this rank.
        clock: its clock.
        control: its end of the control plane.
        fabric: its data groups.
        local: its bytes: a ``Source`` on the trainer, a ``Target`` on a rollout.
        engine: what generates; leaders of rollouts only.
        trace: where spans go.
        hooks: sees every verb, or None.
    """

    def __init__(
        self,
        me: RankId,
        clock: Clock,
        control: Control,
        fabric: Fabric,
        local: Any,
        engine: Engine | None = None,
        trace: Trace | None = None,
        hooks: Hooks | None = None,
    ) -> None:
        self.me = me
        self.clock = clock
        self.control = control
        self.fabric = fabric
        self.local = local
        self.engine = engine
        self.trace = trace if trace is not None else Trace()
        self.hooks = hooks
        self.update = 0

    async def verb(
        self, name: str, effect: Callable[[], Awaitable[T]], nbytes: Callable[[T], int] | int = 0
    ) -> T:
        """Result of one effect, with its span recorded and the hooks called around it."""
        start, ok, moved = self.clock.now_ns(), False, 0
        try:
            ordinal = await self.hooks.before(name) if self.hooks is not None else 0
            result = await effect()
            moved = nbytes if isinstance(nbytes, int) else nbytes(result)
            if self.hooks is not None:
                await self.hooks.after(name, ordinal)
            ok = True
            return result
        finally:
            self.trace.add(
                Span(str(self.me), name, PHASES[name], start, self.clock.now_ns(), moved, self.update, ok)
            )

    async def perform(self, name: str, step: Step[T]) -> T:
        """Result of a local step. Real backends run it through; a modelled one spends its time half-way."""
        return run(step)

    async def _local(self, name: str, make: Callable[[], Step[T]], nbytes: Callable[[T], int] | int = 0) -> T:
        return await self.verb(name, lambda: self.perform(name, make()), nbytes)

    # ---- both sides: data groups and control -----------------------------------------------------------------

    async def connect(self, group: Group, deadline_ns: int) -> None:
        """Open a data group with all its members, communicator initialised, by ``deadline_ns``. Both sides."""
        await self.verb("connect", lambda: self.fabric.open(group, deadline_ns))

    async def disconnect(self, group: Group) -> None:
        """Drop a data group and whatever still waits in it. Both sides."""
        await self.verb("disconnect", lambda: self.fabric.close(group))

    async def call(
        self, peer: RankId, op: str, body: Mapping[str, Any], deadline_ns: int
    ) -> Mapping[str, Any]:
        """The peer's reply; RemoteError, PeerLost or DeadlineExceeded otherwise. Both sides."""
        return await self.verb("call", lambda: self.control.call(str(peer), op, body, deadline_ns))

    async def post(self, peer: RankId, op: str, body: Mapping[str, Any]) -> None:
        """Send a message that expects no reply and may arrive late. Both sides."""

        async def effect() -> None:
            self.control.post(str(peer), op, body)

        await self.verb("post", effect)

    async def serve(self, deadline_ns: int | None, watch: RankId) -> Request:
        """The next request; DeadlineExceeded, or PeerLost once ``watch`` is gone. Rollout.

        A request whose serving fails is not lost: it is the next one again.
        """
        taken: list[Request] = []

        async def effect() -> Request:
            taken.append(await self.control.serve(deadline_ns, str(watch)))
            return taken[0]

        try:
            return await self.verb("serve", effect)
        except BaseException:
            for request in taken:
                self.control.unserve(request)
            raise

    async def reply(
        self,
        request: Request,
        body: Mapping[str, Any] | None = None,
        *,
        error: str | None = None,
        lost: str | None = None,
    ) -> None:
        """Answer a request; answering twice is harmless. Rollout."""

        async def effect() -> None:
            self.control.reply(request, body, error=error, lost=lost)

        await self.verb("reply", effect)

    async def agree(
        self, members: Sequence[RankId], key: str, vote: Vote, deadline_ns: int, patience_ns: int
    ) -> Verdict:
        """Everybody's verdict on a stage, the same on all ranks; safe to repeat. Trainer."""
        names = [str(member) for member in members]
        return await self.verb(
            "agree", lambda: self.control.agree(names, key, vote, deadline_ns, patience_ns)
        )

    # ---- both sides: structured concurrency ------------------------------------------------------------------

    def now_ns(self) -> int:
        """This rank's clock."""
        return self.clock.now_ns()

    def is_lost(self, rank: RankId) -> bool:
        """True while the lease of ``rank`` is over, as far as this rank knows. Both sides; not an await."""
        return self.control.is_lost(str(rank))

    def losses(self, rank: RankId) -> int:
        """How often the lease of ``rank`` ended, as far as this rank knows. Both sides; not an await."""
        return self.control.losses(str(rank))

    async def until_found(self, ranks: Sequence[RankId], deadline_ns: int) -> None:
        """Return while no lease of ``ranks`` is over; DeadlineExceeded at ``deadline_ns``. Both sides."""
        names = [str(rank) for rank in ranks]
        await self.verb("until_found", lambda: self.control.until_found(names, deadline_ns))

    def inquire(self, peer: RankId, deadline_ns: int) -> Awaitable[Mapping[str, Any]]:
        """What ``peer`` discloses of itself. Either side; no span and no hook, so that asking changes no run."""
        return self.control.call(str(peer), INQUIRE, {}, deadline_ns)

    def disclose(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Let peers have ``state()`` when they inquire, at any time. Both sides; not an await."""
        self.control.disclose(state)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str) -> Task:
        """Start a task of this rank; join or cancel it. Not an await, so no fault can hit it."""
        return self.clock.spawn(coroutine, name)

    async def join(self, tasks: Sequence[Task], deadline_ns: int | None) -> None:
        """Return when all tasks are done; raise the first failure at once, DeadlineExceeded at ``deadline_ns``."""

        async def effect() -> None:
            try:
                await self.clock.join(tasks, deadline_ns)
            except TimeoutError:
                raise DeadlineExceeded("join") from None

        await self.verb("join", effect)

    async def cancel(self, task: Task) -> None:
        """Cancel a task and return once it ended. Both sides."""
        await self.verb("cancel", lambda: self.clock.cancel(task))

    # ---- trainer: from live parameters to buckets ------------------------------------------------------------

    async def snapshot(self, slot: int) -> Any:
        """A bit-exact copy of the live parameters in ``slot``, attributes carried.

        The caller may mutate the parameters once this returns. Trainer; ``slot`` belongs to the source.
        """
        return await self._local("snapshot", lambda: self.local.snapshot(slot), lambda held: held.nbytes)

    async def diff(self, slot: int, base: int | None) -> Any:
        """Handle to this rank's changed elements between two slots; ``base`` None counts every element. Trainer."""
        return await self._local("diff", lambda: self.local.diff(slot, base), lambda changes: changes.nbytes)

    def trail(self, changes: Any) -> Any:
        """Handle to the positions of ``changes`` without their values, for ``squash``. Trainer; not an await."""
        return self.local.trail(changes)

    async def squash(self, slot: int, trails: Sequence[Any]) -> Any:
        """Handle to every element that any of ``trails`` names, with its bits in ``slot``. Trainer."""
        return await self._local(
            "squash", lambda: self.local.squash(slot, trails), lambda changes: changes.nbytes
        )

    async def source_digest(self, slot: int, afresh: bool = False) -> int:
        """This rank's share of the digest of ``slot``, signed 64 bit; ``afresh`` reads every element. Trainer."""
        return await self._local("digest", lambda: self.local.digest(slot, afresh=afresh))

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        """Every rank's vector of status, digest share and counts, shape ``(world, len(vector))``, int64. Trainer."""
        return await self.verb(
            "exchange", lambda: self.fabric.exchange(group, vector, deadline_ns), 8 * len(vector)
        )

    async def gather(
        self, group: Group, rows: Any, slot: int, changes: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        """All ranks' parts of one row group at the sender, None elsewhere. Trainer.

        ``changes`` None takes whole tensors from ``slot``. ``sizes`` are bytes per rank, equal on every rank.
        """

        async def effect() -> list[Any] | None:
            part = await self.perform("gather", self.local.part(slot, changes, rows))
            return await self.fabric.gather(group, part, sizes, deadline_ns)

        return await self.verb("gather", effect, sum(sizes))

    async def merge(self, parts: Sequence[Any], rows: Any, matrix: Sequence[Sequence[int]]) -> Any:
        """Handle to all ranks' parts of ``rows`` as one, in canonical order; it shares their memory. Sender."""
        return await self._local(
            "merge", lambda: self.local.merge(parts, rows, matrix), lambda merged: merged.nbytes
        )

    async def narrow(self, merged: Any, route: Any) -> Any:
        """Handle to as much of a merged group as ``route`` takes; it may share memory with ``merged``. Sender."""
        return await self._local("narrow", lambda: self.local.narrow(merged, route), lambda part: part.nbytes)

    async def encode(self, contents: Any, spec: Any, head: Any) -> Any:
        """One bucket of merged or narrowed ``contents`` as ``spec`` cuts it. Sender; the bucket is the caller's."""
        return await self._local(
            "encode", lambda: self.local.encode(contents, spec, head), lambda bucket: bucket.nbytes
        )

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """Header, then exactly the bytes it announces; the bucket may be dropped once this returns. Sender."""
        await self.verb("send", lambda: self.fabric.send(group, bucket, deadline_ns), bucket.nbytes)

    # ---- rollout: from buckets to weights --------------------------------------------------------------------

    def holding(self) -> int:
        """Fingerprint of what this rank's bytes take of every checkpoint tensor. Rollout; not an await."""
        return int(self.local.fingerprint)

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        """The next bucket of the group; its memory is the caller's. Rollout."""
        return await self.verb("receive", lambda: self.fabric.receive(group, deadline_ns), lambda b: b.nbytes)

    async def decode(self, bucket: Any) -> Any:
        """Handle to a bucket's ranges, checksum proved. PatchMismatch when it is damaged. Rollout."""
        return await self._local("decode", lambda: self.local.decode(bucket), lambda decoded: decoded.nbytes)

    async def validate(self, decoded: Any, *, version: int, base: int, epoch: int, sequence: int) -> None:
        """Return if names, dtypes, bounds and numbers fit; raise before this bucket's first write. Rollout."""
        await self._local(
            "validate",
            lambda: self.local.validate(decoded, version=version, base=base, epoch=epoch, sequence=sequence),
        )

    async def apply(self, decoded: Any, undo: bool) -> int:
        """Bytes written in place, O(changed); with ``undo`` the old bits are kept until commit. Rollout."""
        return await self._local("apply", lambda: self.local.apply(decoded, undo), lambda written: written)

    async def digest(self, afresh: bool = False) -> int:
        """This rank's share of the digest of its weights, signed 64 bit; ``afresh`` reads every element. Rollout."""
        return await self._local("digest", lambda: self.local.digest(afresh=afresh))

    async def compare_digests(self, found: int, expected: int) -> bool:
        """True when two digests are equal. Rollout."""

        async def effect() -> bool:
            return bool(self.local.same_digest(found, expected))

        return await self.verb("compare_digests", effect)

    async def rollback(self) -> None:
        """Every old bit back where an uncommitted apply overwrote it; repeating it is safe. Rollout."""
        await self._local("rollback", lambda: self.local.rollback())

    async def commit(self) -> None:
        """Drop the undo log: what is applied stays. Repeating it is safe. Rollout."""
        await self._local("commit", lambda: self.local.commit())

    async def pause(self) -> None:
        """Return once nothing reads this rollout's weights. Leader of a rollout."""
        if self.engine is not None:
            await self.verb("pause", self.engine.pause)

    async def resume(self) -> None:
        """Let requests read this rollout's weights again. Leader of a rollout."""
        if self.engine is not None:
            await self.verb("resume", self.engine.resume)
