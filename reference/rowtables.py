"""What a map's tables tell once they are sorted: made at the first question, shared by all maps of equal tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

_FEW = 8  # up to so many outputs, looking for each takes less time than sorting


@dataclass(frozen=True, eq=False)
class RowTables:
    """The tables of a ``RowMap`` without its names; a model's layers, and its experts, share one.

    Attributes: as those of ``RowMap``.
    """

    tensor: Tensor
    row: Tensor
    owned: Tensor
    full_widths: tuple[int, ...]
    column: int
    width: int

    @cached_property
    def told(self) -> Tensor:
        """Per local row: the output that this rank tells, or -1."""
        return self.tensor.where(self.owned, -1)

    @cached_property
    def starts(self) -> Tensor:
        """Per local row: flat position, in its output, of the row's first element."""
        if len(set(self.full_widths)) == 1:
            return self.row * self.full_widths[0] + self.column
        return self.row * torch.tensor(self.full_widths)[self.tensor.long()] + self.column

    @cached_property
    def side_by_side(self) -> tuple[int, int] | None:
        """The one output of a map all of whose rows are told and follow each other, and the first row; else None."""
        told, row = self.told, self.row
        if not len(row) or int(told[0]) < 0 or not bool((told == told[0]).all()):
            return None
        return (int(told[0]), int(row[0])) if bool((row[1:] == row[:-1] + 1).all()) else None

    @cached_property
    def held_rows(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Per output, the local rows (k,) int64 that feed it and their checkpoint rows, sorted by the latter."""
        return self._by_output(self.tensor)

    @cached_property
    def owned_rows(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """As ``held_rows``, of the rows that the rank speaks for."""
        return self.held_rows if bool((self.told == self.tensor).all()) else self._by_output(self.told)

    @cached_property
    def owned_outputs(self) -> tuple[int, ...]:
        """The outputs that the rank speaks for some rows of."""
        return tuple(output for output, (local, _) in enumerate(self.owned_rows) if local.numel())

    @cached_property
    def owned_ends(self) -> tuple[int, ...]:
        """Per output, one more than the last checkpoint row that the rank speaks for; 0 without any."""
        return tuple(int(rows[-1]) + 1 if rows.numel() else 0 for _, rows in self.owned_rows)

    @cached_property
    def inverse(self) -> tuple[Tensor, ...]:
        """Per output: checkpoint row -> local row, -1 where this rank does not hold it."""
        tables = []
        for local, rows in self.held_rows:
            table = torch.full((int(rows[-1]) + 1 if len(rows) else 0,), -1, dtype=torch.int64)
            table[rows] = local
            tables.append(table)
        return tuple(tables)

    @cached_property
    def runs(self) -> tuple[tuple[Tensor, Tensor, Tensor], ...]:
        """Per output, held elements that lie side by side in it and in the local tensor: per run its first flat
        position in the output, ascending, its length, and its first flat local position; int64 (runs,) each.
        """
        return tuple(map(self._runs, self.inverse, self.full_widths))

    @cached_property
    def told_runs(self) -> tuple[Tensor, Tensor, Tensor]:
        """Elements that this rank tells side by side: per run its first flat local position, ascending, its output, or
        -1 of one that it does not tell, and what leads from a local position to one in that output; (runs,) each.
        """
        opens = torch.ones_like(self.told, dtype=torch.bool)
        opens[1:] = (self.told[1:] != self.told[:-1]) | (self.starts[1:] != self.starts[:-1] + self.width)
        first = opens.nonzero().reshape(-1)
        return first * self.width, self.told[first], self.starts[first] - first * self.width

    def _runs(self, inverse: Tensor, full_width: int) -> tuple[Tensor, Tensor, Tensor]:
        rows = (inverse >= 0).nonzero().reshape(-1)
        local = inverse[rows]
        opens = torch.ones_like(rows, dtype=torch.bool)
        if self.width == full_width:
            opens[1:] = (rows[1:] != rows[:-1] + 1) | (local[1:] != local[:-1] + 1)
        first = opens.nonzero().reshape(-1)
        sizes = torch.diff(first, append=torch.tensor([rows.numel()]))
        return rows[first] * full_width + self.column, sizes * self.width, local[first] * self.width

    @cached_property
    def owned_starts(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """Per output: flat checkpoint positions (k,) int64 of the owned rows' first elements, and which local rows
        those are; None for all of them, in order.
        """
        found = []
        for (local, rows), full_width in zip(self.owned_rows, self.full_widths, strict=True):
            every = local.numel() == self.tensor.numel() and bool((local[1:] > local[:-1]).all())
            found.append((rows * full_width + self.column, None if every else local))
        return tuple(found)

    def _by_output(self, tensor: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        chosen = (tensor >= 0).nonzero().reshape(-1)
        rows, order = self.row[chosen].sort(stable=True)
        chosen = chosen[order]
        outputs, order = tensor[chosen].sort(stable=True)
        sizes = torch.bincount(outputs, minlength=len(self.full_widths)).tolist()
        return tuple(zip(torch.split(chosen[order], sizes), torch.split(rows[order], sizes), strict=True))


def by_output(output: Tensor, outputs: int) -> list[tuple[int, Tensor]]:
    """Index -> where ``output`` (n,) int32 has it, ascending (m,) int64, for each of 0 to ``outputs`` - 1 found."""
    if outputs <= _FEW:
        found = [(index, (output == index).nonzero().reshape(-1)) for index in range(outputs)]
        return [(index, chosen) for index, chosen in found if chosen.numel()]
    ordered, order = output.sort(stable=True)
    sizes = torch.bincount(ordered + 1, minlength=outputs + 1).tolist()
    return [(index, chosen) for index, chosen in enumerate(torch.split(order, sizes)[1:]) if chosen.numel()]
