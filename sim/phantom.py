"""Sources and targets that count bytes and move none: a run's timing without its values.

They offer the steps of ``reference.Source`` and ``reference.Target``. How many elements change is given, as a
scenario draws it from its seed; everything else follows from the plan, so that verbs, buckets and bytes are those of
a run with values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from weightsync.reference.baselines import DIRTY, Kept, kept, named
from weightsync.reference.buckets import ABORT, END, BucketSpec, Heading, read_abort, read_end
from weightsync.reference.encoding import POSITION_BYTES
from weightsync.reference.headers import Header
from weightsync.reference.holdings import Holding
from weightsync.reference.plan import GatherGroup, TransferPlan
from weightsync.reference.routes import Route
from weightsync.reference.rowmap import RowMap
from weightsync.reference.steps import Step, Touched


@dataclass(frozen=True, slots=True)
class Phantom:
    """Something of a size: a snapshot, a rank's part, a decoded bucket.

    Attributes:
        nbytes: bytes it stands for.
        end: the trailer of a success, or None.
        aborted: the sender's reason in the trailer of a failure, or None.
        written: bytes that applying it writes on a rank.
    """

    nbytes: int
    end: Any = None
    aborted: str | None = None
    written: int = 0


@dataclass(frozen=True, slots=True)
class PhantomChanges:
    """How many elements a rank tells; see ``reference.source.Changes``."""

    counts: tuple[int, ...]
    nbytes: int

    @property
    def nnz(self) -> int:
        """Changed elements of this rank."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PhantomContents:
    """What is to be sent of one gather group; see ``reference.joining.Joined``."""

    group: GatherGroup
    counts: tuple[int, ...]
    nbytes: int

    @property
    def nnz(self) -> int:
        """Elements in all."""
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PhantomBucket:
    """A bucket of a size, with the heading that a real one has."""

    heading: Heading
    spec: BucketSpec

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, header included: estimated, where they do not follow from the counts."""
        return self.spec.likely

    def copy(self) -> PhantomBucket:
        """Itself: there is no memory to own."""
        return self


class PhantomSource:
    """The bytes of one trainer rank, counted only.

    Args:
        plan: equal on every rank.
        rank: this rank, an index into ``plan.maps``.
        counts: gives the elements of each piece, over all ranks, that changed since the last snapshot.
        baseline: what changes are told by: ``whole``, ``shards`` or ``dirty``; see ``reference.baselines``.

    Raises:
        PlanMismatch: no such baseline.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        counts: Callable[[], Sequence[int]],
        baseline: Literal["whole", "shards", "dirty"] = "whole",
    ) -> None:
        self.baseline = named(baseline)
        self.plan = plan
        self.rank = rank
        self.counts = counts

    @cached_property
    def kept(self) -> Kept:
        """What this rank's baseline keeps, in bytes."""
        return kept(self.baseline, self.plan.maps[self.rank])

    def _memory(self, slot: int | None) -> str:
        return "slot0" if self.baseline is DIRTY else f"slot{slot}"

    def snapshot(self, slot: int) -> Step[Phantom]:
        """See ``reference.source.Source.snapshot``."""
        yield Touched(self.kept.copy, reads=("live",), writes=(self._memory(slot),))
        return Phantom(self.kept.copy)

    def diff(self, slot: int, base: int | None) -> Step[PhantomChanges]:
        """See ``reference.source.Source.diff``; this rank's share of the given counts, by what it owns."""
        memories = tuple(dict.fromkeys((self._memory(slot), self._memory(base))))
        yield Touched(0 if base is None else self.kept.scanned, reads=memories)
        shares = tuple(self._share(number, total) for number, total in enumerate(self.counts()))
        sizes = [self.plan.tensors[piece.tensor].itemsize + 4 for piece in self.plan.pieces]
        return PhantomChanges(shares, sum(n * size for n, size in zip(shares, sizes, strict=True)))

    def digest(self, slot: int, *, afresh: bool = False) -> Step[int]:
        """See ``reference.source.Source.digest``; always 0."""
        every = afresh or not self.baseline.digest_in_changed
        yield Touched(self.kept.copy if every else 0, reads=(self._memory(slot),))
        return 0

    def trail(self, changes: PhantomChanges) -> PhantomChanges:
        """See ``reference.source.Source.trail``."""
        sizes = 4 * sum(changes.counts)
        return PhantomChanges(changes.counts, sizes)

    def squash(self, slot: int, trails: Sequence[PhantomChanges]) -> Step[PhantomChanges]:
        """See ``reference.source.Source.squash``; as if no two steps changed one element, which is the most."""
        counts = tuple(
            min(sum(column), self.plan.owned(self.rank, number))
            for number, column in enumerate(zip(*(trail.counts for trail in trails), strict=True))
        )
        sizes = [self.plan.tensors[piece.tensor].itemsize + 4 for piece in self.plan.pieces]
        nbytes = sum(n * size for n, size in zip(counts, sizes, strict=True))
        yield Touched(nbytes, reads=(f"slot{slot}",))
        return PhantomChanges(counts, nbytes)

    def part(self, slot: int, changes: PhantomChanges | None, group: GatherGroup) -> Step[Phantom]:
        """See ``reference.source.Source.part``."""
        counts = (0,) * len(self.plan.pieces) if changes is None else changes.counts
        nbytes = self.plan.part_bytes(group, self.rank, counts)
        yield Touched(nbytes, reads=(self._memory(slot),))
        return Phantom(nbytes)

    def merge(
        self, parts: Sequence[Any], group: GatherGroup, matrix: Sequence[Sequence[int]]
    ) -> Step[PhantomContents]:
        """See ``reference.source.Source.merge``."""
        yield Touched(sum(part.nbytes for part in parts))
        pieces = self.plan.pieces
        counts = tuple(
            pieces[number].count if dense else sum(row[number] for row in matrix)
            for number, dense in zip(group.pieces, group.dense, strict=True)
        )
        return PhantomContents(group, counts, self._bytes_of(group, counts))

    def narrow(self, merged: PhantomContents, route: Route) -> Step[PhantomContents]:
        """See ``reference.source.Source.narrow``; changed elements are taken to be spread evenly."""
        yield Touched(merged.nbytes)
        counts = route.estimate(merged.group, merged.counts)
        return PhantomContents(merged.group, counts, self._bytes_of(merged.group, counts))

    def encode(self, contents: PhantomContents, spec: BucketSpec, heading: Heading) -> Step[PhantomBucket]:
        """See ``reference.source.Source.encode``."""
        yield Touched(spec.likely)
        return PhantomBucket(heading, spec)

    def _bytes_of(self, group: GatherGroup, counts: Sequence[int]) -> int:
        sizes = [self.plan.tensors[self.plan.pieces[number].tensor].itemsize for number in group.pieces]
        each = zip(counts, sizes, group.dense, strict=True)
        return sum(count * (size if dense else size + POSITION_BYTES) for count, size, dense in each)

    def _share(self, piece: int, total: int) -> int:
        """Part of ``total`` in proportion to what this rank owns; the ranks' shares add up to it exactly."""
        owned = [self.plan.owned(rank, piece) for rank in range(len(self.plan.maps))]
        before, numel = sum(owned[: self.rank]), max(1, sum(owned))
        return (before + owned[self.rank]) * total // numel - before * total // numel


class PhantomTarget:
    """The bytes of one rollout rank, counted only.

    Args:
        maps: runtime name -> its map.
        holding: what it is sent; a bucket writes this rank's share of it.
    """

    def __init__(self, maps: Mapping[str, RowMap], holding: Holding) -> None:
        self.held_bytes = sum(map(_bytes, maps.values()))
        self.fingerprint = holding.fingerprint
        self.sent_bytes = max(1, holding.nbytes)
        self._counted = False

    def decode(self, bucket: Any) -> Step[Phantom]:
        """See ``reference.target.Target.decode``."""
        yield Touched(bucket.nbytes)
        header = getattr(bucket, "header", None)
        if isinstance(header, Header) and header.kind == END:
            return Phantom(bucket.nbytes, end=read_end(bucket))
        if isinstance(header, Header) and header.kind == ABORT:
            return Phantom(bucket.nbytes, aborted=read_abort(bucket))
        return Phantom(bucket.nbytes, written=bucket.nbytes * self.held_bytes // self.sent_bytes)

    def validate(self, decoded: Phantom, *, version: int, base: int, epoch: int, sequence: int) -> Step[None]:
        """See ``reference.target.Target.validate``; nothing can be wrong with a count."""
        yield Touched(decoded.nbytes)

    def apply(self, decoded: Phantom, undo: bool) -> Step[int]:
        """See ``reference.target.Target.apply``."""
        self._counted = self._counted and undo
        yield Touched(decoded.written, writes=("weights",))
        return decoded.written

    def rollback(self) -> Step[int]:
        """See ``reference.target.Target.rollback``."""
        yield Touched(0, writes=("weights",))
        return 0

    def commit(self) -> Step[None]:
        """See ``reference.target.Target.commit``."""
        yield Touched(0)

    def digest(self, *, afresh: bool = False) -> Step[int]:
        """See ``reference.target.Target.digest``; always 0."""
        kept = self._counted and not afresh
        yield Touched(0) if kept else Touched(self.held_bytes, reads=("weights",))
        self._counted = True
        return 0

    def same_digest(self, found: int, expected: int) -> bool:
        """True: without values every digest is 0."""
        return found == expected


def _bytes(row_map: RowMap) -> int:
    return row_map.tensor.numel() * row_map.width * row_map.dtype.itemsize
