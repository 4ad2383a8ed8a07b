"""TransferPlan: what an update moves, in which order and in which cuts. Pure data and pure functions.

It is made of metadata alone and is equal on every rank. The cuts of a sparse update are a function of the
counts that all ranks exchanged; nothing here waits, and nothing reads a weight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from weightsync.reference.buckets import END_BYTES, BucketSpec, RangeSpec
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.grouping import Columns, GatherGroup, Numbers, gather_groups, part_sizes
from weightsync.reference.holdings import fingerprint
from weightsync.reference.params import ParamMeta
from weightsync.reference.pieces import Feeds, OwnedRows, Piece, cut_pieces, feeds_of, owned_rows, told
from weightsync.reference.rowmap import RowMap
from weightsync.reference.wire.forms import ALL_FORMS, Form, Packing
from weightsync.reference.wire.policy import PLAIN_WIRE, WirePolicy

__all__ = ["BucketSpec", "GatherGroup", "OwnedRows", "Piece", "RangeSpec", "TransferPlan"]

PIECE_ELEMENTS = 1 << 31
"""From this many elements on, positions do not fit int32."""


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """The plan of every update between one trainer and its rollouts.

    ``counts`` below are changed elements per piece, over all ranks; ``None`` stands for a full update.

    Attributes:
        tensors: the checkpoint tensors in wire order; a tensor's number is its index here.
        maps: [trainer rank][parameter], the rank's map of each runtime parameter; ranks may hold different ones.
        bucket_bytes: largest bucket on the wire, header included; only a single element may exceed it.
        piece_elements: from this many elements on, a tensor is cut into pieces.
        wire: how ranges are encoded.

    Raises:
        PlanMismatch: a checkpoint element is not told exactly once, its dtype is another one on a rank, or two tensors
            have one name.
    """

    tensors: tuple[ParamMeta, ...]
    maps: tuple[tuple[RowMap, ...], ...]
    bucket_bytes: int
    piece_elements: int = PIECE_ELEMENTS
    wire: WirePolicy = PLAIN_WIRE

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise PlanMismatch(f"bucket_bytes is {self.bucket_bytes}, expected at least 1; raise it")
        twice = [name for name, n in Counter(meta.name for meta in self.tensors).items() if n > 1]
        if twice:
            raise PlanMismatch(f"tensor {twice[0]!r} is declared twice, expected one name each; rename one")
        self._check_told()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces in wire order."""
        return tuple(
            piece
            for number, meta in enumerate(self.tensors)
            for piece in cut_pieces(number, meta, self.piece_elements)
        )

    @cached_property
    def fingerprint(self) -> int:
        """Signed xxh3-64 over names, dtypes and shapes, in order; equal where both sides mean the same
        tensors.
        """
        return fingerprint(self.tensors)

    def tensor_counts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Changed elements per checkpoint tensor, from those per piece."""
        totals = [0] * len(self.tensors)
        for piece, count in zip(self.pieces, counts, strict=True):
            totals[piece.tensor] += count
        return tuple(totals)

    def groups(
        self, counts: Sequence[int] | None, *, absolute: bool = False, forms: Sequence[Form] = ALL_FORMS
    ) -> tuple[GatherGroup, ...]:
        """The gather groups of an update, in order; pieces without a change are left out.

        A piece travels dense in a full update, and where that takes no more bytes. A group is closed before
        it exceeds ``bucket_bytes``; a piece that exceeds it alone is a group of several buckets.
        ``absolute`` says that nobody knows the old bits of these changes, so that no value may be a difference;
        ``forms`` are those that every receiver knows.

        Raises:
            PlanMismatch: the encoding asked for is not among them.
        """
        if counts is None and tuple(forms) == ALL_FORMS:
            return self._full_groups
        return self._grouped(counts, absolute, forms)

    @cached_property
    def _full_groups(self) -> tuple[GatherGroup, ...]:
        return self._grouped(None, True, ALL_FORMS)

    def _grouped(
        self, counts: Sequence[int] | None, absolute: bool, forms: Sequence[Form]
    ) -> tuple[GatherGroup, ...]:
        wire = self.wire if tuple(forms) == ALL_FORMS else self.wire.knowing(forms)
        return gather_groups(self._columns, self.tensors, counts, wire, self.bucket_bytes, absolute=absolute)

    def part_bytes(self, group: GatherGroup, rank: int, rank_counts: Sequence[int]) -> int:
        """Exact bytes that trainer ``rank`` brings to the gather of ``group``.

        ``rank_counts`` are its own changed elements per piece; they play no part for dense pieces.
        """
        return self._part_sizes(group, slice(rank, rank + 1), [rank_counts])[0]

    def part_sizes(self, group: GatherGroup, matrix: Sequence[Sequence[int]]) -> list[int]:
        """``part_bytes`` of every trainer rank; ``matrix`` is [rank][piece], the exchanged counts."""
        return self._part_sizes(group, slice(None), matrix)

    def _part_sizes(self, group: GatherGroup, ranks: slice, matrix: Sequence[Sequence[int]]) -> list[int]:
        counts = np.array([[row[number] for number in group.pieces] for row in matrix], dtype=np.int64)
        sizes: list[int] = part_sizes(self._columns, self._owned[ranks], group, counts).tolist()
        return sizes

    def update_bytes(self, counts: Sequence[int] | None) -> int:
        """The most bytes on the wire of a whole update: its buckets, headers included, and the END trailer.

        Exact where every range is in a fixed form.
        """
        return END_BYTES + sum(bucket.nbytes for group in self.groups(counts) for bucket in group.buckets)

    def likely_bytes(self, counts: Sequence[int] | None, *, absolute: bool = False) -> int:
        """The same, estimated: as ``update_bytes`` where that is exact. ``absolute`` as in ``groups``."""
        groups = self.groups(counts, absolute=absolute)
        return END_BYTES + sum(bucket.likely for group in groups for bucket in group.buckets)

    def range_of(self, piece: Piece, form: Form, count: int, itemsize: int) -> RangeSpec:
        """All that travels of a piece, or of its window in a slice, as one range in ``form``."""
        positions, values, packing = form
        exact = packing is Packing.FIXED
        likely = 0 if exact else self.wire.likely_bytes(form, count, piece.count, itemsize)
        return RangeSpec(piece.tensor, positions, piece.base, count, 0, values, packing, likely)

    def owned(self, rank: int, piece: int) -> int:
        """Elements of a piece that trainer ``rank`` speaks for."""
        return int(self._owned[rank, piece])

    def owned_rows(self, rank: int, piece: int) -> tuple[OwnedRows, ...]:
        """Where trainer ``rank`` holds its elements of a piece: one entry per runtime parameter that feeds
        it.
        """
        return self._rows[rank].get(piece, ())

    @cached_property
    def _rows(self) -> tuple[dict[int, tuple[OwnedRows, ...]], ...]:
        """Per rank, the pieces that it tells something of."""
        found = []
        for feeds in self._feeds:
            rows: dict[int, tuple[OwnedRows, ...]] = {}
            for tensor, fed_by in feeds.items():
                for number in self._pieces_of[tensor]:
                    parts = [owned_rows(one, output, self.pieces[number]) for one, output in fed_by]
                    if told_rows := tuple(part for part in parts if part is not None):
                        rows[number] = told_rows
            found.append(rows)
        return tuple(found)

    @cached_property
    def _owned(self) -> Numbers:
        """(ranks, pieces), elements that each rank speaks for."""
        owned = np.zeros((len(self.maps), len(self.pieces)), dtype=np.int64)
        for row, rows in zip(owned, self._rows, strict=True):
            for number, parts in rows.items():
                row[number] = sum(one.numel for one in parts)
        return owned

    @cached_property
    def _pieces_of(self) -> list[list[int]]:
        """Per tensor, the numbers of its pieces."""
        found: list[list[int]] = [[] for _ in self.tensors]
        for number, piece in enumerate(self.pieces):
            found[piece.tensor].append(number)
        return found

    @cached_property
    def _columns(self) -> Columns:
        return Columns.of(self.pieces, self.tensors)

    @cached_property
    def _feeds(self) -> tuple[Feeds, ...]:
        """Per rank, what its maps tell."""
        return tuple(map(feeds_of, self.maps))

    def _check_told(self) -> None:
        """Tensors that are told by the same tables are checked once."""
        known: set[tuple[object, ...]] = set()
        fed_by: list[list[tuple[RowMap, int]]] = [[] for _ in self.tensors]
        for by_tensor in self._feeds:
            for number, feeds in by_tensor.items():
                fed_by[number] += feeds
        for meta, feeds in zip(self.tensors, fed_by, strict=True):
            for one, _ in feeds:
                if one.dtype != meta.dtype:
                    raise PlanMismatch(
                        f"parameter {one.name!r} tells {one.dtype} of checkpoint tensor {meta.name!r}, expected "
                        f"{meta.dtype}; correct the layout table"
                    )
            told_by = (meta.shape, *((id(one.tables), one.width, output) for one, output in feeds))
            if told_by in known:
                continue
            known.add(told_by)
            counts = [told(one, output, meta) for one, output in feeds]
            total = torch.stack(counts).sum(0) if counts else torch.zeros(1, dtype=torch.int64)
            width = meta.numel // total.numel() if total.numel() else 0
            wrong = (total != width).nonzero()
            if wrong.numel():
                row = int(wrong[0])
                raise PlanMismatch(
                    f"row {row} of checkpoint tensor {meta.name!r} has {int(total[row])} elements told by "
                    f"the trainer's ranks, expected {width}; correct the layout table or the attributes"
                )
