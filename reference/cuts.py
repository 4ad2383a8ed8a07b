"""Cutting ranges into buckets: which elements go into which bucket, from counts alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weightsync.reference.buckets import HEADER_BYTES, TABLE_ENTRY_BYTES, BucketSpec, RangeSpec
from weightsync.reference.encoding import ALIGNMENT, Encoding, element_bytes, padded
from weightsync.reference.params import ParamMeta


def cut_buckets(
    ranges: Iterable[RangeSpec], tensors: Sequence[ParamMeta], bucket_bytes: int
) -> tuple[BucketSpec, ...]:
    """The ranges in order, in buckets of at most ``bucket_bytes``; only a single element may exceed that.

    Args:
        ranges: whole contents of pieces, each with at least one element.
        tensors: what the ranges' numbers mean.
        bucket_bytes: largest bucket, header included.
    """
    buckets: list[BucketSpec] = []
    filling: list[RangeSpec] = []
    used = HEADER_BYTES
    for one in ranges:
        size = element_bytes(one.encoding, tensors[one.tensor].itemsize)
        done = 0
        while done < one.count:
            room = max(0, bucket_bytes - used - TABLE_ENTRY_BYTES) // ALIGNMENT * ALIGNMENT
            count = min(room // size, one.count - done)
            if count == 0 and filling:
                buckets.append(BucketSpec.of(filling, tensors))
                filling, used = [], HEADER_BYTES
                continue
            count = max(count, 1)
            sparse = one.encoding is not Encoding.DENSE
            base, first = (one.base, done) if sparse else (one.base + done, 0)
            likely = -(-one.likely * count // one.count)
            filling.append(one._replace(base=base, count=count, first=first, likely=likely))
            used += TABLE_ENTRY_BYTES + padded(count * size)
            done += count
    if filling:
        buckets.append(BucketSpec.of(filling, tensors))
    return tuple(buckets)
