"""What a rank holds of each checkpoint tensor, as a smaller tensor of its own: a slice.

The slice of a tensor is the rows held times the columns held, in checkpoint order. A position in it is
``(ordinal of the checkpoint row among the held rows) * width + (column - first column)``, which grows with the
checkpoint position: what ascends there ascends here, and what is dense there is dense here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import xxhash
from torch import Tensor

from weightsync.reference.digest import dtype_name, wrap
from weightsync.reference.params import ParamMeta
from weightsync.reference.rowmap import RowMap


@dataclass(frozen=True, eq=False)
class Cut:
    """Which elements of a checkpoint tensor are held: some rows, and the same columns of each.

    Attributes:
        rows: int64 (k,) ascending, the held rows, where the tensor is seen as rows of ``full_width`` elements.
        full_width: elements in a row of the tensor.
        column: first column held.
        width: columns held.
    """

    rows: Tensor
    full_width: int
    column: int
    width: int

    @property
    def numel(self) -> int:
        """Elements held."""
        return self.rows.numel() * self.width

    @cached_property
    def key(self) -> bytes:
        """16 bytes, equal for equal cuts."""
        head = f"{self.full_width}\0{self.column}\0{self.width}\0".encode()
        return xxhash.xxh3_128_digest(head + self.rows.contiguous().numpy().tobytes())

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor, Tensor]:
        """Held elements that lie side by side in the tensor: per run its first flat position there, its length, and
        its first position in the slice; int64 (runs,) each, ascending.
        """
        ordinals = torch.arange(self.rows.numel())
        if self.width < self.full_width:
            lengths = torch.full_like(ordinals, self.width)
            return self.rows * self.full_width + self.column, lengths, ordinals * self.width
        opens = torch.ones_like(self.rows, dtype=torch.bool)
        opens[1:] = self.rows[1:] != self.rows[:-1] + 1
        first = ordinals[opens]
        ends = torch.cat([first[1:], torch.tensor([self.rows.numel()])])
        return self.rows[opens] * self.full_width, (ends - first) * self.width, first * self.width

    def before(self, position: int) -> int:
        """Held elements before a flat position of the tensor: where it would be in the slice."""
        starts, lengths, firsts = self.intervals
        found = int(torch.searchsorted(starts, position))
        if found == 0:
            return 0
        start, length, first = (int(one[found - 1]) for one in (starts, lengths, firsts))
        return first + min(position - start, length)

    def within(self, base: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """The runs that lie, at least with a part, in ``count`` positions from ``base``: as ``intervals``."""
        starts, lengths, firsts = self.intervals
        low = int(torch.searchsorted(starts + lengths, base, right=True))
        high = int(torch.searchsorted(starts, base + count))
        return starts[low:high], lengths[low:high], firsts[low:high]

    def place(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Which of the flat positions (n,) int64 are held, mask (n,) bool, and where those are in the slice (m,)."""
        row = flat // self.full_width
        offset = flat - row * self.full_width - self.column
        ordinal = torch.searchsorted(self.rows, row)
        known = ordinal < self.rows.numel()
        held = known & (offset >= 0) & (offset < self.width)
        if self.rows.numel():
            held &= self.rows[ordinal.where(known, 0)] == row
        return held, (ordinal * self.width + offset)[held]


@dataclass(frozen=True, eq=False)
class Holding:
    """What one rank, or a set of ranks that hold the same, takes of each checkpoint tensor.

    Attributes:
        tensors: the slices, in the order of the checkpoint tensors: their names and dtypes with the slices' shapes.
            An empty slice never travels.
        cuts: which elements those are; None for a whole tensor.
    """

    tensors: tuple[ParamMeta, ...]
    cuts: tuple[Cut | None, ...]

    @classmethod
    def whole(cls, tensors: Sequence[ParamMeta]) -> Holding:
        """Everything."""
        return cls(tuple(tensors), (None,) * len(tensors))

    @classmethod
    def of(cls, tensors: Sequence[ParamMeta], maps: Iterable[RowMap]) -> Holding:
        """What a rank with these maps holds.

        Where several maps hold parts of one tensor it is the union of their rows, if they hold the same columns, and
        else the whole tensor.
        """
        feeds: list[list[tuple[RowMap, int]]] = [[] for _ in tensors]
        for one in maps:
            for output, number in enumerate(one.outputs):
                if one.width and one.tables.held_rows[output][0].numel():
                    feeds[number].append((one, output))
        known: dict[tuple[object, ...], Cut | None] = {}
        slices, cuts = [], []
        for meta, fed_by in zip(tensors, feeds, strict=True):
            same = (meta.numel, *((id(one.tables), one.width, output) for one, output in fed_by))
            if same not in known:
                known[same] = _cut(meta, fed_by)
            cuts.append(known[same])
            slices.append(_slice(meta, known[same]))
        return cls(tuple(slices), tuple(cuts))

    @property
    def is_whole(self) -> bool:
        """True when it is every element of every tensor."""
        return all(cut is None for cut in self.cuts)

    @property
    def nbytes(self) -> int:
        """Bytes of all slices."""
        return sum(meta.nbytes for meta in self.tensors)

    @cached_property
    def key(self) -> bytes:
        """16 bytes, equal where the same elements of the same tensors are held."""
        return xxhash.xxh3_128_digest(b"".join(b"\0" * 16 if one is None else one.key for one in self.cuts))

    @cached_property
    def fingerprint(self) -> int:
        """Signed 64 bits over names, dtypes, shapes and cuts: equal where both sides mean the same slices. Of a whole
        holding it is the plan's.
        """
        return fingerprint(self.tensors, b"" if self.is_whole else self.key)


class Narrowed:
    """Maps whose checkpoint tensors are the slices of a holding; those with equal tables share theirs.

    Args:
        holding: made of these maps, among others.
    """

    def __init__(self, holding: Holding) -> None:
        self._holding = holding
        self._known: dict[tuple[int, int, int], tuple[RowMap, RowMap]] = {}

    def map(self, row_map: RowMap, output: int) -> tuple[RowMap, int]:
        """The map of one output, with its slice for checkpoint tensor, and the output's index in that map."""
        cut, number = self._holding.cuts[row_map.outputs[output]], row_map.outputs[output]
        if cut is None:
            return row_map, output
        key = (id(row_map.tables), output, id(cut))
        if key not in self._known:
            self._known[key] = _narrowed(row_map, output, cut), row_map
        return self._known[key][0].moved(row_map.name, (number,), row_map.dtype), 0


def fingerprint(tensors: Iterable[ParamMeta], more: bytes = b"") -> int:
    """Signed xxh3-64 over names, dtypes and shapes, in order, and over ``more``."""
    lines = (f"{m.name}\0{dtype_name(m.dtype)}\0{','.join(map(str, m.shape))}\n" for m in tensors)
    return wrap(xxhash.xxh3_64_intdigest("".join(lines).encode() + more))


def _cut(meta: ParamMeta, feeds: Sequence[tuple[RowMap, int]]) -> Cut | None:
    if not feeds:
        return Cut(torch.zeros(0, dtype=torch.int64), 1, 0, 1) if meta.numel else None
    columns = {(one.full_widths[output], one.column, one.width) for one, output in feeds}
    if len(columns) > 1:
        return None
    rows = [one.tables.held_rows[output][1] for one, output in feeds]
    held = torch.unique(torch.cat(rows)) if len(rows) > 1 else torch.unique_consecutive(rows[0])
    cut = Cut(held, *columns.pop())
    return None if cut.numel == meta.numel else cut


def _narrowed(row_map: RowMap, output: int, cut: Cut) -> RowMap:
    mine = row_map.tensor == output
    ordinals = torch.searchsorted(cut.rows, row_map.row.where(mine, 0))
    return RowMap(
        row_map.name, row_map.dtype, row_map.local_shape, (row_map.outputs[output],),
        torch.zeros_like(row_map.tensor).where(mine, -1), ordinals.where(mine, 0), row_map.width,
        (cut.width,), 0, row_map.owned & mine,
    )  # fmt: skip


def _slice(meta: ParamMeta, cut: Cut | None) -> ParamMeta:
    if cut is None:
        return meta
    rows = cut.rows.numel()
    return replace(meta, shape=(rows,) if cut.width == 1 else (rows, cut.width))
