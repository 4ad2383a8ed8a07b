"""The trainer's half of the protocol; every trainer rank runs it, and rank 0, the lead, speaks to the rollouts."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from weightsync.reference.audit import AuditReport, audit
from weightsync.reference.errors import PeerLost, RemoteError, UpdateAborted
from weightsync.reference.fanout import Fanout
from weightsync.reference.history import History
from weightsync.reference.lead import check_losses, commit_rollouts, start_rollouts
from weightsync.reference.members import Group, RankId, RolloutRef
from weightsync.reference.membership import find_members
from weightsync.reference.metrics import OnUpdate
from weightsync.reference.plan import TransferPlan
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.routes import Route, choose_routes
from weightsync.reference.snapshot import BaselineSlots
from weightsync.reference.status import TrainerStatus, ask
from weightsync.reference.transmit import Job, make_job, remember, streams, transmit
from weightsync.reference.verdict import Verdict, Vote
from weightsync.reference.watched import Watched
from weightsync.reference.wire.forms import ALL_FORMS, Form


class Trainer:
    """One trainer rank's half. A wrong protocol is a subclass with one method overridden.

    Args:
        verbs: this rank's verbs; its local bytes are a ``Source``.
        plan: the transfer plan, equal on every rank.
        ranks: the trainer's ranks, lead first.
        rollouts: the rollouts of the scenario.
        settings: equal on every rank.
        on_version: called on every rank as ``on_version(version, slot)`` before a version first leaves the trainer.
        on_update: told of every update that is over, failed or not, on this rank's loop. What it raises is raised
            by ``update``; the update stays what it was, and ``last`` has its outcome.
        routes: the lead's, under ``route = "owned"``: what goes to which rollout ranks; see ``routes.owned_routes``.

    Attributes:
        version: the last version that every member acknowledged; 0 before the first.
        on_snapshot: called, in the midst of an update, once the live parameters are copied and may change.
        last: the outcome of the last update that is over, or None.
        forms: those that every member knows; no range is written in another.
        behind: number of each member that does not hold the base of the next update: the version that a squashed
            delta for it starts from, or None, for a full update.
        history: what is remembered of earlier versions.
        gone: number of each rollout that was lost and has committed nothing since, and why.
        rejoined: number of each rollout that was lost and committed the last update, and why it was lost.
    """

    def __init__(
        self,
        verbs: Verbs,
        plan: TransferPlan,
        ranks: Sequence[RankId],
        rollouts: Sequence[RolloutRef],
        settings: ProtocolSettings,
        on_version: Callable[[int, int], None] | None = None,
        on_update: OnUpdate | None = None,
        routes: Sequence[Route] | None = None,
    ) -> None:
        self.verbs = verbs
        self.plan = plan
        self.ranks = tuple(ranks)
        self.rollouts = {rollout.number: rollout for rollout in rollouts}
        self.settings = settings
        self.on_version = on_version
        self.on_update = on_update
        self.on_snapshot: Callable[[], None] = lambda: None
        self.fanout = Fanout(verbs, settings.tries)
        everybody = [rank for rollout in rollouts for rank in rollout.ranks]
        self.routes = choose_routes(plan, settings.route, routes, everybody) if self.lead else ()
        self.slots = BaselineSlots()
        self.updates = self.audits = self.highest = 0
        self.version = 0
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.forms = ALL_FORMS
        self.behind: dict[int, int | None] = {}
        self.history = History(settings.history_bytes)
        self.gone: dict[int, str] = {}
        self.losses: dict[RankId, int] = {}
        self.greeted: set[int] = set()
        self.rejoined: dict[int, str] = {}
        self.groups: list[Group] = []
        self.job: Job | None = None
        self.last: Outcome | None = None

    @property
    def lead(self) -> bool:
        """True on the rank that speaks to the rollouts and sends."""
        return self.verbs.me == self.ranks[0]

    # ---- one update ------------------------------------------------------------------------------------------

    async def update(self) -> Outcome:
        """Push the live parameters to every rollout; all trainer ranks call it, in step order.

        A failed update is an Outcome, not an error: the next one reconnects. Raises PeerLost when a trainer rank is
        lost, or a rollout under ``on_rollout_loss = "fail"``; the parameters may be mutated once it returned.
        """
        self.updates += 1
        self.verbs.update = self.updates
        self.job, self.rejoined = None, {}
        watched = Watched(self)
        try:
            outcome = await self._update()
        except Exception as error:
            watched.end(self.outcome(False, str(error)), error)
            raise
        watched.end(outcome)
        return outcome

    async def _update(self) -> Outcome:
        try:
            await self.connect(self.deadline_ns(self.settings.connect_ns))
            deadline_ns = self.deadline_ns(self.settings.update_ns)
            job = await self.source(deadline_ns)
            await self.start(job, deadline_ns)
            await self.transfer(job, deadline_ns)
            await self.commit(job, deadline_ns)
        except UpdateAborted as aborted:
            outcome = self.outcome(False, str(aborted))
            await self.abandon(aborted.reason)
            return outcome
        except Exception as error:
            await self.abandon(str(error))
            raise
        return self.outcome(True, "")

    async def close(self) -> None:
        """Release the rollouts and drop every group; call it once, after the last update."""
        if self.lead:
            for rollout in self.rollouts.values():
                for rank in rollout.ranks:  # a leader that died a moment ago cannot pass it on
                    await self.fanout.quietly(partial(self.verbs.post, rank, "bye", {}))
        await self._close_groups()

    async def status(self, deadline_ns: int) -> TrainerStatus:
        """What every rollout rank says of itself by ``deadline_ns``, and what this rank, the lead, knows of them.

        It may be asked at any time, between updates and during one: ranks answer beneath the protocol, nothing waits
        for the answers, and no span is left. A rank that does not answer is in it, with why.
        """
        return await ask(self, deadline_ns)

    async def audit(self, deadline_ns: int) -> AuditReport:
        """Count every element of every member anew, by ``deadline_ns``; all trainer ranks call it, between updates.

        Rollouts generate on meanwhile. One that does not hold what was pushed is paused and dirty, and whoever was
        found wrong gets a full update next.

        Raises:
            StaleVersion: no version is acknowledged by every member, such as after a failed update.
            UpdateAborted: a trainer rank failed, named. PeerLost: one was lost.
        """
        return await audit(self, deadline_ns)

    # ---- stages ----------------------------------------------------------------------------------------------

    async def connect(self, deadline_ns: int) -> None:
        """Agree who takes part, on which epoch, and who missed something."""
        verdict = await self.stage(
            "connect", find_members(self, deadline_ns) if self.lead else None, deadline_ns
        )
        found = self.lead_data(verdict)
        self.highest = max(self.highest, found["highest"])
        self.gone = {int(number): why for number, why in found["gone"].items()}
        if found["epoch"] != self.epoch:
            await self._close_groups()
            self.epoch = found["epoch"]
            self.members = tuple(found["members"])
            self.forms = tuple(Form.named(name) for name in found["forms"])
            self.behind = {int(number): base for number, base in found["behind"].items()}
            self.slots.acknowledge(found["slot"])

    async def source(self, deadline_ns: int) -> Job:
        """Snapshot, diff and count; every rank learns every rank's counts, and whether it failed."""
        made: list[Job] = []
        await self.stage("source", self._make_job(made, deadline_ns), deadline_ns)
        self.job = made[0]
        return made[0]

    async def start(self, job: Job, deadline_ns: int) -> None:
        """Take a version number and get every member's word that it is ready to receive."""
        verdict = await self.stage(
            "start", start_rollouts(self, job, deadline_ns) if self.lead else None, deadline_ns
        )
        started = self.lead_data(verdict)
        self.highest = max(self.highest, started["version"])
        job.version = started["version"]
        if not self.lead:
            job.streams = streams(self, job)
        self.slots.hold(job.slot, job.version, job.digest)
        remember(self, job)

    async def transfer(self, job: Job, deadline_ns: int) -> None:
        """Gather and send every bucket, until every member is prepared. Watches the replies while it sends."""
        await self.stage("transfer", self._transfer(job, deadline_ns), deadline_ns)

    async def commit(self, job: Job, deadline_ns: int) -> None:
        """Have every member commit; only then does the baseline move."""
        await self.stage(
            "commit", commit_rollouts(self, job, deadline_ns) if self.lead else None, deadline_ns
        )
        self.slots.acknowledge(job.slot)
        self.version = job.version or self.version
        self.behind = {}
        self.rejoined = {number: self.gone[number] for number in self.members if number in self.gone}
        self.gone = {number: why for number, why in self.gone.items() if number not in self.members}

    async def abandon(self, reason: str) -> None:
        """After a failed update: tell the members, drop every group; the next update connects a new epoch."""
        if self.lead and self.job is not None and self.job.version is not None:
            body = {"version": self.job.version, "reason": reason}
            for leader in self.leaders():
                await self.fanout.quietly(partial(self.verbs.post, leader, "abort", body))
        await self.reconnect()

    async def reconnect(self) -> None:
        """Drop every group; the next update asks everybody again what they hold."""
        await self._close_groups()
        self.members = ()

    # ---- decisions, one method each --------------------------------------------------------------------------

    def deadline_ns(self, budget_ns: int) -> int:
        """The absolute deadline of a budget that starts now; passed down, never nested."""
        return self.verbs.now_ns() + budget_ns

    def next_version(self) -> int:
        """The number of this update: above every number ever tried, on any rank."""
        return self.highest + 1

    def choose_slot(self) -> int:
        """The slot that is not the acknowledged baseline."""
        return self.slots.free()

    async def agree(self, stage: str, vote: Vote, deadline_ns: int) -> Verdict:
        """Leave a stage with the verdict of all trainer ranks."""
        key = f"{self.updates}/{stage}"
        patience_ns = self.deadline_ns(self.settings.patience_ns)
        return await self.fanout.retry(
            lambda: self.verbs.agree(self.ranks, key, vote, deadline_ns, patience_ns)
        )

    async def stage(
        self, name: str, work: Coroutine[Any, Any, Mapping[str, Any] | None] | None, deadline_ns: int
    ) -> Verdict:
        """Do this rank's part of a stage and leave it with everybody's verdict; UpdateAborted when it is no."""
        try:
            vote = Vote(True, "", (await work if work is not None else None) or {})
        except PeerLost as lost:
            vote = Vote(False, str(lost), {"lost": lost.peer})
        except RemoteError as error:
            vote = Vote(False, str(error), {"lost": error.lost} if error.lost else {})
        except Exception as error:
            vote = Vote(False, f"{type(error).__name__}: {error}")
        if not vote.ok:
            # Peers that wait for this rank in a data group hear of it now, not at their deadline.
            await self._close_groups()
        verdict = await self.agree(name, vote, deadline_ns)
        check_losses(self, name, verdict)
        if not verdict.ok:
            raise UpdateAborted(name, verdict.reason)
        return verdict

    # ---- the lead's part of each stage -----------------------------------------------------------------------

    async def _make_job(self, made: list[Job], deadline_ns: int) -> None:
        made.append(await make_job(self, deadline_ns))

    async def _transfer(self, job: Job, deadline_ns: int) -> None:
        if not self.lead:
            await transmit(self, job, deadline_ns)
            return
        tasks = [self.verbs.spawn(transmit(self, job, deadline_ns), "transmit")]
        body = {"version": job.version}
        tasks += [self.fanout.ask(leader, "prepare", body, deadline_ns) for leader in self.leaders()]
        await self.fanout.all_or_first_error(tasks, deadline_ns)

    # ---- helpers ---------------------------------------------------------------------------------------------

    def lead_data(self, verdict: Verdict) -> Mapping[str, Any]:
        """What the lead said in its vote."""
        return verdict.votes[str(self.ranks[0])].data

    def outcome(self, committed: bool, reason: str) -> Outcome:
        """The record of this update."""
        if self.job is not None:
            return self.job.outcome(self, committed, reason)
        gone = tuple(sorted(self.gone))
        return Outcome(self.updates, None, committed, reason, self.members, gone=gone)

    def leaders(self) -> list[RankId]:
        """The leaders of the members."""
        return [self.rollouts[number].leader for number in self.members]

    def group(self, name: str, members: tuple[RankId, ...]) -> Group:
        """A data group of the present epoch."""
        return Group(name, self.epoch, members)

    async def open_group(self, group: Group, deadline_ns: int) -> None:
        """Connect a data group, once an epoch."""
        if group not in self.groups:
            self.groups.append(group)
            await self.verbs.connect(group, deadline_ns)

    async def _close_groups(self) -> None:
        for group in self.groups:
            await self.fanout.quietly(partial(self.verbs.disconnect, group))
        self.groups = []
