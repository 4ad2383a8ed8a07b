"""The rollout's half of the protocol. Its leader answers the trainer; the other ranks take the leader's orders."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from weightsync.reference.audit import audit_rollout
from weightsync.reference.control import Request
from weightsync.reference.digest import wrap
from weightsync.reference.errors import (
    DeadlineExceeded,
    PeerLost,
    PlanMismatch,
    RemoteError,
    StaleVersion,
)
from weightsync.reference.members import RankId
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.receiver import Receiver, Receiving
from weightsync.reference.status import RankStatus
from weightsync.reference.wire.forms import FORM_NAMES, known_to_all


class Rollout(Receiver):
    """One rollout rank's half. A wrong protocol is a subclass with one method overridden.

    Args:
        verbs: this rank's verbs; its local bytes are a ``Target``.
        fingerprint: fingerprint of the transfer plan; a trainer with another one is refused.
        ranks: the ranks of this rollout, leader first.
        trainer: the trainer's lead.
        settings: equal on every rank.

    Attributes:
        leader: True on the rank that answers for the rollout and pauses and resumes it.
        watched: whose loss ends its waiting: whoever gives the orders, or, once that rank is lost, the trainer's lead.
        farewells: names of the ranks that said bye.
    """

    def __init__(
        self,
        verbs: Verbs,
        fingerprint: int,
        ranks: Sequence[RankId],
        trainer: RankId,
        settings: ProtocolSettings,
    ) -> None:
        super().__init__(verbs, settings)
        self.fingerprint = fingerprint
        self.ranks = tuple(ranks)
        self.leader = verbs.me == self.ranks[0]
        self.followers = self.ranks[1:] if self.leader else ()
        self.master = trainer if self.leader else self.ranks[0]
        self.trainer = trainer
        self.watched = self.master
        self.farewells: set[str] = set()
        verbs.disclose(lambda: RankStatus.of(self).to_dict())
        self.handlers: dict[str, Callable[[Request], Awaitable[Mapping[str, Any] | None]]] = {
            "hello": self.hello, "start": self.start, "prepare": self.prepare, "apply": self.apply,
            "commit": self.commit, "abort": self.abort, "rollback": self.rolled_back, "status": self.status,
            "audit": self.audit,
        }  # fmt: skip

    # ---- the loop --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the trainer says bye or is lost. A failed verb never ends it, nor does a lost leader.

        A follower waits for its leader's bye as well, or the loss of it: until then that one may ask for a rollback.
        """
        while True:
            try:
                request = await self.verbs.serve(self._ends_ns(), self.watched)
            except DeadlineExceeded:
                await self.end_update("no decision came before the lease ended")
                continue
            except PeerLost as lost:
                if self.farewells or self.watched == self.trainer:
                    await self.leave(str(lost))
                    return
                await self.orphaned(lost)
                continue
            except Exception:
                continue
            self.watched = self.master
            if request.op == "bye":
                self.farewells.add(request.source)
                left = [peer for peer in (self.master, self.trainer) if str(peer) not in self.farewells]
                if not left:
                    await self.leave("its trainer said bye")
                    return
                self.watched = left[0]
                continue
            await self.answer(request)

    async def answer(self, request: Request) -> None:
        """Handle one request and reply with its outcome; a handler that answers later returns None."""
        handler = self.handlers.get(request.op)
        try:
            if handler is None:
                raise PlanMismatch(
                    f"request {request.op!r} is none; expected one of {', '.join(self.handlers)}"
                )
            body = await handler(request)
        except Exception as error:
            await self.refuse(request, error)
        else:
            if body is not None:
                await self.fanout.quietly(lambda: self.verbs.reply(request, body))

    async def refuse(self, request: Request, error: Exception) -> None:
        """Answer a request with an error, naming a rank of this rollout that is lost."""
        named = error.lost if isinstance(error, RemoteError) else None
        lost = error.peer if isinstance(error, PeerLost) else named or self.lost
        text = f"{type(error).__name__}: {error}"
        self.note(text)
        await self.fanout.quietly(lambda: self.verbs.reply(request, error=text, lost=lost))

    # ---- stages ----------------------------------------------------------------------------------------------

    async def hello(self, request: Request) -> Mapping[str, Any]:
        """Join a new group epoch and report what this rollout holds."""
        epoch = request.body["epoch"]
        if epoch < self.epoch:
            raise StaleVersion(f"group epoch {epoch} is over; {self.verbs.me} is in epoch {self.epoch}")
        if request.body["fingerprint"] != self.fingerprint:
            raise PlanMismatch(
                f"the trainer's plan has fingerprint {request.body['fingerprint']}, that of {self.verbs.me} is "
                f"{self.fingerprint}; give both sides the same tensors in the same order"
            )
        self.verbs.update = request.body["update"]
        await self.end_update("a new group epoch began")
        await self.close_groups()
        new, self.epoch = self.epoch == 0, epoch
        self.highest = max(
            self.highest, request.body.get("highest", 0)
        )  # a new process has tried nothing yet
        reports = await self.order("hello", request.body, self.deadline_of(request))
        for rank, report in zip(self.followers, reports, strict=True):
            self.highest = max(self.highest, report["highest"])
            if report["dirty"] is not None or report["version"] != self.version:
                await self.spoil(f"{rank} holds version {report['version']} ({report['dirty'] or 'clean'})")
        digest = await self.verbs.digest()
        if self.leader and self.dirty is None and not self.resumed:
            await self.resume()
        return {
            "version": self.version, "dirty": self.dirty, "highest": self.highest, "new": new,
            "digest": wrap(digest + sum(report["digest"] for report in reports)),
            "forms": known_to_all(reports, FORM_NAMES),
        }  # fmt: skip

    async def start(self, request: Request) -> Mapping[str, Any]:
        """Get ready for one version on every rank, and begin to receive it."""
        update = await self.begin(request.body, self.deadline_of(request))
        try:
            await self.order("start", request.body, update.deadline_ns)
        except Exception as error:
            await self.end_update(str(error))
            raise
        update.receiving = self.verbs.spawn(self.receive(update), f"receive {update.version}")
        return {}

    async def prepare(self, request: Request) -> None:
        """Answer, once it is so, that every rank has applied and proved the version; served beside an abort."""
        update = self.expect(request.body["version"])
        update.preparing = self.verbs.spawn(self._prepare(request, update), f"prepare {update.version}")

    async def _prepare(self, request: Request, update: Receiving) -> None:
        try:
            body = await (self.ready(update) if self.leader else self.received(update))
        except Exception as error:
            if self.leader:
                await self.end_update(str(error), own=update.preparing)
            await self.refuse(request, error)
        else:
            await self.fanout.quietly(lambda: self.verbs.reply(request, body))

    async def ready(self, update: Receiving) -> Mapping[str, Any]:
        """Every rank of the rollout holds the version, applied and proved; from here the decision is the trainer's."""
        body = {"version": update.version}
        calls = [self.fanout.ask(rank, "prepare", body, update.deadline_ns) for rank in self.followers]
        async with self.fanout.ending(calls):
            # Side by side: a follower that refuses must be heard while this rank still waits for the next bucket.
            await self.verbs.join([self.arriving(update), *calls], update.deadline_ns)
        await self.pause()
        self.mark(update)
        calls = [self.fanout.ask(rank, "apply", body, update.deadline_ns) for rank in self.followers]
        async with self.fanout.ending(calls):
            share = await self.install_all(update)
            replies = await self.fanout.all_or_first_error(calls, update.deadline_ns)
        await self.prove(update, wrap(share + sum(reply["digest"] for reply in replies)))
        update.ends_ns = self.verbs.now_ns() + self.settings.lease_ns
        update.prepared = True
        return {"version": update.version}

    async def apply(self, request: Request) -> Mapping[str, Any]:
        """A follower's order to apply what it staged."""
        update = self.expect(request.body["version"])
        self.mark(update)
        digest = await self.install_all(update)
        update.prepared = True
        return {"digest": digest}

    async def commit(self, request: Request) -> Mapping[str, Any]:
        """Make a prepared version the label, on all ranks; repeating it is a no-op. The leader resumes last."""
        version = request.body["version"]
        if version != self.version or self.dirty is not None:
            update = self.expect(version)
            if not update.prepared:
                raise StaleVersion(
                    f"version {version} is not prepared on {self.verbs.me}; it cannot be committed"
                )
            await self.keep(update, self.deadline_of(request))
        if self.leader and not self.resumed and self.update is None:
            await self.resume()
        return {}

    async def keep(self, update: Receiving, deadline_ns: int) -> None:
        """Every rank drops its old bits and takes the new label."""
        body = {"version": update.version}
        calls = [self.fanout.ask_often(rank, "commit", body, deadline_ns) for rank in self.followers]
        try:
            for reply in await self.fanout.settle(calls, deadline_ns):
                if isinstance(reply, Exception):
                    raise reply
            await self.fanout.retry(self.verbs.commit)
        except Exception as error:
            self.soil(f"version {update.version} was committed by some of its ranks only: {error}")
            raise
        self.version, self.dirty, self.update = update.version, None, None
        update.ended = True

    async def abort(self, request: Request) -> Mapping[str, Any]:
        """The trainer gave a version up; one that was committed, or another than the one in progress, stays."""
        if self.update is not None and self.update.version == request.body["version"]:
            await self.end_update(request.body["reason"])
        return {}

    async def rolled_back(self, request: Request) -> Mapping[str, Any]:
        """A follower's order to give an update up."""
        if self.update is not None and self.update.version == request.body["version"]:
            await self.end_update("its leader said so")
        return {}

    async def status(self, request: Request) -> Mapping[str, Any]:
        """What this rank holds, whether it generates, and if not, why; and a rank of this rollout that is lost."""
        return RankStatus.of(self).to_dict() | {"lost": self.lost}

    async def audit(self, request: Request) -> Mapping[str, Any]:
        """Count every element that this rollout holds; one whose digest is not the trainer's is dirty."""
        return await audit_rollout(self, request)

    # ---- ways out --------------------------------------------------------------------------------------------

    async def roll_followers_back(self, update: Receiving) -> None:
        """Order every follower to give the update up; one that does not answer spoils the rollout."""
        body = {"version": update.version}
        deadline_ns = self.verbs.now_ns() + self.settings.connect_ns
        calls = [self.fanout.ask_often(rank, "rollback", body, deadline_ns) for rank in self.followers]
        for rank, reply in zip(self.followers, await self.fanout.settle(calls, deadline_ns), strict=True):
            if isinstance(reply, Exception):
                await self.spoil(f"{rank} did not roll version {update.version} back: {reply}")

    async def orphaned(self, lost: PeerLost) -> None:
        """A follower lost its leader: it is dirty until that one is back and a full update came."""
        self.watched = self.trainer
        self.soil(f"it lost its leader {lost.peer}")
        if self.update is not None:
            for task in (self.update.preparing, self.update.receiving):
                await self.fanout.stop(task)
        await self.close_groups()

    async def leave(self, reason: str) -> None:
        """The run is over: roll back what is not committed, release the followers, drop the groups."""
        await self.end_update(reason)
        for rank in self.followers:
            await self.fanout.quietly(partial(self.verbs.post, rank, "bye", {}))
        await self.close_groups()

    # ---- helpers ---------------------------------------------------------------------------------------------

    @property
    def lost(self) -> str | None:
        """Name of a rank of this rollout that is lost at present, or None; the leader's."""
        return next((str(rank) for rank in self.followers if self.verbs.is_lost(rank)), None)

    async def order(self, op: str, body: Mapping[str, Any], deadline_ns: int) -> list[Mapping[str, Any]]:
        """Every follower's reply to one order; the first failure is raised."""
        calls = [self.fanout.ask(rank, op, body, deadline_ns) for rank in self.followers]
        return await self.fanout.all_or_first_error(calls, deadline_ns)

    def deadline_of(self, request: Request) -> int:
        """When the answer to a request is of no use any more."""
        return request.deadline_ns or self.verbs.now_ns() + self.settings.update_ns

    def _ends_ns(self) -> int | None:
        return self.update.ends_ns if self.leader and self.update is not None else None
