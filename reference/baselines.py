"""What a trainer rank keeps to tell changes by: everything twice, only what it speaks for, or a bit per element.

A baseline holds the snapshots of both slots. It never moves at a diff: which slot is the base, the protocol says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from weightsync.reference.detect import Detector, Differing
from weightsync.reference.dirty import DirtyBits, Marks, differing
from weightsync.reference.errors import PlanMismatch, StaleVersion
from weightsync.reference.pieces import OwnedRows
from weightsync.reference.rowmap import RowMap
from weightsync.reference.snapshot import SLOTS, SnapshotSlots
from weightsync.reference.steps import Step


@dataclass(frozen=True, slots=True)
class Traits:
    """What a kind of baseline allows.

    Attributes:
        name: as a scenario says it.
        encodings: how values may travel: ``raw``, or as a difference to the base, ``xor`` or ``step``.
        exact: True when the changes are exactly the elements whose bits differ; else they may be more.
        digest_in_changed: True when the digest follows from the changes; else every element is read for it.
    """

    name: str
    encodings: tuple[str, ...]
    exact: bool
    digest_in_changed: bool


WHOLE = Traits("whole", ("raw", "xor", "step"), True, True)
SHARDS = Traits("shards", ("raw", "xor", "step"), True, True)
DIRTY = Traits("dirty", ("raw",), False, False)
DIRTY_OLD = Traits("dirty", ("raw", "xor", "step"), True, True)
"""Dirty bits whose hook also recorded the old bits."""


class Baseline(Protocol):
    """The snapshots of one trainer rank. ``maps`` says what the tensors it holds are, which may be fewer rows."""

    traits: Traits
    maps: tuple[RowMap, ...]

    @property
    def nbytes(self) -> int:
        """Bytes held now."""

    def write(self, slot: int, params: Mapping[str, Tensor]) -> Step[int]:
        """See ``SnapshotSlots.write``; after it ended without success, nothing is lost but the slot."""

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """The tensors in ``slot`` by runtime name, of the shapes of ``maps``. StaleVersion when it is not whole."""

    def memory(self, slot: int) -> str:
        """Name of the memory behind ``slot``, for the ledger of reads and writes."""

    def scanned(self, names: Sequence[str]) -> int:
        """Bytes that telling the changes of these parameters reads."""

    def find(self, name: str, slot: int, base: int, detector: Detector) -> Differing:
        """Where parameter ``name`` differs between two slots. StaleVersion when that is not known any more."""

    def rows(self, rows: OwnedRows) -> OwnedRows:
        """The same rows inside the tensor that is held."""


class WholeBaseline:
    """Two copies of everything that the rank holds.

    Args:
        maps: the maps of its parameters.
    """

    traits = WHOLE

    def __init__(self, maps: Sequence[RowMap]) -> None:
        self.maps = tuple(maps)
        self._sizes = {one.name: math.prod(one.local_shape) * one.dtype.itemsize for one in self.maps}
        self._slots = SnapshotSlots({one.name: one.dtype for one in self.maps})

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return self._slots.nbytes

    def write(self, slot: int, params: Mapping[str, Tensor]) -> Step[int]:
        """See ``Baseline.write``."""
        return self._slots.write(slot, params)

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """See ``Baseline.tensors``."""
        return self._slots.tensors(slot)

    def memory(self, slot: int) -> str:
        """Each slot has its own."""
        return f"slot{slot}"

    def scanned(self, names: Sequence[str]) -> int:
        """Both copies."""
        return 2 * sum(self._sizes[name] for name in names)

    def find(self, name: str, slot: int, base: int, detector: Detector) -> Differing:
        """See ``Baseline.find``."""
        return detector.find(self.tensors(slot)[name], self.tensors(base)[name])

    def rows(self, rows: OwnedRows) -> OwnedRows:
        """As they are."""
        return rows


class ShardsBaseline(WholeBaseline):
    """Two copies of the rows that the rank speaks for; replicas of what another rank tells are not kept."""

    traits = SHARDS

    def __init__(self, maps: Sequence[RowMap]) -> None:
        self._where: dict[str, Tensor] = {}
        rows: dict[str, tuple[Tensor, int]] = {}
        kept: list[RowMap] = []
        for row_map in maps:
            told = row_map.tables.told >= 0
            if bool(told.all()):
                kept.append(row_map)
            elif bool(told.any()):
                chosen = told.nonzero().reshape(-1)
                kept.append(_only(row_map, chosen))
                rows[row_map.name] = chosen, row_map.width
                self._where[row_map.name] = told.cumsum(0) - 1
        super().__init__(kept)
        self._slots = SnapshotSlots({one.name: one.dtype for one in kept}, rows)

    def rows(self, rows: OwnedRows) -> OwnedRows:
        """The rows among those kept."""
        where = self._where.get(rows.param)
        return rows if where is None else replace(rows, local=where[rows.local])


class DirtyBaseline:
    """One copy of what the rank speaks for some of, and the marks that lead from the base to it.

    Marks are taken when a snapshot is written. A push that failed is seen by the next snapshot, which overwrites the
    same slot: the marks of both then count.

    Args:
        maps: the maps of the rank's parameters.
        bits: the marks that the optimizer sets.

    Raises:
        PlanMismatch: a parameter has no bits, or records old bits before a cast that the plan makes.
    """

    def __init__(self, maps: Sequence[RowMap], bits: DirtyBits) -> None:
        self.traits = DIRTY_OLD if bits.record_old else DIRTY
        self.maps = tuple(one for one in maps if bool((one.tables.told >= 0).any()))
        self.bits = bits
        for one in self.maps:
            param = bits.params.get(one.name)
            if param is None or tuple(param.shape) != one.local_shape:
                found = "none" if param is None else f"those of shape {list(param.shape)}"
                raise PlanMismatch(
                    f"parameter {one.name!r} has shape {list(one.local_shape)} and dirty bits: {found}; make DirtyBits "
                    "from the live parameters that the source reads"
                )
            if bits.record_old and param.dtype != one.dtype:
                raise PlanMismatch(
                    f"parameter {one.name!r} is {param.dtype} and travels as {one.dtype}, so its old bits are not "
                    "those of the base; record no old bits, or train in the dtype that travels"
                )
        self._slots = SnapshotSlots({one.name: one.dtype for one in self.maps})
        self._last: int | None = None
        self._open: dict[str, Marks] | None = None
        self._between: dict[str, Marks] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes held now: the copy, the optimizer's marks, and those taken."""
        taken = [one for marks in (self._between, self._open) for one in (marks or {}).values()]
        return self._slots.nbytes + self.bits.nbytes + sum(one.nbytes for one in taken)

    def write(self, slot: int, params: Mapping[str, Tensor]) -> Step[int]:
        """See ``Baseline.write``; marks taken for one that failed count again at the next."""
        if not 0 <= slot < SLOTS:
            raise PlanMismatch(f"snapshot slot {slot} does not exist, expected 0 or 1; snapshot into free()")
        if self._open is not None:
            self.bits.put_back(self._open)
        taken = self._open = self.bits.take()
        nbytes = yield from self._slots.write(0, params)
        self._open = None
        if self._last == slot and self._between is not None:
            self._tell_again(self._between, taken)
        elif self._last is not None and self._last != slot:
            self._between = taken
        self._last = slot
        return nbytes

    def _tell_again(self, between: dict[str, Marks], taken: Mapping[str, Marks]) -> None:
        """The push of ``between`` came to nothing: its marks and the new ones lead from the base to the copy."""
        for name, marks in taken.items():
            between[name].add(marks)

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """See ``Baseline.tensors``; only the last snapshot is there."""
        if slot != self._last:
            raise StaleVersion(
                f"snapshot slot {slot} holds no copy, expected the last snapshot, slot {self._last}: dirty bits keep "
                "one; snapshot first"
            )
        return self._slots.tensors(0)

    def memory(self, slot: int) -> str:
        """Both slots share one."""
        return "slot0"

    def scanned(self, names: Sequence[str]) -> int:
        """The marks, and no element."""
        return 0 if self._between is None else sum(self._between[name].nbytes for name in names)

    def find(self, name: str, slot: int, base: int, detector: Detector) -> Differing:
        """See ``Baseline.find``."""
        copy = self.tensors(slot)[name]
        if self._between is None or base == slot:
            raise StaleVersion(
                f"no marks lead from slot {base} to slot {slot}, expected a snapshot of each; send a full update"
            )
        return differing(self._between[name], copy)

    def rows(self, rows: OwnedRows) -> OwnedRows:
        """As they are."""
        return rows


def _only(row_map: RowMap, rows: Tensor) -> RowMap:
    """The map of these local rows alone, all of them spoken for."""
    return replace(
        row_map, tensor=row_map.tensor[rows], row=row_map.row[rows], owned=row_map.owned[rows],
        local_shape=(len(rows), row_map.width),
    )  # fmt: skip


def make_baseline(name: str, maps: Sequence[RowMap], bits: DirtyBits | None = None) -> Baseline:
    """The baseline that a scenario calls ``name``, of a rank with these ``maps``.

    Raises:
        PlanMismatch: no such baseline; dirty without ``bits``, or ``bits`` with another.
    """
    if name == "dirty":
        if bits is None:
            raise PlanMismatch(
                "baseline 'dirty' was given no dirty bits, expected those that the optimizer sets; pass DirtyBits, or "
                "take 'whole' or 'shards'"
            )
        return DirtyBaseline(maps, bits)
    if bits is not None:
        raise PlanMismatch(f"baseline {name!r} was given dirty bits, which it would ignore; take 'dirty'")
    return ShardsBaseline(maps) if named(name) is SHARDS else WholeBaseline(maps)


def named(name: str) -> Traits:
    """The traits of the baseline of this name, without recorded old bits; PlanMismatch for an unknown one."""
    for traits in (WHOLE, SHARDS, DIRTY):
        if traits.name == name:
            return traits
    raise PlanMismatch(f"baseline {name!r} is unknown, expected 'whole', 'shards' or 'dirty'")


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of a baseline.

    Attributes:
        copy: those of one snapshot.
        total: all that it keeps, once both slots were written; the optimizer's marks included.
        scanned: those that a diff reads.
    """

    copy: int
    total: int
    scanned: int


def kept(traits: Traits, maps: Sequence[RowMap]) -> Kept:
    """What a baseline of these traits keeps of parameters with ``maps``; no weight is needed, old bits not counted."""
    held = [one for one in maps if traits.name == "whole" or bool((one.tables.told >= 0).any())]
    if traits.name == "shards":
        rows = [int((one.tables.told >= 0).sum()) for one in held]
        copy = sum(n * one.width * one.dtype.itemsize for n, one in zip(rows, held, strict=True))
    else:
        copy = sum(math.prod(one.local_shape) * one.dtype.itemsize for one in held)
    if traits.name != "dirty":
        return Kept(copy, 2 * copy, 2 * copy)
    marks, scanned = (sum(-(-math.prod(one.local_shape) // 8) for one in some) for some in (maps, held))
    return Kept(copy, copy + 2 * marks, scanned)
