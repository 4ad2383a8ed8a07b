"""Ranges: one tensor's place in one bucket, as it is cut, and as it is unpacked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from weightsync.reference.encoding import Encoding, element_bytes, padded
from weightsync.reference.headers import HEADER_BYTES
from weightsync.reference.params import ParamMeta
from weightsync.reference.wire.forms import Form, Packing, Values

TABLE_ENTRY_BYTES = 32
"""Bytes of a range's entry in the table of its bucket."""


class RangeSpec(NamedTuple):
    """One tensor's place in one bucket.

    Attributes:
        tensor: number of the tensor in the plan.
        encoding: how its positions travel.
        base: DENSE: flat position of the first element; else: what every position is relative to.
        count: number of elements.
        first: not DENSE: ordinal of the first element among the changed elements of its piece; not on the wire,
            so 0 once unpacked.
        values: what its values are.
        packing: how positions and values are laid out.
        likely: estimated bytes of its section; not on the wire, so 0 once unpacked, and 0 where the size is exact.
    """

    tensor: int
    encoding: Encoding
    base: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    first: int = 0
    values: Values = Values.RAW
    packing: Packing = Packing.FIXED
    likely: int = 0

    @property
    def form(self) -> Form:
        """The form of its section."""
        return Form(self.encoding, self.values, self.packing)

    def section_bytes(self, itemsize: int) -> int:
        """Bytes of its section, without padding; the most, unless its packing is FIXED."""
        return self.count * element_bytes(self.encoding, itemsize)


@dataclass(frozen=True, slots=True)
class BucketSpec:
    """The ranges of one bucket, as the plan cuts them.

    Attributes:
        ranges: in wire order.
        nbytes: the most bytes on the wire, header included; exact when every range is in a fixed form.
        likely: estimated bytes on the wire.
    """

    ranges: tuple[RangeSpec, ...]
    nbytes: int
    likely: int

    @classmethod
    def of(cls, ranges: Sequence[RangeSpec], tensors: Sequence[ParamMeta]) -> BucketSpec:
        """The spec with its size."""
        sizes = [one.section_bytes(tensors[one.tensor].itemsize) for one in ranges]
        likely = (padded(one.likely or size) for one, size in zip(ranges, sizes, strict=True))
        head = HEADER_BYTES + TABLE_ENTRY_BYTES * len(ranges)
        return cls(tuple(ranges), head + sum(map(padded, sizes)), head + sum(likely))


class Range(NamedTuple):
    """One unpacked range.

    Attributes:
        spec: its entry in the table.
        positions: int32 (count,) relative to ``spec.base``, or None for DENSE.
        bits: integer view (count,) of the values, in the value form of ``spec``.
    """

    spec: RangeSpec
    positions: Tensor | None
    bits: Tensor
