"""Dirty bits: one bit per element, set while the optimizer writes it, so that a push needs no copy to compare with.

The framework calls ``DirtyBits.write`` in place of its own write, or ``mark`` around it. A bit that is set without a
change costs an element on the wire; one that is missing would cost the rollouts the truth, which the digest shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightsync.reference.detect import WIDE, Detector, Differing
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import int_view

_CHUNK = 1 << 20  # elements that are unpacked, written or compared at a time

Packed = NDArray[np.uint8]


@dataclass(eq=False, slots=True)
class Marks:
    """What was marked of one tensor: packed bits, and the old bits where they were recorded.

    Attributes:
        bits: uint8 (ceil(numel / 8),), first element in the highest bit.
        numel: elements of the tensor.
        old: flat positions (n,) int64 ascending and the bits (n,) that they had before the first mark; None where
            nobody records them.
    """

    bits: Packed
    numel: int
    old: tuple[Tensor, Tensor] | None

    @classmethod
    def none(cls, like: Tensor, record: bool) -> Marks:
        """No mark on a tensor like this one."""
        empty = (torch.empty(0, dtype=torch.int64), int_view(like.new_empty(0))) if record else None
        return cls(np.zeros(-(-like.numel() // 8), np.uint8), like.numel(), empty)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.bits.nbytes + (0 if self.old is None else sum(one.nbytes for one in self.old))

    def positions(self) -> Tensor:
        """Marked positions, int64 (n,) ascending."""
        step = _CHUNK // 8
        found = []
        for start in range(0, len(self.bits), step):
            part = self.bits[start : start + step]
            if part.any():
                found.append(np.unpackbits(part).nonzero()[0] + 8 * start)
        return torch.from_numpy(np.concatenate(found) if found else np.empty(0, np.int64))

    def add(self, later: Marks) -> None:
        """Everything that ``later`` marked as well; of two old bits the earlier, these, stay."""
        if self.old is not None and later.old is not None:
            at, bits = later.old
            fresh = torch.from_numpy(~self._has(at.numpy()))
            merged = torch.cat([self.old[0], at[fresh]])
            order = merged.argsort()
            self.old = merged[order], torch.cat([self.old[1], bits[fresh]])[order]
        self.bits |= later.bits

    def mark(self, at: Tensor, old: Tensor) -> None:
        """Mark ascending positions ``at``, where the bits ``old`` stood before."""
        flags = np.zeros(self.numel, np.bool_)
        flags[at.numpy()] = True
        self.add(Marks(np.packbits(flags), self.numel, None if self.old is None else (at, old)))

    def _has(self, at: NDArray[np.int64]) -> NDArray[np.bool_]:
        marked: NDArray[np.bool_] = (self.bits[at >> 3] >> (7 - (at & 7)).astype(np.uint8)) & 1 == 1
        return marked


@dataclass(eq=False)
class DirtyBits:
    """The marks of one trainer rank's parameters since the last snapshot. Touched by the training thread only.

    Args:
        params: runtime name -> live parameter; only shapes and dtypes are read.
        record_old: keep the old bits beside the marks, which lets values travel as differences.
    """

    params: Mapping[str, Tensor]
    record_old: bool = False
    _marks: dict[str, Marks] = field(init=False)

    def __post_init__(self) -> None:
        self._marks = self._none()

    @property
    def nbytes(self) -> int:
        """Bytes that the marks hold now."""
        return sum(one.nbytes for one in self._marks.values())

    def write(self, name: str, values: Tensor) -> None:
        """Write ``values``, cast to the parameter's dtype, into parameter ``name``, and mark what changes.

        Raises:
            PlanMismatch: no such parameter, or another shape.
        """
        param = self._param(name)
        if values.shape != param.shape:
            raise PlanMismatch(
                f"values for parameter {name!r} have shape {list(values.shape)}, expected {list(param.shape)}; write "
                "the whole parameter"
            )
        with torch.no_grad():
            new = values.detach().to(param.dtype)
            self.mark(name, new, param)
            param.copy_(new)

    def mark(self, name: str, new: Tensor, old: Tensor) -> None:
        """Mark where ``new``, to be written, differs in any bit from ``old``, what the parameter holds.

        Raises:
            PlanMismatch: no such parameter, or tensors of another shape or dtype than it has.
        """
        param = self._param(name)
        for given in (new, old):
            if given.shape != param.shape or given.dtype != param.dtype:
                raise PlanMismatch(
                    f"bits of parameter {name!r} come as {given.dtype} {list(given.shape)}, expected {param.dtype} "
                    f"{list(param.shape)}; mark what is written, after the cast"
                )
        found = Detector().find(new, old, old_bits=self.record_old)
        if found.positions.numel():
            self._marks[name].mark(
                found.positions.to(torch.int64), found.new if found.old is None else found.old
            )

    def mark_all(self, name: str) -> None:
        """Mark every element: for a writer that cannot say what it changed. Refused where old bits are recorded."""
        param = self._param(name)
        if self.record_old:
            raise PlanMismatch(
                f"parameter {name!r} is marked whole, but its old bits are to be recorded; mark it before the write, "
                "with old and new bits"
            )
        self._marks[name].bits |= np.packbits(np.ones(param.numel(), np.bool_))

    def take(self) -> dict[str, Marks]:
        """The marks so far, which are the caller's now; the next ones begin with none."""
        taken, self._marks = self._marks, self._none()
        return taken

    def put_back(self, taken: Mapping[str, Marks]) -> None:
        """The marks are to be taken again, with those made since: nothing came of what they were taken for."""
        for name, marks in taken.items():
            later = self._marks[name]
            self._marks[name] = marks
            marks.add(later)

    def _param(self, name: str) -> Tensor:
        if name not in self.params:
            raise PlanMismatch(
                f"parameter {name!r} has no dirty bits, expected one of {len(self.params)} names; make the bits from "
                "all live parameters"
            )
        return self.params[name]

    def _none(self) -> dict[str, Marks]:
        return {name: Marks.none(param, self.record_old) for name, param in self.params.items()}


def differing(marks: Marks, copy: Tensor) -> Differing:
    """Marked positions and the bits of ``copy`` there; where old bits are known, only those that differ."""
    bits = int_view(copy)
    kind = torch.int64 if marks.numel >= WIDE else torch.int32
    if marks.old is None:
        at = marks.positions()
        return Differing(at.to(kind), bits[at], None)
    at, old = marks.old
    new = bits[at]
    real = new != old
    return Differing(at[real].to(kind), new[real], old[real])
