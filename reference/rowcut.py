"""Which rows and columns of a whole parameter one rank's cut is: the tables behind a RowMap."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weightsync.reference.boxes import Interval
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.rowmap import RowMap, rows_and_width

if TYPE_CHECKING:
    from weightsync.reference.layouts import Layout

Held = Sequence[tuple[Interval, bool]]
"""Intervals of one dimension in local order, each with whether the rank speaks for it."""


def cut_rows(
    layout: Layout, name: str, numbers: Mapping[str, int], held: Sequence[Held], owned: bool
) -> RowMap:
    """The map of a rank that holds ``held``, per dimension, of a whole parameter; see ``layouts.cut``.

    Columns with gaps between them, or of which the rank speaks for some, make each row several short rows of
    the largest width that divides all of them, so that a row stays one interval and has one speaker.

    Raises:
        PlanMismatch: ``numbers`` lacks a checkpoint tensor.
    """
    for meta in layout.metas:
        if meta.name not in numbers:
            raise PlanMismatch(
                f"parameter {name!r} feeds checkpoint tensor {meta.name!r}, which the plan does not name; "
                "add it to the plan or take the parameter out of the layout table"
            )
    shape, tensor, row = layout.shape, layout.tensor, layout.row
    _, width = rows_and_width(shape)
    leading, columns = (held[:-1], _merged(held[-1])) if len(shape) > 1 else (held, [((0, 1), True)])
    kept, speaks = torch.zeros((), dtype=torch.int64), torch.tensor(owned)
    for length, intervals in zip(shape, leading, strict=False):
        spans = [(torch.arange(start, end), told) for (start, end), told in intervals]
        flags = [torch.full(span.shape, told) for span, told in spans]
        kept = kept[..., None] * length + _joined([span for span, _ in spans], torch.int64)
        speaks = speaks[..., None] & _joined(flags, torch.bool)
    kept, speaks = kept.reshape(-1), speaks.reshape(-1)
    if not all(
        [interval for interval, _ in _merged(one)] == [(0, length)]
        for one, length in zip(leading, shape, strict=False)
    ):
        tensor, row = tensor[kept], row[kept]
    column, full_width = 0, width
    if len(columns) < 2:
        (column, end), told = columns[0] if columns else ((0, 0), True)
        width, speaks = end - column, speaks & told
    else:
        full_width = math.gcd(width, *(bound for interval, _ in columns for bound in interval))
        units = [
            (torch.arange(start // full_width, end // full_width), told) for (start, end), told in columns
        ]
        pieces = torch.cat([unit for unit, _ in units])
        spoken = torch.cat([torch.full(unit.shape, told) for unit, told in units])
        row = (row[:, None] * (width // full_width) + pieces).reshape(-1)
        tensor, speaks = tensor.repeat_interleave(len(pieces)), (speaks[:, None] & spoken).reshape(-1)
        width = full_width
    return RowMap(
        name=name,
        dtype=layout.metas[0].dtype,
        local_shape=tuple(sum(end - start for (start, end), _ in intervals) for intervals in held),
        outputs=tuple(numbers[meta.name] for meta in layout.metas),
        tensor=tensor,
        row=row,
        width=width,
        full_widths=(full_width,) * len(layout.metas),
        column=column,
        owned=speaks & (tensor >= 0),
    )


def _merged(held: Held) -> list[tuple[Interval, bool]]:
    """The same intervals without empty ones, each joined with the next that continues it for one speaker."""
    merged: list[tuple[Interval, bool]] = []
    for (start, end), told in held:
        if merged and merged[-1][0][1] == start and merged[-1][1] == told:
            merged[-1] = ((merged[-1][0][0], end), told)
        elif start < end:
            merged.append(((start, end), told))
    return merged


def _joined(tables: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(list(tables)).to(dtype) if tables else torch.empty(0, dtype=dtype)
