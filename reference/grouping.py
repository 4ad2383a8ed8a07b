"""Which pieces travel together: the gather groups of an update and their sizes, from counts alone.

All pieces of a plan are looked at at once, a column per property, since a model may have tens of thousands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from weightsync.reference.buckets import HEADER_BYTES, TABLE_ENTRY_BYTES, BucketSpec, RangeSpec
from weightsync.reference.cuts import cut_buckets
from weightsync.reference.encoding import ALIGNMENT, POSITION_BYTES
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta
from weightsync.reference.pieces import Piece
from weightsync.reference.wire.forms import Form, Packing, Positions
from weightsync.reference.wire.policy import WirePolicy

Numbers: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class GatherGroup:
    """Whole pieces that are gathered together and fill buckets of their own.

    Attributes:
        pieces: numbers of the pieces, in wire order.
        dense: per piece, whether all its elements travel.
        forms: per piece, the form that its ranges are to be written in.
        buckets: how the gathered bytes are cut; no bucket mixes two groups.
    """

    pieces: tuple[int, ...]
    dense: tuple[bool, ...]
    buckets: tuple[BucketSpec, ...]
    forms: tuple[Form, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
    """Properties of every piece of a plan, int64 (pieces,) each.

    Attributes:
        tensor: number of its tensor.
        base: flat position of its first element.
        count: its elements.
        itemsize: bytes of one.
    """

    tensor: Numbers
    base: Numbers
    count: Numbers
    itemsize: Numbers

    @classmethod
    def of(cls, pieces: Sequence[Piece], tensors: Sequence[ParamMeta]) -> Columns:
        """The columns of ``pieces`` of ``tensors``."""
        rows = [(one.tensor, one.base, one.count, tensors[one.tensor].itemsize) for one in pieces]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 4).T.copy())


def gather_groups(
    columns: Columns,
    tensors: Sequence[ParamMeta],
    counts: Sequence[int] | None,
    wire: WirePolicy,
    bucket_bytes: int,
    *,
    absolute: bool,
) -> tuple[GatherGroup, ...]:
    """The groups of an update, in order; see ``plan.TransferPlan.groups``, whose arguments these are."""
    found = columns.count if counts is None else _checked(columns, tensors, counts)
    numbers = np.flatnonzero(found)
    if not numbers.size:
        return ()
    wholes, itemsizes = columns.count[numbers], columns.itemsize[numbers]
    sizes, widths, changed = wholes.tolist(), itemsizes.tolist(), found[numbers].tolist()
    if counts is None:
        forms = list(map(wire.full_form, sizes, widths))
    else:
        forms = wire.forms_of(changed, sizes, widths, absolute=absolute)
    positions, values, packings = zip(*forms, strict=True)
    dense = [one is Positions.DENSE for one in positions]
    taken = np.where(dense, wholes, found[numbers])
    estimates = [
        0 if form.packing is Packing.FIXED else wire.likely_bytes(form, count, whole, width)
        for form, count, whole, width in zip(forms, taken.tolist(), sizes, widths, strict=True)
    ]
    section = taken * (itemsizes + np.where(dense, 0, POSITION_BYTES))
    likely = np.where(estimates, estimates, section)
    # The most, and the likely, that every range adds to a bucket, table entry included; each up to and with it.
    filled, expected = (np.cumsum(TABLE_ENTRY_BYTES + _padded(one)) for one in (section, likely))
    columns_of_ranges = (
        columns.tensor[numbers].tolist(), positions, columns.base[numbers].tolist(), taken.tolist(), repeat(0),
        values, packings, estimates,
    )  # fmt: skip
    ranges = list(map(RangeSpec._make, zip(*columns_of_ranges, strict=False)))  # repeat has no end
    names = numbers.tolist()
    groups, start, before, expected_before = [], 0, 0, 0
    while start < len(names):
        room = before + bucket_bytes - HEADER_BYTES
        end = max(start + 1, int(np.searchsorted(filled, room, side="right")))
        nbytes = HEADER_BYTES + int(filled[end - 1]) - before
        buckets: tuple[BucketSpec, ...]
        if nbytes > bucket_bytes:
            buckets = cut_buckets(ranges[start:end], tensors, bucket_bytes)
        else:
            most_likely = HEADER_BYTES + int(expected[end - 1]) - expected_before
            buckets = (BucketSpec(tuple(ranges[start:end]), nbytes, most_likely),)
        groups.append(
            GatherGroup(tuple(names[start:end]), tuple(dense[start:end]), buckets, tuple(forms[start:end]))
        )
        start, before, expected_before = end, int(filled[end - 1]), int(expected[end - 1])
    return tuple(groups)


def part_sizes(columns: Columns, owned: Numbers, group: GatherGroup, counts: Numbers) -> Numbers:
    """Exact bytes that each rank brings to the gather of ``group``: int64 (ranks,).

    Args:
        columns: of the plan's pieces.
        owned: (ranks, pieces of the plan), elements that each rank speaks for.
        group: the group.
        counts: (ranks, pieces of the group), changed elements of each rank; no part for dense pieces.
    """
    pieces, dense = np.array(group.pieces, dtype=np.int64), np.array(group.dense)
    taken = np.where(dense, owned[:, pieces], counts)
    sizes: Numbers = _padded(taken * (columns.itemsize[pieces] + np.where(dense, 0, POSITION_BYTES))).sum(
        axis=1
    )
    return sizes


def _checked(columns: Columns, tensors: Sequence[ParamMeta], counts: Sequence[int]) -> Numbers:
    """The counts, one per piece and no more than it has elements."""
    if len(counts) != columns.count.size:
        raise PlanMismatch(
            f"{len(counts)} counts were given, expected {columns.count.size}, one per piece of the plan; "
            "exchange the counts of one plan"
        )
    found = np.array(counts, dtype=np.int64)
    wrong = np.flatnonzero((found < 0) | (found > columns.count))
    if wrong.size:
        one = int(wrong[0])
        raise PlanMismatch(
            f"tensor {tensors[columns.tensor[one]].name!r} has {found[one]} changed elements from position "
            f"{columns.base[one]}, expected 0 to {columns.count[one]}; exchange the counts of one plan"
        )
    return found


def _padded(nbytes: Numbers) -> Numbers:
    """``encoding.padded`` of each."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
