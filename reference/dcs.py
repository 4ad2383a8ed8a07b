"""A checkpoint-service broadcast, as Relax's DCS does it: whole tensors from one sender per pipeline stage.

It stands beside the protocol of ``trainer.py``, for engines that take bucketed full broadcasts and know no prepare and
commit. So there is no rollback: an update that fails after its first byte leaves engines paused and its publication
poisoned. What decides is here; what moves bytes and what speaks to engines are passed in.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.devices import Device, stage
from weightsync.reference.errors import PlanMismatch, StaleVersion, WeightSyncError
from weightsync.reference.params import ParamMeta
from weightsync.reference.verdict import Verdict, Vote

Role = Literal["actor", "actor_fwd", "reference", "rollout"]


@dataclass(frozen=True, slots=True)
class Member:
    """One registered rank.

    Attributes:
        role: what it does.
        rank: its number within the role.
        gpus: how many ranks of a group it brings: an engine's devices, 1 for others.
    """

    role: Role
    rank: int
    gpus: int = 1

    @property
    def node(self) -> str:
        """Its name: ``rollout_10``."""
        return f"{self.role}_{self.rank}"


class Registry:
    """Who takes part, by role; ranks are numbers, so engine 10 stands behind engine 2."""

    def __init__(self) -> None:
        self._members: dict[tuple[str, int], Member] = {}

    def register(self, member: Member) -> str:
        """Its node name; registering an equal member again is harmless. Raises PlanMismatch for another one."""
        known = self._members.get((member.role, member.rank), member)
        if known != member or member.gpus < 1 or member.rank < 0:
            raise PlanMismatch(
                f"{member.node} registers with {member.gpus} devices, expected rank 0 or more, 1 device or more, and "
                f"what it registered with before ({known.gpus}); unregister it first"
            )
        self._members[member.role, member.rank] = member
        return member.node

    def unregister(self, role: Role, rank: int) -> None:
        """Take it out. Raises PlanMismatch when it is not there."""
        if self._members.pop((role, rank), None) is None:
            raise PlanMismatch(f"{role}_{rank} is not registered, expected a registered node")

    def of(self, role: Role) -> tuple[Member, ...]:
        """The members of a role, in the order of their numbers."""
        found = [one for one in self._members.values() if one.role == role]
        return tuple(sorted(found, key=lambda one: one.rank))

    def global_rank(self, role: Role, rank: int) -> int:
        """Place among the receivers of one source: 0 the source, then actor_fwd, then reference."""
        offsets = {"actor": 0, "actor_fwd": 1, "reference": 1 + len(self.of("actor_fwd"))}
        if role not in offsets or all(one.rank != rank for one in self.of(role)):
            raise PlanMismatch(
                f"{role}_{rank} has no global rank, expected a registered one of {list(offsets)}"
            )
        return offsets[role] + (0 if role == "actor" else [one.rank for one in self.of(role)].index(rank))


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a trainer rank stands; the sender of a stage is its rank with every other index 0."""

    rank: int
    pp: int = 0
    tp: int = 0
    dp: int = 0
    cp: int = 0


@dataclass(frozen=True, slots=True)
class StageGroup:
    """The group of one pipeline stage.

    Attributes:
        name: ``pp_0``.
        sender: the trainer rank that is rank 0 of it.
        first: engine number -> its first rank in the group.
        world: ranks in the group.
    """

    name: str
    sender: int
    first: Mapping[int, int]
    world: int


def topology(trainers: Sequence[Placed], engines: Iterable[Member]) -> tuple[StageGroup, ...]:
    """One group per pipeline stage: its sender, then every engine's devices at cumulative offsets.

    Raises PlanMismatch when a stage has no sender or two, or nobody would receive.
    """
    ordered = sorted(engines, key=lambda one: one.rank)
    if not ordered:
        raise PlanMismatch(
            "no engine is registered, expected one or more; register them before the first update"
        )
    first, offset = {}, 1
    for engine in ordered:
        first[engine.rank] = offset
        offset += engine.gpus
    groups = []
    for pp in sorted({one.pp for one in trainers}):
        senders = [one.rank for one in trainers if (one.pp, one.tp, one.dp, one.cp) == (pp, 0, 0, 0)]
        if len(senders) != 1:
            raise PlanMismatch(f"pipeline stage {pp} has senders {senders}, expected exactly one")
        groups.append(StageGroup(f"pp_{pp}", senders[0], first, offset))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class TensorBucket:
    """Names of the tensors that travel together, all of one pass."""

    names: tuple[str, ...]
    nbytes: int
    expert: bool


def cut_buckets(
    metas: Sequence[ParamMeta], experts: Iterable[str], limit: int, ep: int = 1
) -> tuple[TensorBucket, ...]:
    """Non-expert tensors first, then experts, each in order; a bucket is sent before it would exceed ``limit``.

    Args:
        metas: the trainer's tensors, whose bytes count.
        experts: names of expert tensors; each travels ``ep`` times, once per expert rank.
        limit: most bytes of a bucket. A larger tensor travels alone.
        ep: expert-parallel ranks.

    Raises:
        PlanMismatch: the limit is not positive, a name comes twice, or an expert is none of the tensors.
    """
    chosen, names = set(experts), [meta.name for meta in metas]
    if limit <= 0 or len(set(names)) != len(names) or not chosen <= set(names):
        raise PlanMismatch(
            f"buckets of {limit} bytes for {len(names)} tensors, {len(set(names))} of them with a name of their own, "
            f"and experts {sorted(chosen - set(names))} beside them; expected a positive limit and known, single names"
        )
    found: list[TensorBucket] = []
    for expert in (False, True):
        taken: list[str] = []
        size = 0
        for meta in metas:
            if (meta.name in chosen) != expert:
                continue
            nbytes = meta.nbytes * (ep if expert else 1)
            if taken and size + nbytes > limit:
                found.append(TensorBucket(tuple(taken), size, expert))
                taken, size = [], 0
            taken.append(meta.name)
            size += nbytes
        if taken:
            found.append(TensorBucket(tuple(taken), size, expert))
    return tuple(found)


@dataclass
class Publication:
    """One attempt to publish a version; good for one use.

    Attributes:
        version: what is published.
        state: ``new``, ``open``, ``committed`` or ``poisoned``.
        reason: why it is poisoned.
    """

    version: int
    state: Literal["new", "open", "committed", "poisoned"] = "new"
    reason: str = ""

    def begin(self, above: int) -> None:
        """Open it. Raises StaleVersion when it was used before, or its version is not above ``above``."""
        if self.state != "new" or self.version <= above:
            raise StaleVersion(
                f"publication of version {self.version} is {self.state} ({self.reason or 'no failure'}), with "
                f"{above} tried before; expected a new one of a higher version"
            )
        self.state = "open"

    def poison(self, reason: str) -> None:
        """It failed, and whoever holds a part of it must not use it."""
        self.state, self.reason = "poisoned", reason


@dataclass
class DcsTrainer:
    """One trainer rank's side. All ranks call ``push`` in step order.

    Attributes:
        live: this rank's live parameters by name.
        experts: names of expert parameters.
        limit: bytes of a bucket.
        ep: expert-parallel ranks.
        device: of the data group.
        agree: the verdict of all trainer ranks on a stage, equal on all; ends by its own deadline.
        control: on rank 0, speaks to every engine: ``pause``, ``flush``, ``continue``; None elsewhere.
        send: brings one bucket, staged on the device, to all engines; a collective that ends by its own deadline.
        tried: the highest version that was tried.
    """

    live: Callable[[], Mapping[str, Tensor]]
    experts: frozenset[str]
    limit: int
    device: Device
    agree: Callable[[str, Vote], Awaitable[Verdict]]
    control: Callable[[str, int], Awaitable[None]] | None
    send: Callable[[TensorBucket, Mapping[str, Tensor]], Awaitable[None]]
    ep: int = 1
    tried: int = 0

    async def push(self, publication: Publication, held: Mapping[str, Tensor] | None = None) -> None:
        """Publish a version: pause, flush, non-expert pass, expert pass, continue.

        Args:
            publication: a new one, made on every rank alike.
            held: a snapshot to send, on whatever device; None sends the live parameters.

        Raises:
            WeightSyncError: a rank failed, on every rank, in that rank's words; the publication is poisoned. Engines
                stay paused once a byte may have reached them, and go on where none has.
        """
        publication.begin(self.tried)
        self.tried = publication.version
        staged: dict[str, Tensor] = {}

        async def prepare() -> None:
            live = self.live()
            staged.update(stage(self.device, live if held is None else held))
            AttributeLedger(live).check("staging", staged)

        try:
            await self._stage("prepare", prepare())
        except WeightSyncError as error:
            publication.poison(str(error))
            raise
        try:
            await self._stage("pause", self._tell("pause", publication.version))
            await self._stage("flush", self._tell("flush", publication.version))
        except WeightSyncError as error:
            publication.poison(str(error))
            await self._resume_quietly(publication.version)
            raise
        metas = [ParamMeta.of(name, tensor) for name, tensor in staged.items()]
        try:
            buckets = cut_buckets(metas, self.experts, self.limit, self.ep)
            for expert in (False, True):
                chosen = [one for one in buckets if one.expert == expert]
                await self._stage("expert" if expert else "non-expert", self._pass(chosen, staged))
            await self._stage("continue", self._tell("continue", publication.version))
        except WeightSyncError as error:
            publication.poison(str(error))
            raise
        publication.state = "committed"

    async def _pass(self, buckets: Sequence[TensorBucket], staged: Mapping[str, Tensor]) -> None:
        for bucket in buckets:
            await self.send(bucket, {name: staged[name] for name in bucket.names})

    async def _tell(self, what: str, version: int) -> None:
        if self.control is not None:
            await self.control(what, version)

    async def _resume_quietly(self, version: int) -> None:
        if self.control is not None:
            try:
                await self.control("continue", version)
            except Exception:
                return

    async def _stage(self, name: str, work: Awaitable[None]) -> None:
        """Do this rank's part, and leave the stage with everybody's verdict."""
        try:
            await work
            vote = Vote(True)
        except Exception as error:
            vote = Vote(False, f"{type(error).__name__}: {error}")
        verdict = await self.agree(name, vote)
        if not verdict.ok:
            raise WeightSyncError(f"publication ended in stage {name!r}: {verdict.reason}")
