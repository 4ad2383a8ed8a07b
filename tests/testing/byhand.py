"""One update by hand: sources to buckets to targets, without a protocol, a clock or a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from weightsync.reference.buckets import DELTA, FULL, Bucket, Header, Heading, end_bucket
from weightsync.reference.decoded import Decoded
from weightsync.reference.digest import combine
from weightsync.reference.plan import TransferPlan
from weightsync.reference.routes import Route
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target


@dataclass
class Update:
    """One update on the wire, and what it says.

    Attributes:
        version: the version it leads to.
        base: the version it is made for; 0 when it is full.
        buckets: the buckets, trailer last.
        digest: digest of the whole state.
        matrix: [trainer rank][piece], changed elements; zeros in a full update.
        epoch: its group epoch.
    """

    version: int
    base: int
    buckets: list[Bucket]
    digest: int
    matrix: list[tuple[int, ...]] = field(default_factory=list)
    epoch: int = 1

    @property
    def counts(self) -> tuple[int, ...] | None:
        """Changed elements per piece over all ranks; None when the update is full."""
        return tuple(map(sum, zip(*self.matrix, strict=True))) if self.base else None


def make_update(
    plan: TransferPlan,
    sources: Sequence[Source],
    *,
    slot: int,
    version: int,
    base_slot: int | None = None,
    base: int = 0,
    epoch: int = 1,
    route: Route | None = None,
) -> Update:
    """Snapshot every source into ``slot`` and encode: full without ``base_slot``, else the difference to it.

    With a ``route``, only what its ranks hold.
    """
    for source in sources:
        run(source.snapshot(slot))
    changes = None if base_slot is None else [run(source.diff(slot, base_slot)) for source in sources]
    digest = combine(run(source.digest(slot)) for source in sources)
    nothing = (0,) * len(plan.pieces)
    matrix = [nothing for _ in sources] if changes is None else [one.counts for one in changes]
    update = Update(version, base, [], digest, matrix, epoch)
    heading = Heading(FULL if changes is None else DELTA, epoch, base, version)
    for group in plan.groups(update.counts if changes is not None else None):
        parts = [
            run(source.part(slot, None if changes is None else changes[rank], group))
            for rank, source in enumerate(sources)
        ]
        merged = run(sources[0].merge(parts, group, matrix))
        contents = merged if route is None else run(sources[0].narrow(merged, route))
        for spec in group.buckets if route is None else route.cuts(group, contents.counts):
            update.buckets.append(run(sources[0].encode(contents, spec, heading.at(len(update.buckets)))))
    moved = sum(bucket.nbytes for bucket in update.buckets)
    count = len(update.buckets)
    update.buckets.append(end_bucket(heading.at(count), digest, count, moved))
    return update


def over_the_wire(bucket: Bucket) -> Bucket:
    """The bucket as a receiver gets it: header from its 64 bytes, payload in new memory."""
    return Bucket(Header.unpack(bucket.header.pack()), bucket.payload.clone())


def admit(target: Target, update: Update, buckets: Sequence[Bucket] | None = None) -> Iterator[Decoded]:
    """Decode and validate buckets (all of the update's when left out) in order; trailers are not yielded."""
    for sequence, bucket in enumerate(update.buckets if buckets is None else buckets):
        decoded = run(target.decode(over_the_wire(bucket)))
        run(
            target.validate(
                decoded, version=update.version, base=update.base, epoch=update.epoch, sequence=sequence
            )
        )
        if decoded.end is None:
            yield decoded


def deliver(target: Target, update: Update, *, stage: bool = False) -> int:
    """Receive a whole update: bucket by bucket, or with ``stage`` all before the first write. Bytes
    written.
    """
    admitted = list(admit(target, update)) if stage else admit(target, update)
    return sum(run(target.apply(decoded, undo=update.base > 0)) for decoded in admitted)
