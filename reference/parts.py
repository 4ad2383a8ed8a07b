"""Parts: what one trainer rank brings to the gather of a group, as bytes whose number follows from the counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from weightsync.reference.encoding import as_bytes, padded, write_section
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import int_view
from weightsync.reference.pieces import OwnedRows
from weightsync.reference.plan import GatherGroup, TransferPlan
from weightsync.reference.wire.forms import Values
from weightsync.reference.wire.values import coded


def part_jobs(
    plan: TransferPlan,
    rank: int,
    group: GatherGroup,
    counts: Sequence[int],
    patches: Mapping[int, tuple[Tensor, Tensor, Tensor | None]],
    tensors: Mapping[str, Tensor],
    rows_in: Callable[[OwnedRows], OwnedRows],
) -> tuple[Tensor, list[Callable[[], None]]]:
    """The part's memory, and what fills it: one job a section, to be done in any order.

    Args:
        plan: equal on every rank.
        rank: the rank whose part it is.
        group: the group that is gathered.
        counts: changed elements of this rank per piece.
        patches: piece number -> positions, new bits and old bits, as in ``Changes``.
        tensors: the snapshot that dense pieces are read from, by runtime name.
        rows_in: where a rank's rows are in what the snapshot kept of their parameter.

    Raises:
        PlanMismatch: a sparse piece has no patch, or one without the old bits that its value form needs.
    """
    payload = torch.zeros(plan.part_bytes(group, rank, counts), dtype=torch.uint8)
    jobs: list[Callable[[], None]] = []
    offset = 0
    for number, dense, form in zip(group.pieces, group.dense, group.forms, strict=True):
        if dense:
            for rows in plan.owned_rows(rank, number):
                size = rows.numel * plan.tensors[plan.pieces[number].tensor].itemsize
                jobs.append(_reader(rows_in(rows).read, tensors[rows.param], payload[offset : offset + size]))
                offset += size
        elif counts[number]:
            if number not in patches:
                raise PlanMismatch(
                    "changes hold no patch for a sparse piece, expected one; diff against a base"
                )
            positions, bits, old = patches[number]
            if form.values is not Values.RAW and old is None:
                raise PlanMismatch(
                    f"changes hold no old bits, expected them for {form.name}; keep a baseline with its bits, or "
                    "ask for an encoding with raw values"
                )
            size = positions.nbytes + bits.nbytes
            dtype = plan.tensors[plan.pieces[number].tensor].dtype
            code = partial(coded, form.values, bits, old, dtype)
            jobs.append(_writer(payload[offset : offset + size], positions, code))
            offset += size
        offset = padded(offset)
    return payload, jobs


def _reader(read: Callable[[Tensor], Tensor], tensor: Tensor, out: Tensor) -> Callable[[], None]:
    def job() -> None:
        out.copy_(as_bytes(read(int_view(tensor))))

    return job


def _writer(out: Tensor, positions: Tensor, code: Callable[[], Tensor]) -> Callable[[], None]:
    return lambda: write_section(out, positions, code())
