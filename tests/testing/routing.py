"""What a routed update must bring, told element by element: the plain way, which no fast path shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from weightsync.reference.buckets import Bucket, unpack
from weightsync.reference.holdings import Holding
from weightsync.reference.params import ParamMeta
from weightsync.reference.rowfind import Elements
from weightsync.reference.rowmap import RowMap


def held_positions(tensors: Sequence[ParamMeta], maps: Iterable[RowMap]) -> list[Tensor]:
    """Per checkpoint tensor, the flat positions int64 (n,) that a rank with these maps holds, ascending, once."""
    masks = [torch.zeros(meta.numel, dtype=torch.bool) for meta in tensors]
    for one in maps:
        elements = Elements.of(one)
        for number in one.outputs:
            masks[number][elements.flat[elements.number == number]] = True
    return [mask.nonzero().reshape(-1) for mask in masks]


def received(
    holding: Holding, held: Sequence[Tensor], buckets: Iterable[Bucket]
) -> dict[int, tuple[Tensor, Tensor]]:
    """Tensor number -> checkpoint positions (n,) and bits (n,) that buckets of a route name, in their order.

    Args:
        holding: the route's.
        held: what ``held_positions`` says of its ranks: the n-th element of a slice is the n-th held one.
        buckets: without the trailer.
    """
    found: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for bucket in buckets:
        for spec, positions, bits in unpack(bucket, holding.tensors):
            at = torch.arange(spec.count) if positions is None else positions.to(torch.int64)
            found.setdefault(spec.tensor, []).append((held[spec.tensor][at + spec.base], bits))
    return {
        number: (torch.cat([at for at, _ in parts]), torch.cat([bits for _, bits in parts]))
        for number, parts in found.items()
    }
