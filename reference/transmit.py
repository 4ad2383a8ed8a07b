"""Sending one version: the job that its stages hand on, and the way from every rank's parts to the rollouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from weightsync.reference.buckets import NO_BASE, Heading, abort_bucket, end_bucket
from weightsync.reference.members import Group
from weightsync.reference.protocol import DELTA, FULL

if TYPE_CHECKING:
    from weightsync.reference.trainer import Trainer


@dataclass
class Stream:
    """One way an update travels: ``kind`` full or delta, over ``group``, to ``rollouts``."""

    kind: str
    rollouts: tuple[int, ...]
    group: Group


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


def streams(trainer: Trainer) -> list[Stream]:
    """The ways of the next version: a full update to those who are behind, a delta to the other members."""
    current = tuple(number for number in trainer.members if number not in trainer.behind)
    found = []
    for kind, numbers in ((FULL, trainer.behind), (DELTA, current)):
        ranks = [rank for number in numbers for rank in trainer.rollouts[number].ranks]
        group = trainer.group("data-" + "-".join(map(str, numbers)), (trainer.ranks[0], *ranks))
        if numbers:
            found.append(Stream(kind, numbers, group))
    return found


async def transmit(trainer: Trainer, job: Job, deadline_ns: int) -> None:
    """Every rank brings its parts to the lead, which encodes and sends them, stream by stream, trailer last."""
    for stream in job.streams:
        if trainer.lead:
            await trainer.open_group(stream.group, deadline_ns)
        base = job.base_version if stream.kind == DELTA else NO_BASE
        heading = Heading(stream.kind, trainer.epoch, base, job.version or 0)
        sent: list[int] = []
        try:
            await _buckets(trainer, job, stream, heading, sent, deadline_ns)
        except Exception as error:
            if trainer.lead:
                # In-band, so that receivers need not wait for their deadline; the control plane says it as well.
                abort = abort_bucket(heading.at(len(sent)), f"{type(error).__name__}: {error}")
                send = partial(trainer.verbs.send, stream.group, abort, deadline_ns)
                await trainer.fanout.quietly(send, tries=1)
            raise
        if trainer.lead:
            moved = sum(sent)
            trailer = end_bucket(heading.at(len(sent)), job.digest, len(sent), moved)
            await trainer.verbs.send(stream.group, trailer, deadline_ns)
            job.nbytes[stream.kind] = moved + trailer.nbytes


async def _buckets(
    trainer: Trainer, job: Job, stream: Stream, heading: Heading, sent: list[int], deadline_ns: int
) -> None:
    """Gather and send every bucket of one stream, noting what was sent."""
    trainers = trainer.group("trainer", trainer.ranks)
    counts, changes = (None, None) if stream.kind == FULL else (job.counts, job.changes)
    for rows in trainer.plan.groups(counts):
        sizes = [trainer.plan.part_bytes(rows, rank, job.matrix[rank]) for rank in range(len(trainer.ranks))]
        parts = await trainer.verbs.gather(trainers, rows, job.slot, changes, sizes, deadline_ns)
        if parts is None:
            continue
        for spec in rows.buckets:
            bucket = await trainer.verbs.encode(parts, rows, spec, job.matrix, heading.at(len(sent)))
            await trainer.verbs.send(stream.group, bucket, deadline_ns)
            sent.append(bucket.nbytes)
