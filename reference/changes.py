"""What a rank tells of a difference: from where its parameters differ to positions and bits per piece of the plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from weightsync.reference.detect import Differing
from weightsync.reference.digest import combine, digest_mixed, digest_sum, key
from weightsync.reference.params import ParamMeta
from weightsync.reference.pieces import Piece
from weightsync.reference.plan import TransferPlan
from weightsync.reference.rowmap import RowMap
from weightsync.reference.rowtables import by_output

_SMALL = 512  # elements of a change that is hashed with others
_TOGETHER = 64  # changes hashed at a time

Patch: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Positions, new bits and old bits of a piece; see ``Changes.patches``."""


Told: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Flat positions in a checkpoint tensor, new bits and old bits of what one parameter tells of it."""

Found: TypeAlias = dict[int, list[Told]]
"""Number of a checkpoint tensor -> what each parameter tells of it."""


@dataclass(frozen=True, slots=True)
class Held:
    """A whole snapshot: its slot, and the bytes that were copied."""

    slot: int
    nbytes: int


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


@dataclass(frozen=True, eq=False, slots=True)
class Changes:
    """What one rank tells of the difference between two slots, in checkpoint coordinates.

    Attributes:
        slot: the slot with the new bits.
        base: the slot compared with; None when nothing was, and every owned element counts as changed.
        counts: changed elements per piece of the plan, owned by this rank.
        patches: piece number -> positions relative to the piece's base, int32 (n,) ascending, the new bits
        (n,), and the bits that the base had (n,), or None where nothing knows them.
        nbytes: bytes of the patches' positions and new bits.
        digest_change: what the rank's share of the digest changes by, from ``base`` to ``slot``; None where the old
        bits are not known.
    """

    slot: int
    base: int | None
    counts: tuple[int, ...]
    patches: Mapping[int, Patch] = field(default_factory=dict)
    nbytes: int = 0
    digest_change: int | None = 0

    @property
    def nnz(self) -> int:
        """Changed elements of this rank."""
        return sum(self.counts)


def collect(row_map: RowMap, differing: Differing, found: Found) -> None:
    """Add, per checkpoint tensor, flat positions, new bits and old bits of what differs and is owned."""
    if differing.positions.numel() == 0:
        return
    whole_rows = row_map.tables.side_by_side
    if whole_rows is not None and row_map.width == row_map.full_widths[whole_rows[0]]:
        index, first = whole_rows
        flat = differing.positions.to(torch.int64)
        if first:
            flat += first * row_map.width
        found.setdefault(row_map.outputs[index], []).append((flat, differing.new, differing.old))
        return
    output, flat = row_map.to_checkpoint(differing.positions)
    for index, chosen in by_output(output, len(row_map.outputs)):
        every = len(chosen) == len(flat)
        columns = (flat, differing.new, differing.old)
        told = columns if every else tuple(None if one is None else one[chosen] for one in columns)
        found.setdefault(row_map.outputs[index], []).append(told)  # type: ignore[arg-type]


def in_pieces(plan: TransferPlan, slot: int, base: int, found: Found) -> Changes:
    """What was found, per piece of the plan, and what it does to the digest."""
    counts = [0] * len(plan.pieces)
    patches: dict[int, Patch] = {}
    merged = {tensor: _merge(several) for tensor, several in found.items()}
    for number, piece in enumerate(plan.pieces):
        if piece.tensor in merged:
            flat, new, old = merged[piece.tensor]
            low, high = _window(flat, piece, plan.tensors[piece.tensor])
            if high > low:
                counts[number] = high - low
                positions = flat[low:high] if piece.base == 0 else flat[low:high] - piece.base
                patches[number] = (
                    positions.to(torch.int32), new[low:high], None if old is None else old[low:high]
                )  # fmt: skip
    nbytes = sum(positions.nbytes + bits.nbytes for positions, bits, _ in patches.values())
    return Changes(slot, base, tuple(counts), patches, nbytes, _digest_change(plan.tensors, merged))


def _digest_change(metas: Sequence[ParamMeta], merged: Mapping[int, Told]) -> int | None:
    """What the digest changes by; None where old bits are missing. Small changes are hashed many tensors at a time."""
    shifts: list[int] = []
    small: dict[int, list[tuple[int, Tensor, Tensor, Tensor]]] = {}
    for tensor, (flat, new, old) in merged.items():
        if old is None:
            return None
        tensor_key = key(metas[tensor])
        if flat.numel() > _SMALL or flat.device.type != "cpu":
            shifts += [digest_sum(tensor_key, flat, new), -digest_sum(tensor_key, flat, old)]
        else:
            small.setdefault(new.itemsize, []).append((tensor_key, flat, new, old))
    for alike in small.values():
        for start in range(0, len(alike), _TOGETHER):
            keys, flats, news, olds = zip(*alike[start : start + _TOGETHER], strict=True)
            sizes, flat = [one.numel() for one in flats], torch.cat(flats)
            shifts += [
                digest_mixed(keys, sizes, flat, torch.cat(news)), -digest_mixed(keys, sizes, flat, torch.cat(olds))
            ]  # fmt: skip
    return combine(shifts)


def _merge(several: Sequence[Told]) -> Told:
    if len(several) == 1:
        flat, new, old = several[0]
    else:
        flat, new = (torch.cat([one[column] for one in several]) for column in (0, 1))  # type: ignore[misc]
        known = [one[2] for one in several if one[2] is not None]
        old = torch.cat(known) if len(known) == len(several) else None
    if flat.numel() > 1 and not bool((flat[1:] > flat[:-1]).all()):
        flat, order = flat.sort()
        new, old = new[order], None if old is None else old[order]
    return flat, new, old


def _window(flat: Tensor, piece: Piece, meta: ParamMeta) -> tuple[int, int]:
    """Where the ascending positions ``flat`` of a whole tensor enter and leave the piece."""
    if piece.count == meta.numel:
        return 0, flat.numel()
    low, high = torch.searchsorted(flat, torch.tensor([piece.base, piece.base + piece.count])).tolist()
    return low, high
