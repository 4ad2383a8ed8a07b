"""What a range writes into a rank's storages: from positions and bits to cells and indices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weightsync.reference.delta import Cells, UndoLog
from weightsync.reference.rowmap import RowMap


@dataclass(frozen=True, eq=False)
class Holder:
    """One storage of this rank that holds some of one checkpoint tensor.

    Attributes:
        name: runtime name.
        row_map: its map.
        output: index of the checkpoint tensor, or of the slice of it that buckets name, in the map's outputs.
        weight: the live tensor, written in place.
    """

    name: str
    row_map: RowMap
    output: int
    weight: Tensor

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """The local rows that it holds, and which checkpoint rows they are, ascending."""
        return self.row_map.local_rows(self.output, owned_only=False)


@dataclass(frozen=True, eq=False, slots=True)
class Write:
    """Bits to be written: ``values`` (n,) or (n, width) go to ``index``, int64 (n,), of ``cells``."""

    cells: Cells
    index: Tensor
    values: Tensor

    def do(self, taken: slice, log: UndoLog | None) -> Tensor | None:
        """Write the entries of ``taken``; the old bits go into ``log`` first, when there is one, and come back."""
        if log is not None:
            return log.overwrite(self.cells, self.index[taken], self.values[taken])
        self.cells.write(self.index[taken], self.values[taken])
        return None


def by_position(holder: Holder, positions: Tensor, base: int, bits: Tensor) -> Write:
    """Those of the elements at ``positions`` (n,), relative to ``base``, that ``holder`` holds."""
    held, local = holder.row_map.locate(holder.output, positions, base)
    return Write(Cells.of(holder.weight), local, bits if local.numel() == bits.numel() else bits[held])


def dense_writes(holder: Holder, base: int, bits: Tensor) -> list[Write]:
    """Elements ``base`` and on that ``holder`` holds: whole rows at once, the broken rows at both ends by position."""
    row_map = holder.row_map
    full_width = row_map.full_widths[holder.output]
    end = base + bits.numel()
    first, last = -(-base // full_width), end // full_width
    if first >= last or row_map.width == 0:
        return [by_position(holder, torch.arange(bits.numel()), base, bits)]
    head, tail = first * full_width - base, last * full_width - base
    local, rows = holder.rows
    low, high = torch.searchsorted(rows, torch.tensor([first, last])).tolist()
    columns = slice(row_map.column, row_map.column + row_map.width)
    values = bits[head:tail].view(-1, full_width)[rows[low:high] - first, columns]
    cells = Cells.of(holder.weight, row_map.width)
    writes = [Write(cells, local[low:high], values if row_map.width > 1 else values.reshape(-1))]
    for start, stop in ((0, head), (tail, bits.numel())):
        if stop > start:
            writes.append(by_position(holder, torch.arange(stop - start), base + start, bits[start:stop]))
    return writes
