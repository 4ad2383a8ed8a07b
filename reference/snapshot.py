"""Host copies of the trainer's parameters in two slots, and what each slot is good for.

Two slots suffice when a snapshot always goes into the one that is not the acknowledged baseline: a failed
push then costs the new copy, never the base that the receivers hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch, StaleVersion
from weightsync.reference.params import carry, int_view
from weightsync.reference.steps import Step, Touched

SLOTS = 2


class SnapshotSlots:
    """Two host copies of a set of tensors. Memory is allocated at a slot's first snapshot and then reused.

    Args:
        dtypes: name -> the dtype that travels; a live tensor of another floating dtype is cast once, here.
        rows: name -> rows int64 (k,) and their width: all that is kept of that tensor, seen as rows of so many
            elements. Its copy is (k, width) and carries no attributes.
    """

    def __init__(
        self, dtypes: Mapping[str, torch.dtype], rows: Mapping[str, tuple[Tensor, int]] | None = None
    ) -> None:
        self._dtypes = dict(dtypes)
        self._rows = dict(rows or {})
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._copies: list[dict[str, Tensor]] = [{} for _ in range(SLOTS)]
        self._whole = [False] * SLOTS

    def write(self, slot: int, params: Mapping[str, Tensor]) -> Step[int]:
        """Copy ``params`` into ``slot``, half of the bytes on each side of the pause; returns the bytes
        copied.

        A copy has its own contiguous storage and exactly the tensor-parallel attributes of its source. The
        caller may mutate ``params`` once the step is done. Until then, and after it was abandoned, the slot
        is torn.

        Raises:
            PlanMismatch: no such slot, a missing tensor, another shape than before, or a dtype that is no
            cast away.
        """
        copies = self._copies[_checked(slot)]
        self._whole[slot] = False
        for name, dtype in self._dtypes.items():
            if name not in params:
                raise PlanMismatch(
                    f"parameter {name!r} is not among the live parameters, expected every planned one"
                )
            _check_cast(name, params[name], dtype, self._shapes.get(name))
            if name not in copies:
                self._shapes[name] = tuple(params[name].shape)
                copies[name] = torch.empty(self._kept_shape(name), dtype=dtype)
        total = sum(copies[name].nbytes for name in self._dtypes)
        touched = Touched(total, reads=("live",), writes=(f"slot{slot}",))
        moved, paused = 0, False
        for name in self._dtypes:
            source, copy = self._kept(name, params[name].detach()), copies[name]
            for part in _parts(copy, total / 2 - moved):
                if not paused and moved >= total / 2:
                    paused = True
                    yield touched
                _copy(source[part], copy[part])
                moved += copy[part].nbytes
            if name not in self._rows:
                carry(params[name], copy)
        if not paused:
            yield touched
        self._whole[slot] = True
        return total

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """The copies in ``slot``, by name; the slot keeps owning them.

        Raises:
            StaleVersion: the slot was never written, or its last write did not end.
        """
        if not self._whole[_checked(slot)]:
            raise StaleVersion(
                f"snapshot slot {slot} holds no whole snapshot, expected one; snapshot into it first"
            )
        return self._copies[slot]

    @property
    def nbytes(self) -> int:
        """Bytes of the copies that were allocated so far."""
        return sum(copy.nbytes for copies in self._copies for copy in copies.values())

    def _kept_shape(self, name: str) -> tuple[int, ...]:
        if name not in self._rows:
            return self._shapes[name]
        rows, width = self._rows[name]
        return len(rows), width

    def _kept(self, name: str, source: Tensor) -> Tensor:
        if name not in self._rows:
            return source
        rows, width = self._rows[name]
        return source.reshape(-1, width)[rows]


@dataclass
class BaselineSlots:
    """Which version and digest each slot holds, and which slot the receivers acknowledged. No tensors.

    Attributes:
        acknowledged: the slot whose version every receiver committed, or None.
    """

    acknowledged: int | None = None
    _held: list[tuple[int, int] | None] = field(default_factory=lambda: [None] * SLOTS)

    def free(self) -> int:
        """The slot that the next snapshot may overwrite: never the acknowledged one."""
        return 1 if self.acknowledged == 0 else 0

    def invalidate(self, slot: int) -> None:
        """``slot`` is about to be overwritten; until ``hold`` it answers no ``find``.

        Raises:
            StaleVersion: it is the acknowledged baseline.
        """
        if _checked(slot) == self.acknowledged:
            raise StaleVersion(
                f"slot {slot} holds the acknowledged baseline, expected the other one; snapshot into free()"
            )
        self._held[slot] = None

    def hold(self, slot: int, version: int, digest: int) -> None:
        """``slot`` now holds ``version``, whose state has ``digest``."""
        self._held[_checked(slot)] = (version, digest)

    def acknowledge(self, slot: int | None) -> None:
        """Every receiver holds what is in ``slot``; None when they hold different versions, or nothing.

        Raises:
            StaleVersion: the slot holds no version.
        """
        if slot is not None and self._held[_checked(slot)] is None:
            raise StaleVersion(
                f"slot {slot} holds no version to acknowledge, expected one; hold a version first"
            )
        self.acknowledged = slot

    def find(self, version: int, digest: int) -> int | None:
        """The slot that holds exactly this version with this digest, or None."""
        return next((slot for slot in range(SLOTS) if self._held[slot] == (version, digest)), None)

    def held(self, slot: int) -> tuple[int, int] | None:
        """Version and digest of what ``slot`` holds, or None."""
        return self._held[_checked(slot)]

    def version(self, slot: int) -> int:
        """Version that ``slot`` holds; StaleVersion when it holds none."""
        return self._entry(slot)[0]

    def digest(self, slot: int) -> int:
        """Digest of what ``slot`` holds; StaleVersion when it holds none."""
        return self._entry(slot)[1]

    def _entry(self, slot: int) -> tuple[int, int]:
        held = self._held[_checked(slot)]
        if held is None:
            raise StaleVersion(f"slot {slot} holds no version, expected one; hold a version first")
        return held


def _checked(slot: int) -> int:
    if not 0 <= slot < SLOTS:
        raise PlanMismatch(f"snapshot slot {slot} does not exist, expected 0 or 1; snapshot into free()")
    return slot


def _check_cast(name: str, live: Tensor, dtype: torch.dtype, before: tuple[int, ...] | None) -> None:
    if live.dtype != dtype and not (live.is_floating_point() and dtype.is_floating_point):
        raise PlanMismatch(
            f"parameter {name!r} is {live.dtype}, its plan says {dtype}, expected a cast between floating "
            "dtypes; plan the dtype that the parameter has"
        )
    if before is not None and before != tuple(live.shape):
        raise PlanMismatch(
            f"parameter {name!r} has shape {list(live.shape)}, its snapshot {list(before)}, expected no "
            "change; make a new source for the new shape"
        )


def _parts(copy: Tensor, before_half: float) -> Iterator[tuple[slice, ...]]:
    """The whole tensor, or its two sides along a dimension when half of all bytes lies inside it."""
    dim = next((dim for dim, side in enumerate(copy.shape) if side > 1), None)
    if dim is None or not 0 < before_half < copy.nbytes:
        yield ()
        return
    cut = max(1, int(before_half * copy.shape[dim] / copy.nbytes))
    before = (slice(None),) * dim
    yield (*before, slice(0, cut))
    yield (*before, slice(cut, None))


def _copy(source: Tensor, copy: Tensor) -> None:
    if source.dtype == copy.dtype:
        integer = int_view(copy.new_empty(0)).dtype
        copy.view(integer).copy_(source.view(integer))
    else:
        copy.copy_(source)
