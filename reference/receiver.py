"""What one rollout rank does with its own bytes: take an update in, prove it, apply it, keep it or give it up."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from weightsync.reference.clock import Task
from weightsync.reference.errors import PatchMismatch, PlanMismatch, StaleVersion, UpdateAborted
from weightsync.reference.events import ROLLOUT, log_of
from weightsync.reference.fanout import Fanout
from weightsync.reference.members import Group, RankId
from weightsync.reference.protocol import DELTA, FULL, ProtocolSettings
from weightsync.reference.rank import Verbs


@dataclass
class Receiving:
    """One update on its way in.

    Attributes:
        prepared: True once every rank of the rollout has applied and proved it; the decision is the trainer's.
        ends_ns: when the leader, hearing nothing more, rolls back on its own.
    """

    version: int
    base: int
    kind: str
    group: Group
    deadline_ns: int
    ends_ns: int
    sequence: int = 0
    staged: list[Any] = field(default_factory=list)
    digest: int | None = None
    receiving: Task | None = None
    preparing: Task | None = None
    touched: bool = False
    prepared: bool = False
    ended: bool = False


class Receiver:
    """One rollout rank's own state. ``Rollout`` adds who gives the orders.

    Args:
        verbs: this rank's verbs; its local bytes are a ``Target``.
        settings: equal on every rank.

    Attributes:
        version: the label: the version whose bits this rank holds, unless it is dirty.
        dirty: None, or why the weights may be none of a version's; generation is paused then.
        highest: the highest version number ever tried here.
        epoch: the group epoch it is in.
        generating: True while requests may read the weights; the leader's.
        resumed: True once the last resume is known to have worked.
        update: what is on its way in, or None.
        error: the last thing that went wrong here and in which update, or None.
        leader: True on the rank that pauses and resumes generation.
    """

    def __init__(self, verbs: Verbs, settings: ProtocolSettings) -> None:
        self.verbs = verbs
        self.settings = settings
        self.fanout = Fanout(verbs, settings.tries)
        self.leader = True
        self.version = 0
        self.highest = 0
        self.epoch = 0
        self.dirty: str | None = "it holds no weights yet"
        self.generating = False
        self.resumed = False
        self.update: Receiving | None = None
        self.error: str | None = None
        self.groups: list[Group] = []

    async def begin(self, body: Mapping[str, Any], deadline_ns: int) -> Receiving:
        """Get this rank ready for one version; refuses a number tried before and a base it does not hold."""
        version, base, kind = body["version"], body["base"], body["kind"]
        if body["epoch"] != self.epoch:
            raise StaleVersion(
                f"group epoch {body['epoch']} is not {self.epoch}, which {self.verbs.me} joined"
            )
        if version <= self.highest:
            raise StaleVersion(
                f"version {version} was tried before on {self.verbs.me}; take one above {self.highest}"
            )
        if kind == DELTA and (self.dirty is not None or base != self.version):
            raise StaleVersion(
                f"a delta on version {base} does not fit {self.verbs.me}, which holds {self.version} "
                f"({self.dirty or 'clean'}); send a full update"
            )
        group = self.lane(body["lanes"])
        self.verbs.update = body["update"]
        await self.end_update(f"version {version} began")
        self.highest = version
        self.update = Receiving(version, base, kind, group, deadline_ns, deadline_ns + self.settings.lease_ns)
        if self.settings.receive == "stream":
            try:
                await self.pause()
            except Exception as error:
                await self.end_update(str(error))
                raise
            self.mark(self.update)
        return self.update

    def lane(self, lanes: Sequence[Mapping[str, Any]]) -> Group:
        """The group over which this rank is sent what it holds; PlanMismatch when that is something else."""
        me, takes = str(self.verbs.me), self.verbs.holding()
        found = next((lane for lane in lanes if me in lane["members"]), None)
        if found is None or found["holding"] != takes:
            sends = "nothing" if found is None else f"slices with fingerprint {found['holding']}"
            raise PlanMismatch(
                f"the trainer sends {sends} to {me}, which takes {takes}; give both sides the same layout and the "
                "same policy.route"
            )
        return Group(found["group"], self.epoch, tuple(map(RankId.parse, found["members"])))

    async def receive(self, update: Receiving) -> None:
        """Take in every bucket of an update until its trailer."""
        if update.group not in self.groups:
            self.groups.append(update.group)
            await self.verbs.connect(update.group, update.deadline_ns)
        while not await self.accept(update, await self.verbs.receive(update.group, update.deadline_ns)):
            pass

    async def accept(self, update: Receiving, bucket: Any) -> bool:
        """Prove one bucket, then stage or apply it; True when it was the trailer."""
        decoded = await self.verbs.decode(bucket)
        await self.verbs.validate(
            decoded, version=update.version, base=update.base, epoch=self.epoch, sequence=update.sequence
        )
        update.sequence += 1
        if decoded.aborted is not None:
            raise UpdateAborted("transfer", f"the sender said: {decoded.aborted}")
        if decoded.end is not None:
            update.digest = decoded.end.digest
            return True
        if self.settings.receive == "stage":
            update.staged.append(decoded)
        else:
            await self.install(update, decoded)
        return False

    async def received(self, update: Receiving) -> Mapping[str, Any]:
        """Every bucket of the update is here and proved, on this rank."""
        await self.verbs.join([self.arriving(update)], update.deadline_ns)
        return {}

    def arriving(self, update: Receiving) -> Task:
        """The task that takes the update in."""
        if update.receiving is None:
            raise StaleVersion(
                f"version {update.version} never started to arrive on {self.verbs.me}; start it first"
            )
        return update.receiving

    async def install_all(self, update: Receiving) -> int:
        """Apply what was staged; this rank's share of the digest, recounted when this update is verified."""
        for decoded in update.staged:
            await self.install(update, decoded)
        update.staged.clear()
        return await self.verbs.digest(afresh=self.verifies())

    async def install(self, update: Receiving, decoded: Any) -> None:
        """Write one bucket; a delta keeps the old bits, a full update has no cheap undo."""
        update.touched = True
        await self.verbs.apply(decoded, undo=update.kind == DELTA)

    async def end_update(self, reason: str, own: Task | None = None) -> None:
        """Give up the update in progress: roll back and, unless dirty, resume under the old label.

        ``own`` is the task that calls, which must not cancel itself.
        """
        update = self.update
        if update is None:
            return
        for task in (update.preparing, update.receiving):
            if task is not own:
                await self.fanout.stop(task)
        if update.ended:
            return
        self.note(f"version {update.version} was given up: {reason}")
        log_of(self.verbs, ROLLOUT, logging.INFO, "update_given_up", version=update.version, why=reason)
        await self.roll_followers_back(update)
        if not await self.roll_back(update):
            await self.spoil(f"version {update.version} could not be rolled back after: {reason}")
        update.ended = True
        self.update = None
        if self.leader and self.dirty is None and not self.resumed:
            await self.fanout.quietly(self.resume, tries=1)

    async def roll_followers_back(self, update: Receiving) -> None:
        """Nothing: a rank on its own has no followers."""

    async def roll_back(self, update: Receiving) -> bool:
        """True once the old bits are back on this rank."""
        return not update.touched or await self.fanout.quietly(self.verbs.rollback)

    def expect(self, version: int) -> Receiving:
        """The update in progress, if it is ``version``."""
        if self.update is None or self.update.version != version:
            now = "none" if self.update is None else str(self.update.version)
            raise StaleVersion(
                f"version {version} is not in progress on {self.verbs.me}; in progress is {now}"
            )
        return self.update

    async def prove(self, update: Receiving, digest: int) -> None:
        """Return if ``digest``, over all ranks of the rollout, is the trainer's.

        Raises PatchMismatch otherwise; this rank is dirty then, and a full update heals it.
        """
        if update.digest is None or not await self.verbs.compare_digests(digest, update.digest):
            why = f"its digest in version {update.version} is {digest}, the trainer's is {update.digest}"
            self.soil(why)
            raise PatchMismatch(f"{self.verbs.me}: {why}; a full update heals it")

    def verifies(self) -> bool:
        """True when every element is read for this update's digest."""
        return self.settings.verifies(self.verbs.update)

    def mark(self, update: Receiving) -> None:
        """A full update cannot be undone: from its first byte until its commit this rank is dirty."""
        if update.kind == FULL:
            self.dirty = f"full update {update.version} is not committed"

    async def spoil(self, reason: str) -> None:
        """From here on these weights may be none of a version's: pause, then say so; the first reason stays."""
        await self.fanout.quietly(self.pause, tries=1)
        if self.dirty is None:
            self.soil(reason)

    def soil(self, reason: str) -> None:
        """From here on this rank is dirty, and this is why."""
        self.dirty = reason
        self.note(reason)
        log_of(self.verbs, ROLLOUT, logging.WARNING, "rollout_dirty", version=self.version, why=reason)

    def note(self, error: str) -> None:
        """Remember what went wrong, for ``RankStatus``."""
        self.error = f"update {self.verbs.update}: {error}"

    async def pause(self) -> None:
        """Stop generating on all ranks; the leader's."""
        if self.leader and self.generating:
            self.resumed = False
            await self.fanout.retry(self.verbs.pause)
            self.generating = False

    async def resume(self) -> None:
        """Generate again, under the label; the leader's."""
        self.generating = True
        await self.fanout.retry(self.verbs.resume)
        self.resumed = True

    async def close_groups(self) -> None:
        """Drop every data group."""
        for group in self.groups:
            await self.fanout.quietly(partial(self.verbs.disconnect, group))
        self.groups = []
