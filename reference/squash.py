"""Several version steps as one delta: the union of what changed in each, with the values of the newest version.

The positions that a step changed are the same in both directions, so a path may go back and forth between versions. The
union may name an element that ends as it began; its value is right all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.reference.changes import Patch
from weightsync.reference.params import int_view
from weightsync.reference.pieces import Feeds
from weightsync.reference.plan import TransferPlan


@dataclass(frozen=True, eq=False, slots=True)
class Trail:
    """What one rank's elements changed in one step between two versions, without their values.

    Attributes:
        positions: piece number -> positions relative to the piece's base, int32 (n,) ascending.
    """

    positions: Mapping[int, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return sum(one.nbytes for one in self.positions.values())


def squash(
    plan: TransferPlan, feeds: Feeds, tensors: Mapping[str, Tensor], trails: Sequence[Trail]
) -> dict[int, Patch]:
    """Per piece, ascending positions (int32 (n,)) that any trail names, and their bits in ``tensors``; new memory.

    The bits that a receiver holds there are not known: the third of each patch is None.

    Args:
        plan: the transfer plan.
        feeds: of the trainer rank whose trails these are.
        tensors: what ``feeds`` map, of the version that is told.
        trails: at least one, all of this rank.
    """
    patches: dict[int, Patch] = {}
    for number in sorted({number for trail in trails for number in trail.positions}):
        named = [trail.positions[number] for trail in trails if number in trail.positions]
        positions = named[0].clone() if len(named) == 1 else torch.unique(torch.cat(named))
        patches[number] = positions, _bits(plan, feeds, tensors, number, positions), None
    return patches


def _bits(
    plan: TransferPlan, feeds: Feeds, tensors: Mapping[str, Tensor], number: int, positions: Tensor
) -> Tensor:
    piece = plan.pieces[number]
    bits = int_view(torch.empty(positions.numel(), dtype=plan.tensors[piece.tensor].dtype))
    where = torch.arange(positions.numel())
    for row_map, output in feeds[piece.tensor]:
        taken, local = row_map.locate(output, positions, piece.base)
        told = row_map.tables.told[local // max(row_map.width, 1)] == output
        bits[where[taken][told]] = int_view(tensors[row_map.name])[local[told]]
    return bits
