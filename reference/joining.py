"""What the sender makes of a gather: every rank's part of a group, joined in canonical order and ready to
cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weightsync.reference.buckets import Range, RangeSpec
from weightsync.reference.encoding import Encoding, element_bytes, padded, read_section
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.pieces import Piece
from weightsync.reference.plan import GatherGroup, TransferPlan


@dataclass(frozen=True, eq=False, slots=True)
class Contents:
    """What travels of one piece.

    Attributes:
        positions: int32 (n,) ascending, relative to the piece's base; None when all its elements travel.
        bits: integer view (n,) of the values, in the value form that the group names for the piece.
    """

    positions: Tensor | None
    bits: Tensor


@dataclass(frozen=True, eq=False)
class Joined:
    """What is to be sent of one gather group, in canonical order: of every rank, or as much as a route takes.

    Attributes:
        tensors: what the pieces' tensor numbers mean: checkpoint tensors, or slices of them.
        group: the gather group.
        pieces: the windows, in wire order, one per piece of the group.
        contents: what travels of each.
    """

    tensors: tuple[ParamMeta, ...]
    group: GatherGroup
    pieces: tuple[Piece, ...]
    contents: tuple[Contents, ...]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Elements per piece of the group."""
        return tuple(one.bits.numel() for one in self.contents)

    @property
    def nnz(self) -> int:
        """Elements in all."""
        return sum(self.counts)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of positions and values."""
        tensors = (each for one in self.contents for each in (one.positions, one.bits))
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def cut(self, spec: RangeSpec) -> Range:
        """The elements of one range, as views."""
        for number in self._by_tensor.get(spec.tensor, ()):
            piece, one = self.pieces[number], self.contents[number]
            if piece.base <= spec.base < piece.base + piece.count:
                first = spec.first if one.positions is not None else spec.base - piece.base
                taken = slice(first, first + spec.count)
                return Range(spec, None if one.positions is None else one.positions[taken], one.bits[taken])
        raise PlanMismatch(f"{spec} is in no piece of the gathered group; encode the group that was gathered")

    @cached_property
    def _by_tensor(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for number, piece in enumerate(self.pieces):
            found.setdefault(piece.tensor, []).append(number)
        return found


def join_parts(
    plan: TransferPlan, group: GatherGroup, parts: Sequence[Tensor], matrix: Sequence[Sequence[int]]
) -> Joined:
    """Every rank's part (uint8) joined; ``matrix`` is [rank][piece], the exchanged counts.

    Raises:
        PlanMismatch: a part has another size than the plan says, or two ranks tell one position.
    """
    if len(parts) != len(plan.maps) or len(matrix) != len(plan.maps):
        raise PlanMismatch(
            f"{len(parts)} parts and {len(matrix)} rows of counts were gathered, expected {len(plan.maps)}, "
            "one per trainer rank; gather over all of them"
        )
    for rank, part in enumerate(parts):
        expected = plan.part_bytes(group, rank, matrix[rank])
        if part.dtype != torch.uint8 or part.numel() != expected:
            raise PlanMismatch(
                f"part of trainer rank {rank} has {part.numel()} elements of {part.dtype}, expected "
                f"{expected} bytes of torch.uint8; exchange the counts of this update"
            )
    offsets = [0] * len(parts)
    contents: list[Contents] = []
    for number, dense in zip(group.pieces, group.dense, strict=True):
        if dense:
            contents.append(Contents(None, _join_dense(plan, number, parts, offsets)))
        else:
            contents.append(_join_sparse(plan, number, parts, offsets, [row[number] for row in matrix]))
    pieces = tuple(plan.pieces[number] for number in group.pieces)
    return Joined(plan.tensors, group, pieces, tuple(contents))


def _join_dense(plan: TransferPlan, number: int, parts: Sequence[Tensor], offsets: list[int]) -> Tensor:
    piece = plan.pieces[number]
    dtype = plan.tensors[piece.tensor].dtype
    whole = int_view(torch.empty(piece.count, dtype=dtype))
    for rank, part in enumerate(parts):
        for rows in plan.owned_rows(rank, number):
            start, size = offsets[rank], rows.numel * dtype.itemsize
            _, bits = read_section(part[start : start + size], Encoding.DENSE, rows.numel, dtype)
            rows.place(whole, bits.view(-1, rows.width))
            offsets[rank] += size
        offsets[rank] = padded(offsets[rank])
    return whole


def _join_sparse(
    plan: TransferPlan, number: int, parts: Sequence[Tensor], offsets: list[int], counts: Sequence[int]
) -> Contents:
    meta = plan.tensors[plan.pieces[number].tensor]
    all_positions: list[Tensor] = []
    all_bits: list[Tensor] = []
    for rank, part in enumerate(parts):
        start = offsets[rank]
        size = counts[rank] * element_bytes(Encoding.INT32, meta.itemsize)
        positions, bits = read_section(part[start : start + size], Encoding.INT32, counts[rank], meta.dtype)
        offsets[rank] = padded(start + size)
        if positions is not None and counts[rank]:
            all_positions.append(positions)
            all_bits.append(bits)
    positions, bits = torch.cat(all_positions), torch.cat(all_bits)
    if not _ascending(positions):
        positions, order = positions.sort()
        bits = bits[order]
        if not _ascending(positions):
            twice = int(positions[:-1][positions[1:] == positions[:-1]][0])
            raise PlanMismatch(
                f"element {twice} of tensor {meta.name!r} is told by two trainer ranks, expected one; "
                "correct the layout table or the attributes"
            )
    return Contents(positions, bits)


def _ascending(positions: Tensor) -> bool:
    return bool((positions[1:] > positions[:-1]).all())
