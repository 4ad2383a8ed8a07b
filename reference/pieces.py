"""Pieces of checkpoint tensors, and which rows of them a trainer rank speaks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta
from weightsync.reference.rowmap import RowMap, rows_and_width

Feeds: TypeAlias = Mapping[int, list[tuple[RowMap, int]]]
"""Number of a checkpoint tensor -> the maps that tell something of it, each with the tensor's output there."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A window of one checkpoint tensor whose positions, relative to its base, fit int32.

    A tensor of fewer than 2**31 elements is exactly one piece; a larger one is cut between rows.

    Attributes:
        tensor: number of the tensor in the plan.
        base: flat position of the first element.
        count: number of elements.
    """

    tensor: int
    base: int
    count: int


@dataclass(frozen=True, eq=False, slots=True)
class OwnedRows:
    """The rows of one piece that one runtime parameter of one rank tells.

    Attributes:
        param: name of the runtime parameter.
        local: int64 (k,), rows of the parameter, seen as rows of ``width`` elements.
        rows: int64 (k,) ascending, the same rows inside the piece, seen as rows of ``full_width`` elements.
        width: elements in a local row.
        full_width: elements in a row of the piece.
        column: first column, inside the piece's row, of a local row.
    """

    param: str
    local: Tensor
    rows: Tensor
    width: int
    full_width: int
    column: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.local.numel() * self.width

    def read(self, bits: Tensor) -> Tensor:
        """The rows' bits, (k, width), out of the parameter's flat integer view."""
        return bits.view(-1, self.width).index_select(0, self.local)

    def place(self, piece: Tensor, bits: Tensor) -> None:
        """Write what ``read`` gave on its rank into the flat integer view of the whole piece."""
        piece.view(-1, self.full_width)[self.rows, self.column : self.column + self.width] = bits


def feeds_of(maps: Iterable[RowMap]) -> Feeds:
    """What one rank's maps tell: no tensor of which that is nothing."""
    feeds: dict[int, list[tuple[RowMap, int]]] = {}
    for one in maps:
        for output in one.tables.owned_outputs:
            feeds.setdefault(one.outputs[output], []).append((one, output))
    return feeds


def cut_pieces(number: int, meta: ParamMeta, limit: int) -> list[Piece]:
    """The pieces, of at most ``limit`` elements each, of the tensor with this number; empty ones have one
    piece.

    Raises:
        PlanMismatch: one row alone exceeds ``limit``.
    """
    if meta.numel < limit:
        return [Piece(number, 0, meta.numel)]
    _, width = rows_and_width(meta.shape)
    step = limit // width * width
    if step == 0:
        raise PlanMismatch(
            f"tensor {meta.name!r} {list(meta.shape)} has rows of {width} elements, expected at most "
            f"{limit}; give it a shape with shorter rows"
        )
    return [Piece(number, base, min(step, meta.numel - base)) for base in range(0, meta.numel, step)]


def owned_rows(row_map: RowMap, output: int, piece: Piece) -> OwnedRows | None:
    """What the map's rank tells of a piece of the map's ``output``; None when that is nothing."""
    full_width = row_map.full_widths[output]
    if row_map.width == 0 or full_width == 0:
        return None
    local, rows = row_map.local_rows(output, owned_only=True)
    end = row_map.tables.owned_ends[output]
    if piece.base == 0 and piece.count >= end * full_width:
        return _owned(row_map, full_width, local, rows) if end else None
    first, last = piece.base // full_width, (piece.base + piece.count) // full_width
    low, high = torch.searchsorted(rows, torch.tensor([first, last])).tolist()
    if low == high:
        return None
    return _owned(row_map, full_width, local[low:high], rows[low:high] - first)


def _owned(row_map: RowMap, full_width: int, local: Tensor, rows: Tensor) -> OwnedRows:
    return OwnedRows(row_map.name, local, rows, row_map.width, full_width, row_map.column)


def told(row_map: RowMap, output: int, meta: ParamMeta) -> Tensor:
    """How many elements of each of the tensor's rows the map's rank tells: int64 (rows,)."""
    rows, width = rows_and_width(meta.shape)
    counts = torch.zeros(rows, dtype=torch.int64)
    _, found = row_map.local_rows(output, owned_only=True)
    if width and row_map.width and found.numel():
        row = (found * row_map.full_widths[output] + row_map.column) // width
        counts.index_add_(0, row, torch.full_like(row, row_map.width))
    return counts
