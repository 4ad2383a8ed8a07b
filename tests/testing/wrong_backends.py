"""Wrong backends: each has one part that breaks one rule, for the tests that must see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from weightsync.reference.baselines import WholeBaseline
from weightsync.reference.buckets import Bucket
from weightsync.reference.changes import Changes, Found, Patch, in_pieces
from weightsync.reference.control import Message
from weightsync.reference.decoded import Decoded
from weightsync.reference.digest import wrap
from weightsync.reference.errors import DeadlineExceeded, GroupBroken
from weightsync.reference.members import Group
from weightsync.reference.params import TPAttributes, carry, int_view, read
from weightsync.reference.rowmap import RowMap
from weightsync.reference.share import KeptShare
from weightsync.reference.source import Held, Source
from weightsync.reference.steps import Step, Touched, run
from weightsync.reference.target import Target
from weightsync.testing.damage import sealed

# ---- a trainer rank's bytes --------------------------------------------------------------------------------


class DropsAttributes(Source):
    """Copies tensors as ``torch.empty_like`` does."""

    def snapshot(self, slot: int) -> Step[Held]:
        held = yield from super().snapshot(slot)
        for tensor in self.held(slot).values():
            TPAttributes({}).stamp(tensor)
        return held


def _copies(source: Source, slot: int) -> dict[str, Tensor]:
    """The copies in a slot of a whole baseline, to be spoilt."""
    return cast(WholeBaseline, source.baseline)._slots._copies[slot]


class CarriesAttributesOnce(Source):
    """Carries attributes when a slot's memory is allocated, and never again."""

    def snapshot(self, slot: int) -> Step[Held]:
        first = {name: read(tensor) for name, tensor in _copies(self, slot).items()}
        held = yield from super().snapshot(slot)
        for name, attributes in first.items():
            attributes.stamp(_copies(self, slot)[name])
        return held


class CopiesThroughFloats(Source):
    """Copies values, which makes every NaN the same one."""

    def snapshot(self, slot: int) -> Step[Held]:
        held = yield from super().snapshot(slot)
        for tensor in self.held(slot).values():
            tensor.copy_(tensor.float() + 0.0)
        return held


class KeepsTheLiveTensor(Source):
    """Takes ``tensor.to("cpu")`` for a copy."""

    def snapshot(self, slot: int) -> Step[Held]:
        held = yield from super().snapshot(slot)
        for name, live in self.params.items():
            _copies(self, slot)[name] = carry(live, live.detach())
        return held


class ComparesValues(Source):
    """Finds changes with ``!=``: 0.0 to -0.0 is none, and every NaN is one."""

    def diff(self, slot: int, base: int | None) -> Step[Changes]:
        yield Touched(0)
        found: Found = {}
        new, old = self.held(slot), self.held(base or 0)
        for row_map in self._maps:
            self._compare(row_map, new[row_map.name], old[row_map.name], found)
        return in_pieces(self.plan, slot, base or 0, found)

    def _compare(self, row_map: RowMap, new: Tensor, old: Tensor, found: Found) -> None:
        local = (new != old).reshape(-1).nonzero().reshape(-1)
        output, flat = row_map.to_checkpoint(local)
        for index, number in enumerate(row_map.outputs):
            chosen = output == index
            if chosen.any():
                at = local[chosen]
                found.setdefault(number, []).append((flat[chosen], int_view(new)[at], int_view(old)[at]))


class OffByOne(Source):
    """Counts positions from one."""

    def diff(self, slot: int, base: int | None) -> Step[Changes]:
        changes = yield from super().diff(slot, base)
        patches = {n: (at + 1, new, old) for n, (at, new, old) in changes.patches.items()}
        return replace(changes, patches=patches)


class SendsWhatDidNotChange(Source):
    """Always sends the first element that it owns."""

    def diff(self, slot: int, base: int | None) -> Step[Changes]:
        changes = yield from super().diff(slot, base)
        if base is None or self.rank or changes.nnz:
            return changes
        bits = int_view(next(iter(self.held(slot).values())))[:1].clone()
        patches: dict[int, Patch] = {0: (torch.zeros(1, dtype=torch.int32), bits, None)}
        return replace(changes, counts=(1, *changes.counts[1:]), patches=patches)


# ---- a rollout rank's bytes --------------------------------------------------------------------------------


class ProvesWhileItWrites(Target):
    """Looks at a bucket's positions only after it wrote the ranges before them."""

    def validate(self, decoded: Decoded, **numbers: int) -> Step[None]:
        yield Touched(0)
        decoded.validated = True
        self.numbers = numbers

    def apply(self, decoded: Decoded, undo: bool) -> Step[int]:
        first = replace(decoded, ranges=decoded.ranges[:1])
        run(super().apply(first, undo))
        run(super().validate(decoded, **self.numbers))
        return (yield from super().apply(decoded, undo))


class BelievesTheHeader(Target):
    """Expects whatever version the bucket says."""

    def validate(self, decoded: Decoded, *, version: int, base: int, epoch: int, sequence: int) -> Step[None]:
        head = decoded.header.heading
        yield from super().validate(
            decoded, version=head.version, base=head.base, epoch=head.epoch, sequence=sequence
        )


class SkipsTheChecksum(Target):
    """Believes the payload."""

    def decode(self, bucket: Bucket) -> Step[Decoded]:
        return super().decode(sealed(bucket, bucket.payload))


class ForgetsToRollBack(Target):
    """Throws the old bits away instead of writing them back."""

    def rollback(self) -> Step[int]:
        yield from super().commit()
        return 0


class UndoesHalf(Target):
    """Rolls the last bucket back only."""

    def rollback(self) -> Step[int]:
        del self._log.entries[:-1]
        return (yield from super().rollback())


class KeepsTheUndoLog(Target):
    """Lets a commit be rolled back."""

    def commit(self) -> Step[None]:
        yield Touched(0)
        self._progress.reset()


class SumsBits(Target):
    """A digest that does not ask where the bits are."""

    def digest(self, *, afresh: bool = False) -> Step[int]:
        yield Touched(0)
        return wrap(sum(int(int_view(weight).sum()) for weight in self.weights.values()))


class CountsReplicas(Target):
    """Follows every write, also of rows that another rank speaks for."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _share_of(self, _CountingReplicas)


class TakesOldBitsForZeros(Target):
    """Follows what comes, and not what was there."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        _share_of(self, _Adding)


class KeepsTheShareOfWhatIsUndone(Target):
    """Writes the old bits back, and tells the digest of the new ones."""

    def rollback(self) -> Step[int]:
        kept = self._share.value
        nbytes = yield from super().rollback()
        self._share.value = kept
        return nbytes


def _share_of(target: Target, kind: type[KeptShare]) -> None:
    target._share.__class__ = kind


class _CountingReplicas(KeptShare):
    def _moved(self, term: Any, width: int, index: Tensor, old: Tensor, new: Tensor) -> int:
        every = replace(term.row_map, owned=term.row_map.tensor >= 0)
        return super()._moved(replace(term, row_map=every), width, index, old, new)


class _Adding(KeptShare):
    def _moved(self, term: Any, width: int, index: Tensor, old: Tensor, new: Tensor) -> int:
        return super()._moved(term, width, index, torch.zeros_like(old), new)


# ---- data groups and the control plane ---------------------------------------------------------------------


class Groups:
    """A fabric that passes everything on."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.held: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class SwapsBuckets(Groups):
    """Lets the second bucket overtake the first."""

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        self.held.append(bucket)
        if len(self.held) > 1:
            await self.inner.send(group, bucket, deadline_ns)
        if len(self.held) == 2:
            await self.inner.send(group, self.held[0], deadline_ns)


class HandsOutTheSendersMemory(Groups):
    """Gives every receiver the bucket that was sent."""

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        self.inner.meetings.handed = bucket
        await self.inner.send(group, bucket, deadline_ns)

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        await self.inner.receive(group, deadline_ns)
        return self.inner.meetings.handed


class CutsToSize(Groups):
    """Takes as many bytes as the header announces, and lets the rest go."""

    async def receive(self, group: Group, deadline_ns: int) -> Any:
        bucket = await self.inner.receive(group, deadline_ns)
        return Bucket(bucket.header, bucket.payload[: bucket.header.payload_bytes])


class SkipsEmptyTurns(Groups):
    """Has nothing to bring, so does not come."""

    async def gather(
        self, group: Group, part: Any, sizes: Sequence[int], deadline_ns: int
    ) -> list[Any] | None:
        if part.nbytes == 0:
            return None
        found: list[Any] | None = await self.inner.gather(group, part, sizes, deadline_ns)
        return found


class ForgetsTheDead(Groups):
    """Goes on in a group that saw a timeout."""

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        try:
            return await _exchange(self.inner, group, vector, deadline_ns)
        except DeadlineExceeded:
            self.inner.meetings._groups.pop(group.key, None)
            raise
        except GroupBroken:
            self.inner._open[group.key] = self.inner.meetings.of(group)
            return await _exchange(self.inner, group, vector, deadline_ns)


class NamesNobody(Groups):
    """Says that time is up, and no more."""

    async def exchange(self, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
        try:
            return await _exchange(self.inner, group, vector, deadline_ns)
        except DeadlineExceeded:
            raise DeadlineExceeded("exchange") from None


class Direct:
    """Hands a control message over as the object it is."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def put(self, peer: str, message: Message) -> None:
        self.inner.controls[peer].deliver(message)


async def _exchange(inner: Any, group: Group, vector: Sequence[int], deadline_ns: int) -> list[list[int]]:
    rows: list[list[int]] = await inner.exchange(group, vector, deadline_ns)
    return rows
