"""Buckets that a receiver must refuse before its first write: each is sound up to its last range."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from torch import Tensor

from weightsync.reference.buckets import TABLE_ENTRY_BYTES, Bucket, Heading, Range, pack_bucket, seal, unpack
from weightsync.reference.encoding import Encoding
from weightsync.reference.params import ParamMeta

Tensors: TypeAlias = Sequence[ParamMeta]
Damage: TypeAlias = Callable[[Sequence[Bucket], Tensors], Bucket]
"""Makes, of an update's good buckets, a bad one that follows the first."""


def renumbered(bucket: Bucket, sequence: int) -> Bucket:
    """The same bucket at another place of its update."""
    return _headed(bucket, sequence=sequence)


def sealed(bucket: Bucket, payload: Tensor) -> Bucket:
    """A bucket whose header announces ``payload``, sums included."""
    return seal(bucket.header.heading, bucket.header.ranges, payload, bucket.header.status)


def _good(buckets: Sequence[Bucket], tensors: Tensors) -> Bucket:
    return _packed(buckets, tensors, lambda _: None)


def _packed(buckets: Sequence[Bucket], tensors: Tensors, change: Callable[[Tensor], None]) -> Bucket:
    """Bucket 1: the dense ranges of the second bucket, then a later sparse range with changed positions."""
    head = buckets[1].header.heading
    ranges = [one for one in unpack(buckets[1], tensors) if one.spec.encoding is Encoding.DENSE][:1]
    after = ranges[0].spec.tensor
    later = [one for bucket in buckets[1:-1] for one in unpack(bucket, tensors) if one.spec.tensor > after]
    spec, positions, bits = next(one for one in later if one.positions is not None)
    assert positions is not None
    changed = positions.clone()
    change(changed)
    return pack_bucket(head, [*ranges, Range(spec, changed, bits)], tensors)


def _positions(change: Callable[[Tensor], None]) -> Damage:
    return lambda buckets, tensors: _packed(buckets, tensors, change)


def _beyond(positions: Tensor) -> None:
    positions[-1] = 1 << 20


def _negative(positions: Tensor) -> None:
    positions[0] = -1


def _twice(positions: Tensor) -> None:
    positions[-1] = positions[-2]


def _unsorted(positions: Tensor) -> None:
    positions[[-1, -2]] = positions[[-2, -1]]


def _headed(bucket: Bucket, **numbers: int) -> Bucket:
    heading: Heading = replace(bucket.header.heading, **numbers)  # type: ignore[arg-type]
    return seal(heading, bucket.header.ranges, bucket.payload, bucket.header.status)


def _heading(name: str, by: int) -> Damage:
    def damage(buckets: Sequence[Bucket], tensors: Tensors) -> Bucket:
        bucket = _good(buckets, tensors)
        return _headed(bucket, **{name: getattr(bucket.header.heading, name) + by})

    return damage


def _flipped(buckets: Sequence[Bucket], tensors: Tensors) -> Bucket:
    bucket = _good(buckets, tensors)
    bucket.payload[-9] ^= 1
    return bucket


def _cut(buckets: Sequence[Bucket], tensors: Tensors) -> Bucket:
    bucket = _good(buckets, tensors)
    return Bucket(bucket.header, bucket.payload[:-8])


def _cut_and_sealed(buckets: Sequence[Bucket], tensors: Tensors) -> Bucket:
    bucket = _good(buckets, tensors)
    return sealed(bucket, bucket.payload[:-8].clone())


def _table(offset: int, value: int) -> Damage:
    """The last range's table entry with another byte."""

    def damage(buckets: Sequence[Bucket], tensors: Tensors) -> Bucket:
        bucket = _good(buckets, tensors)
        payload = bucket.payload.clone()
        payload[TABLE_ENTRY_BYTES * (bucket.header.ranges - 1) + offset] = value
        return sealed(bucket, payload)

    return damage


def _again(buckets: Sequence[Bucket], _: Tensors) -> Bucket:
    return renumbered(buckets[0], 1)


DAMAGES: Mapping[str, Damage] = {
    "one bit flipped": _flipped,
    "a payload shorter than announced": _cut,
    "a section shorter than its range": _cut_and_sealed,
    "another version": _heading("version", 1),
    "another base version": _heading("base", 1),
    "another group epoch": _heading("epoch", -1),
    "a bucket left out before it": _heading("sequence", 1),
    "a position beyond the tensor": _positions(_beyond),
    "a negative position": _positions(_negative),
    "a position named twice": _positions(_twice),
    "positions out of order": _positions(_unsorted),
    "elements that an earlier bucket named": _again,
    "an unknown tensor": _table(0, 255),
    "an unknown encoding": _table(4, 9),
}
"""What is wrong with the last range of the bucket, or with its heading, in words -> how to make it."""
