"""Handles to what a trainer rank copied, compared and brings to a gather."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Held:
    """A whole snapshot: its slot, and the bytes that were copied."""

    slot: int
    nbytes: int


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """What one rank tells of the difference between two slots, in checkpoint coordinates.

    Attributes:
        slot: the slot with the new bits.
        base: the slot compared with; None when nothing was, and every owned element counts as changed.
        counts: changed elements per piece of the plan, owned by this rank.
        patches: piece number -> positions relative to the piece's base, int32 (n,) ascending, and the new
        bits.
        nbytes: bytes of the patches.
        digest_change: what the rank's share of the digest changes by, from ``base`` to ``slot``.
    """

    slot: int
    base: int | None
    counts: tuple[int, ...]
    patches: Mapping[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    nbytes: int = 0
    digest_change: int = 0

    @property
    def nnz(self) -> int:
        """Changed elements of this rank."""
        return sum(self.counts)


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One rank's share of a gather group: uint8 (nbytes,), new memory."""

    payload: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes it brings to the gather."""
        return self.payload.numel()

    def copy(self) -> Part:
        """The same part in memory of its own."""
        return Part(self.payload.clone())
