"""A trainer rank's bytes: from live parameters to buckets, one step a verb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from torch import Tensor

from weightsync.reference.baselines import Baseline, WholeBaseline
from weightsync.reference.buckets import Bucket, BucketSpec, Heading, pack_bucket
from weightsync.reference.changes import Changes, Found, Held, Part, collect, in_pieces
from weightsync.reference.detect import Detector
from weightsync.reference.digest import OwnedDigest, combine
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.joining import Joined, join_parts
from weightsync.reference.narrowing import narrow
from weightsync.reference.parts import part_jobs
from weightsync.reference.pieces import Feeds, feeds_of
from weightsync.reference.plan import GatherGroup, TransferPlan
from weightsync.reference.routes import Route
from weightsync.reference.rowmap import RowMap
from weightsync.reference.squash import Trail, squash
from weightsync.reference.steps import Step, Touched
from weightsync.reference.wire.streams import Zstd

__all__ = ["Changes", "Held", "Part", "Source"]


class Source:
    """The bytes of one trainer rank.

    Args:
        plan: equal on every rank.
        rank: this rank, an index into ``plan.maps``.
        params: live parameters by runtime name; looked up anew at every snapshot.
        baseline: what changes are told by, of ``plan.maps[rank]``; two whole copies when left out.
        detector: compares them, with its threads; it stays the caller's, who closes it.

    Attributes:
        baseline: what changes are told by; its ``traits`` say how values may travel, and what it holds.

    Raises:
        PlanMismatch: a planned parameter is missing, or has another shape than its map.
    """

    def __init__(
        self,
        plan: TransferPlan,
        rank: int,
        params: Mapping[str, Tensor],
        baseline: Baseline | None = None,
        detector: Detector | None = None,
    ) -> None:
        if not 0 <= rank < len(plan.maps):
            raise PlanMismatch(f"trainer rank {rank} is not in the plan, expected 0 to {len(plan.maps) - 1}")
        self.plan = plan
        self.rank = rank
        self.params = params
        for row_map in plan.maps[rank]:
            _check_param(row_map, params)
        self.baseline = WholeBaseline(plan.maps[rank]) if baseline is None else baseline
        self._detector = Detector() if detector is None else detector
        self._maps = tuple(self.baseline.maps)
        self._tables = {row_map.name: OwnedDigest(row_map, plan.tensors) for row_map in self._maps}
        self._zstd = Zstd()
        self._digests: dict[int, int] = {}
        self._steps: dict[int, tuple[int, int]] = {}

    def snapshot(self, slot: int) -> Step[Held]:
        """A copy of the live parameters in ``slot``, bit-exact unless the plan casts, attributes carried.

        The caller may mutate the parameters once the step is done. See ``SnapshotSlots.write``.
        """
        self._digests.pop(slot, None)
        self._steps = {new: step for new, step in self._steps.items() if slot not in (new, step[0])}
        nbytes = yield from self.baseline.write(slot, self.params)
        return Held(slot, nbytes)

    def held(self, slot: int) -> Mapping[str, Tensor]:
        """The tensors of a snapshot, by runtime name, as far as the baseline keeps them; they stay the source's."""
        return self.baseline.tensors(slot)

    def diff(self, slot: int, base: int | None) -> Step[Changes]:
        """This rank's changes from ``base`` to ``slot``; nothing is advanced. The handle owns its memory.

        Raises:
            StaleVersion: a slot holds no whole snapshot.
        """
        self.baseline.tensors(slot)
        if base is None:
            yield Touched(0, reads=(self.baseline.memory(slot),))
            owned = tuple(self.plan.owned(self.rank, number) for number in range(len(self.plan.pieces)))
            return Changes(slot, None, owned)
        found: Found = {}
        half = len(self._maps) // 2
        for row_map in self._maps[:half]:
            collect(row_map, self.baseline.find(row_map.name, slot, base, self._detector), found)
        reads = tuple({self.baseline.memory(slot): None, self.baseline.memory(base): None})
        yield Touched(self.baseline.scanned([one.name for one in self._maps]), reads)
        for row_map in self._maps[half:]:
            collect(row_map, self.baseline.find(row_map.name, slot, base, self._detector), found)
        changes = in_pieces(self.plan, slot, base, found)
        if not self.baseline.traits.digest_in_changed:
            return replace(changes, digest_change=None)
        if changes.digest_change is not None:
            self._steps[slot] = (base, changes.digest_change)
        return changes

    def digest(self, slot: int, *, afresh: bool = False) -> Step[int]:
        """This rank's share of the digest of ``slot``; O(changed) when that of the diffed base is known.

        What is derived from a diff cannot show that the diff missed a change: ``afresh`` reads every element.
        """
        tensors = self.baseline.tensors(slot)
        reads = (self.baseline.memory(slot),)
        base, step = self._steps.get(slot, (None, 0))
        if slot in self._digests and not afresh:
            yield Touched(0, reads)
        elif base in self._digests and not afresh:
            yield Touched(0, reads)
            self._digests[slot] = combine([self._digests[base], step])
        else:
            half = len(self._maps) // 2
            shares = [self._tables[one.name].of(tensors[one.name]) for one in self._maps[:half]]
            yield Touched(sum(tensor.nbytes for tensor in tensors.values()), reads)
            shares += [self._tables[one.name].of(tensors[one.name]) for one in self._maps[half:]]
            self._digests[slot] = combine(shares)
        return self._digests[slot]

    def trail(self, changes: Changes) -> Trail:
        """The positions of changes without their values, in the same memory; what ``squash`` needs of a step."""
        return Trail({number: patch[0] for number, patch in changes.patches.items()})

    def squash(self, slot: int, trails: Sequence[Trail]) -> Step[Changes]:
        """Every element that any of the trails names, as it is in ``slot``; at least one trail. New memory."""
        patches = squash(self.plan, self._feeds, self.baseline.tensors(slot), trails)
        nbytes = sum(positions.nbytes + bits.nbytes for positions, bits, _ in patches.values())
        yield Touched(nbytes, reads=(self.baseline.memory(slot),))
        counts = [0] * len(self.plan.pieces)
        for number, (positions, _, _) in patches.items():
            counts[number] = positions.numel()
        return Changes(slot, None, tuple(counts), patches, nbytes, None)

    def part(self, slot: int, changes: Changes | None, group: GatherGroup) -> Step[Part]:
        """What this rank brings to the gather of ``group``: per piece a fixed section, padded; new memory.

        The values of a sparse piece are in the piece's value form already: its bytes follow from the counts.

        Args:
            slot: the snapshot that dense pieces are read from.
            changes: this rank's changes of ``slot``; None when the whole group is dense.
            group: one of the plan's groups of this update's counts.
        """
        if changes is not None and changes.slot != slot:
            raise PlanMismatch(f"changes are of slot {changes.slot}, expected slot {slot}; diff that slot")
        tensors = self.baseline.tensors(slot)
        counts = (0,) * len(self.plan.pieces) if changes is None else changes.counts
        patches = {} if changes is None else changes.patches
        payload, jobs = part_jobs(self.plan, self.rank, group, counts, patches, tensors, self.baseline.rows)
        half = len(jobs) // 2
        for job in jobs[:half]:
            job()
        yield Touched(payload.numel(), reads=(self.baseline.memory(slot),))
        for job in jobs[half:]:
            job()
        return Part(payload)

    def merge(
        self, parts: Sequence[Part | Tensor], group: GatherGroup, matrix: Sequence[Sequence[int]]
    ) -> Step[Joined]:
        """All ranks' parts of a group as one, in canonical order and in checkpoint coordinates. Sender.

        Args:
            parts: one per trainer rank; not to be overwritten while what comes back is in use.
            group: the group that was gathered.
            matrix: [rank][piece], the counts that all ranks exchanged.

        Raises:
            PlanMismatch: parts and counts do not fit, or two ranks tell one element.
        """
        payloads = tuple(part.payload if isinstance(part, Part) else part for part in parts)
        yield Touched(sum(payload.numel() for payload in payloads))
        return join_parts(self.plan, group, payloads, matrix)

    def narrow(self, joined: Joined, route: Route) -> Step[Joined]:
        """As much of a merged group as a route takes, in the coordinates of its slices. Sender.

        It may share memory with ``joined``.
        """
        yield Touched(joined.nbytes)
        return narrow(joined, route.holding, route.pieces)

    def encode(self, joined: Joined, spec: BucketSpec, heading: Heading) -> Step[Bucket]:
        """One bucket of what ``merge`` or ``narrow`` gave; new memory. Sender.

        Args:
            joined: what is to be sent of a group.
            spec: how one bucket of it is cut: see ``Route.cuts``.
            heading: kind, versions, epoch and sequence of the bucket.
        """
        yield Touched(spec.nbytes)
        return pack_bucket(heading, [joined.cut(one) for one in spec.ranges], joined.tensors, self._zstd)

    def same_digest(self, found: int, expected: int) -> bool:
        """True when two digests are equal."""
        return found == expected

    @cached_property
    def _feeds(self) -> Feeds:
        """What the baseline's maps tell."""
        return feeds_of(self._maps)


def _check_param(row_map: RowMap, params: Mapping[str, Tensor]) -> None:
    if row_map.name not in params:
        raise PlanMismatch(
            f"parameter {row_map.name!r} is not among the live parameters, expected every planned one; "
            "pass it or take it out of the layout table"
        )
    shape = tuple(params[row_map.name].shape)
    if shape != row_map.local_shape:
        raise PlanMismatch(
            f"parameter {row_map.name!r} has local shape {list(shape)}, its map expects "
            f"{list(row_map.local_shape)}; build the map from the live parameter's attributes"
        )
