"""What a section costs, before there is one: nanoseconds to write and read it, and bytes, as estimates.

Everything here is a table passed in and arithmetic of whole operations (no logarithm, no clock): equal input gives an
equal answer on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.wire.forms import Form, Packing, Positions, Values
from weightsync.reference.wire.sections import fixed_bytes

_TABLE_ITEMSIZE = 2


@dataclass(frozen=True, slots=True)
class Curve:
    """What one form takes per changed element, at each of the profile's densities, for items of two bytes.

    Attributes:
        encode_ns: to write it from positions, new and old bits, one thread.
        decode_ns: to read it back to positions and new bits, one thread.
        bits: on the wire, tables of streams included.
    """

    encode_ns: tuple[float, ...]
    decode_ns: tuple[float, ...]
    bits: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Rates:
    """A frozen profile: where and how it was measured stands beside its numbers.

    Attributes:
        densities: changed elements / elements, ascending.
        section_ns: to write and read one section of a single element.
        curves: form -> what it takes.
    """

    densities: tuple[float, ...]
    section_ns: float
    curves: Mapping[Form, Curve]


@dataclass(frozen=True, slots=True)
class Costs:
    """What one section takes, estimated.

    Attributes:
        encode_ns: to write it.
        decode_ns: to read it.
        nbytes: its bytes, without padding and table entry.
    """

    encode_ns: float
    decode_ns: float
    nbytes: int

    def total_ns(self, link_bytes_per_s: float) -> float:
        """Written, sent over a link of this rate, and read."""
        return self.encode_ns + self.nbytes * 1e9 / link_bytes_per_s + self.decode_ns


def costs(form: Form, count: int, numel: int, itemsize: int, rates: Rates) -> Costs:
    """What ``count`` changed elements of ``numel`` take in ``form``.

    A dense form takes all of ``numel``; its curve is per element of the range. FIXED sizes are exact, others are
    what random positions and steps of an Adam-like update take, and no more than the fixed form.

    Raises:
        PlanMismatch: the counts make no sense, or the profile does not know the form.
    """
    if not 1 <= count <= numel:
        raise PlanMismatch(
            f"{count} elements of {numel} were given, expected 1 to {numel}; exchange the counts"
        )
    curve = rates.curves.get(form)
    if curve is None:
        raise PlanMismatch(f"the rates know no {form.name}, expected every form of the wire; measure it")
    dense = form.positions is Positions.DENSE
    elements = numel if dense else count
    share, low = _place(rates.densities, 1.0 if dense else count / numel)
    most = fixed_bytes(form, elements, itemsize)
    nbytes = most
    if form.packing is not Packing.FIXED:
        bits = _between(curve.bits, share, low) + 8 * _further_bytes(form, itemsize)
        nbytes = min(most, math.ceil(elements * bits / 8))
    wider = itemsize / _TABLE_ITEMSIZE if dense else 1.0
    return Costs(
        rates.section_ns / 2 + elements * _between(curve.encode_ns, share, low) * wider,
        rates.section_ns / 2 + elements * _between(curve.decode_ns, share, low) * wider,
        nbytes,
    )


def _further_bytes(form: Form, itemsize: int) -> int:
    """Bytes that an item of another size adds to the curve's bits: low bytes hardly ever shrink."""
    if form.values is Values.RAW or (form.packing is Packing.STREAMS and form.values is Values.XOR):
        return itemsize - _TABLE_ITEMSIZE
    return max(0, itemsize - _TABLE_ITEMSIZE)


def _place(densities: Sequence[float], density: float) -> tuple[float, int]:
    """Between which two of the profile's densities this one lies, and how far along, 0 to 1."""
    low = 0
    while low + 2 < len(densities) and densities[low + 1] <= density:
        low += 1
    begin, end = _octaves(densities[low]), _octaves(densities[low + 1])
    return min(max((_octaves(density) - begin) / (end - begin), 0.0), 1.0), low


def _octaves(value: float) -> float:
    """A logarithm to base 2, straight between powers of two: exact, so equal everywhere."""
    mantissa, exponent = math.frexp(value)
    return exponent + 2 * mantissa - 2


def _between(values: Sequence[float], share: float, low: int) -> float:
    return values[low] + (values[low + 1] - values[low]) * share
