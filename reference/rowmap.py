"""RowMap: the table from a rank's rows to checkpoint rows, and what can be asked of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.rowtables import RowTables, by_output


def rows_and_width(shape: tuple[int, ...]) -> tuple[int, int]:
    """How many rows of how many elements a tensor of ``shape`` is; 1-D and 0-dim tensors have rows of one."""
    if len(shape) < 2:
        return math.prod(shape), 1
    return math.prod(shape[:-1]), shape[-1]


@dataclass(frozen=True, eq=False)
class RowMap:
    """Where each element of one rank's runtime parameter lives in the checkpoint. Holds no weights.

    The local tensor, row-major, is seen as R rows of ``width`` elements; each row is an interval of one row
    of one checkpoint tensor, seen as rows of ``full_widths[output]`` elements.

    Attributes:
        name: runtime parameter name.
        dtype: the dtype that travels.
        local_shape: this rank's shape of the parameter.
        outputs: numbers, in the plan, of the checkpoint tensors it feeds. Below, an *output* is an index into
            this tuple, not such a number.
        tensor: (R,) int32, the output of each local row; -1 for a row that never travels (padding).
        row: (R,) int64, the row inside that output.
        width: elements in a local row.
        full_widths: per output, elements in a full row.
        column: first column, inside the full row, of a local row.
        owned: (R,) bool, whether this rank speaks for the row, so that replicas count once; a row that never
            travels is never owned.
    """

    name: str
    dtype: torch.dtype
    local_shape: tuple[int, ...]
    outputs: tuple[int, ...]
    tensor: Tensor
    row: Tensor
    width: int
    full_widths: tuple[int, ...]
    column: int
    owned: Tensor
    tables: RowTables = field(init=False, repr=False)
    """What is asked of the tables; one object for all maps that ``moved`` made of one another."""

    def __post_init__(self) -> None:
        tables = RowTables(self.tensor, self.row, self.owned, self.full_widths, self.column, self.width)
        object.__setattr__(self, "tables", tables)

    def moved(
        self, name: str, outputs: tuple[int, ...] | None = None, dtype: torch.dtype | None = None
    ) -> RowMap:
        """The same tables for another parameter, cut alike, of other checkpoint tensors of equal shapes."""
        other = object.__new__(RowMap)
        other.__dict__.update(self.__dict__)
        other.__dict__.update(name=name, outputs=outputs or self.outputs, dtype=dtype or self.dtype)
        return other

    def to_checkpoint(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Checkpoint coordinates of flat local ``positions`` (n,) int64.

        Returns outputs (n,) int32 and flat positions in those (n,) int64, in the order of ``positions``.
        The output is -1, and the flat position 0, where the row never travels or is another rank's to tell;
        the caller drops those.
        """
        row, offset = self._divide(positions, self.width)
        output = self.tables.told[row]
        return output, (self.tables.starts[row] + offset).where(output >= 0, 0)

    def told_together(self, positions: Tensor) -> tuple[int, Tensor] | None:
        """As ``to_checkpoint``, of positions in one run of what this rank tells, or does not: the run's output, or -1,
        and the flat positions (n,) int64 there. None when they are in several runs, and for none at all.
        """
        starts, outputs, shifts = self.tables.told_runs
        if positions.numel() == 0:
            return None
        ends = torch.stack(positions.aminmax())
        first, last = (torch.searchsorted(starts, ends, right=True) - 1).tolist()
        return (int(outputs[first]), positions + shifts[first]) if first == last else None

    def to_local(self, output: int, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the checkpoint positions ``flat`` (n,) int64 this rank holds, and where.

        Returns a mask (n,) bool and the flat local positions (m,) int64 of the m held ones, in their order.
        Replicas answer too: ``owned`` plays no part here.
        """
        row, offset = self._divide(flat, self.full_widths[output])
        offset = offset - self.column
        inverse = self.tables.inverse[output]
        held = (row < len(inverse)) & (offset >= 0) & (offset < self.width)
        local = inverse[row.where(held, len(inverse) - 1)] if len(inverse) else torch.full_like(row, -1)
        held &= local >= 0
        return held, (local * self.width + offset)[held]

    def locate(self, output: int, positions: Tensor, base: int = 0) -> tuple[slice | Tensor, Tensor]:
        """As ``to_local``, of ascending positions, without a division for each.

        Args:
            output: which of the outputs they are in.
            positions: int32 or int64 (n,) strictly ascending, relative to ``base``.
            base: flat position that they count from.

        Returns what picks the held ones, a slice or int64 (m,) ascending, and the flat local positions (m,) int64.
        Each run of held elements is found by two searches; only where there are more runs than positions is it asked
        of each position.
        """
        runs = self._runs_near(output, positions, base)
        if runs is None:
            held, local = self.to_local(output, positions.to(torch.int64) + base)
            return held.nonzero().reshape(-1), local
        starts, lengths, firsts = runs
        if starts.numel() == 0:
            return slice(0, 0), torch.empty(0, dtype=torch.int64)
        ends = (starts + lengths - 1 - base).clamp_(max=int(positions[-1]))
        low = torch.searchsorted(positions, (starts - base).clamp_(min=0).to(positions.dtype))
        high = torch.searchsorted(positions, ends.to(positions.dtype), right=True)
        shifts = firsts - starts + base
        if starts.numel() == 1:
            taken = slice(int(low), int(high))
            return taken, positions[taken].to(torch.int64) + shifts
        sizes = high - low
        before = sizes.cumsum(0) - sizes
        index = torch.arange(int(sizes.sum())) + torch.repeat_interleave(low - before, sizes)
        return index, positions[index] + torch.repeat_interleave(shifts, sizes)

    def _runs_near(self, output: int, positions: Tensor, base: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """The runs that lie, at least with a part, between the first and the last position; None when they are more
        than the positions.
        """
        starts, lengths, firsts = self.tables.runs[output]
        if positions.numel() == 0:
            return starts[:0], lengths[:0], firsts[:0]
        low = int(torch.searchsorted(starts + lengths, int(positions[0]) + base, right=True))
        high = int(torch.searchsorted(starts, int(positions[-1]) + base, right=True))
        if high - low > positions.numel():
            return None
        return starts[low:high], lengths[low:high], firsts[low:high]

    def local_rows(self, output: int, owned_only: bool) -> tuple[Tensor, Tensor]:
        """The rows of one output: local rows (k,) int64 and checkpoint rows (k,) int64, sorted by the latter.

        ``local.view(R, width)[local_rows]`` is ``full.view(-1, full_width)[rows, column : column + width]``.
        """
        tables = self.tables
        return tables.owned_rows[output] if owned_only else tables.held_rows[output]

    def elements(self, output: int) -> int:
        """Elements of one output that this rank holds."""
        return self.tables.held_rows[output][0].numel() * self.width

    def owned_elements(self, output: int) -> int:
        """Elements of one output that this rank speaks for."""
        return self.tables.owned_rows[output][0].numel() * self.width

    @staticmethod
    def _divide(positions: Tensor, width: int) -> tuple[Tensor, Tensor]:
        row = positions // max(width, 1)
        return row, positions - row * width


def local_tensor(row_map: RowMap, tensors: Sequence[Tensor]) -> Tensor:
    """The runtime parameter of one rank, built from whole checkpoint tensors: new contiguous storage.

    Args:
        row_map: the rank's map.
        tensors: the checkpoint tensors in the order of ``row_map.outputs``. Rows that never travel are zero.

    Raises:
        PlanMismatch: the count, a dtype or a size does not fit the map.
    """
    if len(tensors) != len(row_map.outputs):
        raise PlanMismatch(
            f"parameter {row_map.name!r} is built from {len(row_map.outputs)} checkpoint tensors, "
            f"{len(tensors)} were given; pass them in the order of its outputs"
        )
    local = torch.zeros(row_map.local_shape, dtype=row_map.dtype)
    target = int_view(local).reshape(len(row_map.tensor), row_map.width)
    columns = slice(row_map.column, row_map.column + row_map.width)
    for output, tensor in enumerate(tensors):
        full_width = row_map.full_widths[output]
        local_rows, rows = row_map.local_rows(output, owned_only=False)
        needed = (int(rows[-1]) + 1 if len(rows) else 0) * full_width
        if tensor.dtype != row_map.dtype or tensor.numel() < needed:
            raise PlanMismatch(
                f"parameter {row_map.name!r} needs {row_map.dtype} with at least {needed} elements as its "
                f"checkpoint tensor {output}, found {tensor.dtype} {list(tensor.shape)}; pass it whole"
            )
        if row_map.width:
            target[local_rows] = int_view(tensor).reshape(-1, full_width)[rows, columns]
    return local


def export(
    maps: Sequence[Mapping[str, RowMap]], params: Sequence[Mapping[str, Tensor]], metas: Sequence[ParamMeta]
) -> dict[str, Tensor]:
    """The dense export, the oracle: every checkpoint tensor, from the rows that each rank owns.

    Args:
        maps: per rank, runtime name -> its map.
        params: per rank, runtime name -> its tensor.
        metas: the checkpoint tensors, by their number in the plan.

    Raises:
        PlanMismatch: a parameter does not fit its map, or a checkpoint element is told by no rank or by two.
    """
    full = [torch.zeros(meta.shape, dtype=meta.dtype) for meta in metas]
    told = [torch.zeros(meta.numel, dtype=torch.int32) for meta in metas]
    for by_name, tensors in zip(maps, params, strict=True):
        for name, row_map in by_name.items():
            tensor = tensors[name]
            if tuple(tensor.shape) != row_map.local_shape or tensor.dtype != row_map.dtype:
                raise PlanMismatch(
                    f"parameter {name!r} is {tensor.dtype} {list(tensor.shape)}, its map expects "
                    f"{row_map.dtype} {list(row_map.local_shape)}; "
                    "build the map from the live parameter's attributes"
                )
            output, flat = row_map.to_checkpoint(torch.arange(tensor.numel()))
            bits = int_view(tensor)
            for index, chosen in by_output(output, len(row_map.outputs)):
                number, at = row_map.outputs[index], flat[chosen]
                int_view(full[number])[at] = bits[chosen]
                told[number].index_add_(0, at, torch.ones_like(at, dtype=torch.int32))
    for meta, count in zip(metas, told, strict=True):
        if not bool((count == 1).all()):
            first = int((count != 1).nonzero()[0])
            raise PlanMismatch(
                f"element {first} of checkpoint tensor {meta.name!r} is told by {int(count[first])} ranks, "
                "expected exactly one; correct the layout table or the attributes"
            )
    return {meta.name: tensor for meta, tensor in zip(metas, full, strict=True)}
