"""Making and sending one version: the job that its stages hand on, and every rank's parts on their way out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsync.reference.buckets import NO_BASE, Heading, abort_bucket, end_bucket
from weightsync.reference.digest import wrap
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


@dataclass
class Stream:
    """One way an update travels: ``kind`` full or delta, to ``rollouts``, whose ranks are shared out over ``lanes``."""

    kind: str
    rollouts: tuple[int, ...]
    lanes: tuple[Lane, ...]


@dataclass
class Job:
    """One update in the making: what its stages hand on."""

    slot: int
    base_version: int
    changes: Any
    matrix: list[list[int]]
    counts: tuple[int, ...]
    digest: int
    version: int | None = None
    streams: list[Stream] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=lambda: {FULL: 0, DELTA: 0})

    def outcome(self, trainer: Trainer, committed: bool, reason: str) -> Outcome:
        """What the job came to, on this rank of the trainer."""
        counts = self.counts if any(stream.kind == DELTA for stream in self.streams) else None
        return Outcome(
            trainer.updates, self.version, committed, reason,
            members=tuple(n for s in self.streams for n in s.rollouts) or trainer.members,
            full=tuple(n for s in self.streams if s.kind == FULL for n in s.rollouts),
            changed=None if counts is None else sum(counts),
            counts=None if counts is None else trainer.plan.tensor_counts(counts),
            full_bytes=self.nbytes[FULL], delta_bytes=self.nbytes[DELTA], digest=self.digest,
            gone=tuple(sorted(trainer.gone)), rejoined=tuple(trainer.rejoined),
        )  # fmt: skip


async def make_job(trainer: Trainer, deadline_ns: int) -> Job:
    """Snapshot, diff and count; what all ranks counted, equal on all. WeightSyncError names a rank that failed."""
    group = trainer.group("trainer", trainer.ranks)
    await trainer.open_group(group, deadline_ns)
    slot = trainer.choose_slot()
    base = trainer.slots.acknowledged if set(trainer.members) - set(trainer.behind) else None
    failure: Exception | None = None
    share, counts, changes = 0, (0,) * len(trainer.plan.pieces), None
    try:
        trainer.slots.invalidate(slot)
        await trainer.verbs.snapshot(slot)
        trainer.on_snapshot()
        if base is not None:
            changes = await trainer.verbs.diff(slot, base)
            counts = changes.counts
        share = await trainer.verbs.source_digest(slot, afresh=trainer.settings.verifies(trainer.updates))
    except Exception as error:
        failure = error
    matrix = await trainer.verbs.exchange(group, [int(failure is not None), share, *counts], deadline_ns)
    if failure is not None:
        raise failure
    failed = [str(rank) for rank, row in zip(trainer.ranks, matrix, strict=True) if row[0]]
    if failed:
        raise WeightSyncError(f"the source of {', '.join(failed)} failed; see its own reason")
    rows = [row[2:] for row in matrix]
    totals = tuple(sum(column) for column in zip(*rows, strict=True))
    base_version = trainer.slots.version(base) if base is not None else 0
    return Job(slot, base_version, changes, rows, totals, wrap(sum(row[1] for row in matrix)))


def streams(trainer: Trainer) -> list[Stream]:
    """The ways of the next version: a full update to those who are behind, a delta to the other members."""
    current = tuple(number for number in trainer.members if number not in trainer.behind)
    found = []
    for kind, numbers in ((FULL, trainer.behind), (DELTA, current)):
        if numbers:
            found.append(Stream(kind, numbers, _lanes(trainer, numbers)))
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
        base = job.base_version if stream.kind == DELTA else NO_BASE
        heading = Heading(stream.kind, trainer.epoch, base, job.version or 0)
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
    counts, changes = (None, None) if stream.kind == FULL else (job.counts, job.changes)
    for rows in trainer.plan.groups(counts):
        sizes = [trainer.plan.part_bytes(rows, rank, job.matrix[rank]) for rank in range(len(trainer.ranks))]
        parts = await trainer.verbs.gather(trainers, rows, job.slot, changes, sizes, deadline_ns)
        if parts is None:
            continue
        merged = await trainer.verbs.merge(parts, rows, job.matrix)
        for lane in stream.lanes:
            whole = lane.route.is_whole
            contents = merged if whole else await trainer.verbs.narrow(merged, lane.route)
            for spec in lane.route.cuts(rows, contents.counts):
                bucket = await trainer.verbs.encode(contents, spec, heading.at(len(lane.sent)))
                await trainer.verbs.send(lane.group, bucket, deadline_ns)
                lane.sent.append(bucket.nbytes)
