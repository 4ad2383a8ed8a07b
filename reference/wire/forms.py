"""The names and numbers of the wire's forms: of positions, of values, and of how both are packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from weightsync.reference.errors import PatchMismatch, PlanMismatch

Numbered = TypeVar("Numbered", bound=IntEnum)


class Positions(IntEnum):
    """How a range's positions travel; byte 4 of its table entry."""

    DENSE = 0
    INT32 = 1
    GAP8 = 2
    GAP16 = 3
    BITMAP = 4
    BLOCK = 5


class Values(IntEnum):
    """What a range's values are; byte 5 of its table entry.

    RAW are the new bits. XOR is the new bits ^ the old ones. STEP is the distance from the old bits to the new ones,
    counted in representable values. XOR and STEP mean something only to a receiver that holds the base version.
    """

    RAW = 0
    XOR = 1
    STEP = 2


class Packing(IntEnum):
    """How positions and values are laid out; byte 6 of the table entry.

    FIXED: items of fixed size, whose bytes follow from the count. STREAMS: a table of streams, as they are.
    ZSTD: items of several bytes are cut in byte planes, and a stream is a zstd frame where that is smaller.
    """

    FIXED = 0
    STREAMS = 1
    ZSTD = 2


class Form(NamedTuple):
    """What a section is written in.

    Attributes:
        positions: the form of its positions.
        values: what its values are.
        packing: how both are laid out.
    """

    positions: Positions
    values: Values
    packing: Packing

    @property
    def name(self) -> str:
        """Such as ``gap8+step+zstd``; what a user may ask for."""
        parts = [self.positions.name, self.values.name]
        if self.packing is not Packing.FIXED:
            parts.append(self.packing.name)
        return "+".join(parts).lower()

    @property
    def fixed(self) -> Form:
        """The form of fixed size that stands in for this one when it would take more bytes."""
        positions = Positions.DENSE if self.positions is Positions.DENSE else Positions.INT32
        return Form(positions, self.values, Packing.FIXED)

    @classmethod
    def of(cls, positions: int, values: int, packing: int, name: str) -> Form:
        """The form with these wire numbers; PatchMismatch names tensor ``name`` when there is none."""
        found = cls(
            _member(Positions, positions, "position form", name),
            _member(Values, values, "value form", name),
            _member(Packing, packing, "packing", name),
        )
        if found not in ALL_FORMS:
            raise PatchMismatch(
                f"range of {name!r} is {found.name}, a combination that the wire does not have; "
                "use the same release on both sides"
            )
        return found

    @classmethod
    def named(cls, name: str) -> Form:
        """The form that ``name`` stands for; PlanMismatch names the known ones when there is none."""
        for form in ALL_FORMS:
            if form.name == name:
                return form
        known = ", ".join(form.name for form in ALL_FORMS)
        raise PlanMismatch(f"encoding {name!r} is unknown, expected auto or one of {known}; name one of them")


def _member(kind: type[Numbered], number: int, what: str, name: str) -> Numbered:
    try:
        return kind(number)
    except ValueError:
        known = ", ".join(f"{one.value} ({one.name})" for one in kind)
        raise PatchMismatch(
            f"range of {name!r} has {what} {number}, expected one of {known}; "
            "use the same release on both sides"
        ) from None


def _legal(form: Form) -> bool:
    if form.positions is Positions.DENSE:
        # A dense range names elements that did not change as well: it is whole, and needs no base.
        return form.values is Values.RAW and form.packing is not Packing.STREAMS
    if form.packing is Packing.FIXED:
        return form.positions is Positions.INT32
    if (
        form.positions is Positions.INT32
        and form.packing is Packing.STREAMS
        and form.values is not Values.STEP
    ):
        return False  # the fixed form with a table of streams before it
    return form.positions is not Positions.BLOCK or form.packing is Packing.STREAMS


ALL_FORMS = tuple(
    form
    for positions in Positions
    for values in Values
    for packing in Packing
    if _legal(form := Form(positions, values, packing))
)
"""Every form of the wire, in the order of their numbers."""

OLDEST = frozenset({"dense+raw", "int32+raw"})
"""Names of the forms that a receiver knows who does not say what it knows."""

DENSE_FORM = Form(Positions.DENSE, Values.RAW, Packing.FIXED)
PLAIN_FORM = Form(Positions.INT32, Values.RAW, Packing.FIXED)

FORM_NAMES = tuple(form.name for form in ALL_FORMS)
"""Their names, in the same order."""

ABSOLUTE = frozenset({Values.RAW})
"""The value forms of a baseline that does not know the old bits."""


def known_to_all(reports: Iterable[Mapping[str, Any]], names: Iterable[str] = FORM_NAMES) -> list[str]:
    """Those of ``names`` that every report lists under ``forms``; one without such a list knows the oldest forms."""
    listed = [frozenset(report.get("forms", OLDEST)) for report in reports]
    return [name for name in names if all(name in one for one in listed)]
