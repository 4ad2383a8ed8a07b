"""Making and sending one version: the job that its stages hand on, and every rank's parts on their way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsync.reference.buckets import NO_BASE, Heading, abort_bucket, end_bucket
from weightsync.reference.digest import wrap
from weightsync.reference.encoding import POSITION_BYTES
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import Group
from weightsync.reference.protocol import DELTA, FULL, Outcome
from weightsync.reference.routes import Route

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer


@dataclass
class Lane:
    """One route's part of a stream: its group, lead first, and the bytes of each bucket sent over it."""

    route: Route
    group: Group
    sent: list[int] = field(default_factory=list)

    def told(self) -> Mapping[str, Any]:
        """What its ranks are told of it: JSON-able."""
        members = [str(member) for member in self.group.members]
        return {"group": self.group.name, "members": members, "holding": self.route.holding.fingerprint}


@dataclass(frozen=True)
class Delta:
    """What differs between two versions, equal on all ranks but for the handle.

    Attributes:
        changes: handle to this rank's elements.
        matrix: [trainer rank][piece], elements that each rank tells.
        counts: per piece, over all ranks.
    """

    changes: Any
    matrix: list[list[int]]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, changes: Any, matrix: list[list[int]]) -> Delta:
        """The delta of the counts that all ranks exchanged."""
        return cls(changes, matrix, tuple(sum(column) for column in zip(*matrix, strict=True)))


@dataclass
class Stream:
    """One way an update travels: ``kind`` full or delta, to ``rollouts``, whose ranks are shared out over ``lanes``.

    Attributes:
        base: the version that these rollouts hold; 0 (NO_BASE) in a full update.
        delta: what a delta tells; None in a full update.
    """

    kind: str
    rollouts: tuple[int, ...]
    lanes: tuple[Lane, ...]
    base: int = NO_BASE
    delta: Delta | None = None


@dataclass
class Job:
    """One update in the making: what its stages hand on.

    Attributes:
        slot: the slot with the new version.
        base: version and digest of the slot that was compared with, or None when nothing was.
        step: what differs between the two.
        squashed: per version that a rollout was left at, what differs from there, on any of the steps since.
        digest: digest of the new version.
    """

    slot: int
    base: tuple[int, int] | None
    step: Delta
    squashed: dict[int, Delta]
    digest: int
    version: int | None = None
    streams: list[Stream] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=lambda: {FULL: 0, DELTA: 0})

    def outcome(self, trainer: Trainer, committed: bool, reason: str) -> Outcome:
        """What the job came to, on this rank of the trainer."""
        counts = self.step.counts if any(stream.kind == DELTA for stream in self.streams) else None
        return Outcome(
            trainer.updates, self.version, committed, reason,
            members=tuple(n for s in self.streams for n in s.rollouts) or trainer.members,
            full=tuple(n for s in self.streams if s.kind == FULL for n in s.rollouts),
            changed=None if counts is None else sum(counts),
            counts=None if counts is None else trainer.plan.tensor_counts(counts),
            full_bytes=self.nbytes[FULL], delta_bytes=self.nbytes[DELTA], digest=self.digest,
            gone=tuple(sorted(trainer.gone)), rejoined=tuple(trainer.rejoined),
            squashed=tuple(n for s in self.streams if s.base in self.squashed for n in s.rollouts),
        )  # fmt: skip


async def make_job(trainer: Trainer, deadline_ns: int) -> Job:
    """Snapshot, diff and count; what all ranks counted, equal on all. WeightSyncError names a rank that failed."""
    group = trainer.group("trainer", trainer.ranks)
    await trainer.open_group(group, deadline_ns)
    slot = trainer.choose_slot()
    left_at = sorted({base for base in trainer.behind.values() if base is not None})
    everything = [number for number in trainer.members if trainer.behind.get(number, slot) is None]
    base = trainer.slots.acknowledged if len(everything) < len(trainer.members) else None
    failure: Exception | None = None
    share = 0
    told: list[Any] = [None] * (1 + len(left_at))
    try:
        trainer.slots.invalidate(slot)
        await trainer.verbs.snapshot(slot)
        trainer.on_snapshot()
        if base is not None:
            told = await _compare(trainer, slot, base, left_at)
        share = await trainer.verbs.source_digest(slot, afresh=trainer.settings.verifies(trainer.updates))
    except Exception as error:
        failure = error
    pieces = len(trainer.plan.pieces)
    counts = [n for one in told for n in (one.counts if one is not None else (0,) * pieces)]
    matrix = await trainer.verbs.exchange(group, [int(failure is not None), share, *counts], deadline_ns)
    if failure is not None:
        raise failure
    failed = [str(rank) for rank, row in zip(trainer.ranks, matrix, strict=True) if row[0]]
    if failed:
        raise WeightSyncError(f"the source of {', '.join(failed)} failed; see its own reason")
    step, *others = [
        Delta.of(one, [row[2 + n * pieces : 2 + (n + 1) * pieces] for row in matrix])
        for n, one in enumerate(told)
    ]
    whole = trainer.plan.likely_bytes(None)
    cheaper = {
        version: delta
        for version, delta in zip(left_at, others, strict=True)
        if trainer.plan.likely_bytes(delta.counts, absolute=True) < whole
    }
    held = trainer.slots.held(base) if base is not None else None
    return Job(slot, held, step, cheaper, wrap(sum(row[1] for row in matrix)))


async def _compare(trainer: Trainer, slot: int, base: int, left_at: Sequence[int]) -> list[Any]:
    """Handles to what changed since ``base``, and since each version that a rollout was left at."""
    changes = await trainer.verbs.diff(slot, base)
    found = [changes]
    for version in left_at:
        path = trainer.history.path(version, trainer.slots.version(base))
        if path is None:
            raise WeightSyncError(
                f"{trainer.verbs.me} remembers no way from version {version}; send a full update"
            )
        trails = [step.trail for step in path]
        found.append(await trainer.verbs.squash(slot, [*trails, trainer.verbs.trail(changes)]))
    return found


def remember(trainer: Trainer, job: Job) -> None:
    """The version is about to leave the trainer: keep the positions of its step, for who may miss it."""
    if job.base is not None and job.version is not None:
        largest = POSITION_BYTES * max(map(sum, job.step.matrix))
        trail = trainer.verbs.trail(job.step.changes)
        trainer.history.add(job.base, (job.version, job.digest), trail, largest)


def streams(trainer: Trainer, job: Job) -> list[Stream]:
    """The ways of the next version: one per base, of which a full update has none. Equal on all ranks."""
    ways: dict[int | None, list[int]] = {None: []}
    for number in trainer.members:
        left_at = trainer.behind.get(number, -1)
        ways.setdefault(left_at if left_at in job.squashed or left_at == -1 else None, []).append(number)
    found = []
    for way in sorted(ways, key=lambda way: (way is not None, way)):
        numbers = tuple(ways[way])
        if not numbers:
            continue
        lanes = _lanes(trainer, numbers)
        if way is None:
            found.append(Stream(FULL, numbers, lanes))
        elif way in job.squashed:
            found.append(Stream(DELTA, numbers, lanes, way, job.squashed[way]))
        else:
            found.append(
                Stream(DELTA, numbers, lanes, job.base[0] if job.base is not None else NO_BASE, job.step)
            )
    return found


def _lanes(trainer: Trainer, numbers: Sequence[int]) -> tuple[Lane, ...]:
    """One per route that reaches ranks of these rollouts; what goes to all of them has the stream's plain name."""
    name = "data-" + "-".join(map(str, numbers))
    taking_part = {rank for number in numbers for rank in trainer.rollouts[number].ranks}
    lanes = []
    for route in trainer.routes:
        ranks = tuple(rank for rank in route.ranks if rank in taking_part)
        if ranks:
            route_name = name if len(trainer.routes) == 1 else f"{name}-r{route.number}"
            lanes.append(Lane(route, trainer.group(route_name, (trainer.ranks[0], *ranks))))
    return tuple(lanes)


async def transmit(trainer: Trainer, job: Job, deadline_ns: int) -> None:
    """Every rank brings its parts to the lead, which encodes and sends them, stream by stream, trailers last."""
    for stream in job.streams:
        for lane in stream.lanes if trainer.lead else ():
            await trainer.open_group(lane.group, deadline_ns)
        heading = Heading(stream.kind, trainer.epoch, stream.base, job.version or 0)
        try:
            await _buckets(trainer, job, stream, heading, deadline_ns)
        except Exception as error:
            for lane in stream.lanes if trainer.lead else ():
                # In-band, so that receivers need not wait for their deadline; the control plane says it as well.
                abort = abort_bucket(heading.at(len(lane.sent)), f"{type(error).__name__}: {error}")
                send = partial(trainer.verbs.send, lane.group, abort, deadline_ns)
                await trainer.fanout.quietly(send, tries=1)
            raise
        for lane in stream.lanes if trainer.lead else ():
            moved = sum(lane.sent)
            trailer = end_bucket(heading.at(len(lane.sent)), job.digest, len(lane.sent), moved)
            await trainer.verbs.send(lane.group, trailer, deadline_ns)
            job.nbytes[stream.kind] += moved + trailer.nbytes


async def _buckets(trainer: Trainer, job: Job, stream: Stream, heading: Heading, deadline_ns: int) -> None:
    """Gather every group of one stream, and send each lane its buckets of it, noting what was sent."""
    trainers = trainer.group("trainer", trainer.ranks)
    # A full update needs no counts; the step's stand in for them.
    delta = stream.delta or job.step
    changes = None if stream.delta is None else stream.delta.changes
    counts = None if stream.delta is None else delta.counts
    for rows in trainer.plan.groups(counts, absolute=stream.base in job.squashed, forms=trainer.forms):
        sizes = trainer.plan.part_sizes(rows, delta.matrix)
        parts = await trainer.verbs.gather(trainers, rows, job.slot, changes, sizes, deadline_ns)
        if parts is None:
            continue
        merged = await trainer.verbs.merge(parts, rows, delta.matrix)
        for lane in stream.lanes:
            whole = lane.route.is_whole
            contents = merged if whole else await trainer.verbs.narrow(merged, lane.route)
            for spec in lane.route.cuts(rows, contents.counts):
                bucket = await trainer.verbs.encode(contents, spec, heading.at(len(lane.sent)))
                await trainer.verbs.send(lane.group, bucket, deadline_ns)
                lane.sent.append(bucket.nbytes)
