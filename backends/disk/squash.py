"""A chain of versions as one set of changes to some weights: the newest value of each element wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from weightsync.backends.disk.opened import Opened
from weightsync.reference.detect import changed
from weightsync.reference.digest import digest_sum, key, tensor_digest, wrap
from weightsync.reference.errors import PatchMismatch, PlanMismatch
from weightsync.reference.params import ParamMeta
from weightsync.reference.protocol import FULL


class Weights(Protocol):
    """What changes are made to: a checkpoint folder, or live tensors."""

    @property
    def metas(self) -> Mapping[str, ParamMeta]:
        """Name -> metadata of every tensor."""

    def read(self, name: str, positions: NDArray[Any] | None = None) -> NDArray[Any]:
        """Unsigned bits at flat positions (n,), or of the whole tensor (numel,)."""


@dataclass(frozen=True, eq=False, slots=True)
class Change:
    """What becomes of one tensor.

    Attributes:
        meta: the tensor.
        positions: int64 (n,) ascending; None when every element is named.
        old: unsigned bits (n,) that are there now.
        new: unsigned bits (n,) that come there.
    """

    meta: ParamMeta
    positions: NDArray[Any] | None
    old: NDArray[Any]
    new: NDArray[Any]

    @property
    def digest_change(self) -> int:
        """What applying it adds to the state's digest."""
        if self.positions is None:
            return wrap(_whole(self.meta, self.new) - _whole(self.meta, self.old))
        at, tensor_key = torch.from_numpy(self.positions), key(self.meta)
        return wrap(
            digest_sum(tensor_key, at, signed(self.new)) - digest_sum(tensor_key, at, signed(self.old))
        )


def squash(chain: Sequence[Opened], weights: Weights) -> Iterator[Change]:
    """Changes that lead ``weights`` along ``chain``, tensor by tensor in the order of their names.

    Nothing is written. Elements that end as they were are left out.

    Raises:
        PatchMismatch: a section is damaged, or names a tensor that the weights lack.
        PlanMismatch: a tensor has another dtype or shape here than there, or a full version lacks one.
    """
    metas = weights.metas
    if chain and chain[0].index.kind == FULL and set(chain[0].sections) != set(metas):
        odd = sorted(set(chain[0].sections) ^ set(metas))[0]
        raise PlanMismatch(f"tensor {odd!r} is on one side only; pull into a checkpoint of the same model")
    for name in sorted({name for one in chain for name in one.sections}):
        if name not in metas:
            raise PatchMismatch(f"tensor {name!r} is to be changed, but is not here; compare the two models")
        for one in chain:
            if name in one.sections and one.sections[name].meta != metas[name]:
                theirs = one.sections[name].meta
                raise PlanMismatch(
                    f"tensor {name!r} is {theirs.dtype} {list(theirs.shape)} in version {one.index.version} and "
                    f"{metas[name].dtype} {list(metas[name].shape)} here; pull into a checkpoint of the same model"
                )
        parts = [one for one in chain if name in one.sections]
        change = (_from_full if parts[0].index.kind == FULL else _from_deltas)(metas[name], parts, weights)
        if change is not None:
            yield change


def signed(bits: NDArray[Any]) -> torch.Tensor:
    """Unsigned bits as the integer tensor that ``int_view`` would give; shares memory."""
    wanted = np.uint8 if bits.itemsize == 1 else np.dtype(f"i{bits.itemsize}")
    return torch.from_numpy(np.require(bits.view(wanted), requirements=["C", "W"]))


def _from_deltas(meta: ParamMeta, parts: Sequence[Opened], weights: Weights) -> Change | None:
    positions, new = np.empty(0, np.int64), np.empty(0, np.dtype(f"u{meta.itemsize}"))
    for one in parts:
        sparse = one.sparse(meta.name)
        at = sparse.positions
        base = weights.read(meta.name, at)
        if positions.size:
            places = np.minimum(np.searchsorted(positions, at), positions.size - 1)
            known = positions[places] == at
            base[known] = new[places[known]]
        values = sparse.values(base)
        if positions.size:
            both = np.concatenate([positions, at])
            order = np.argsort(both, kind="stable")
            last = np.append(np.diff(both[order]) != 0, True)
            positions, new = both[order][last], np.concatenate([new, values])[order][last]
        else:
            positions, new = at, values
    old = weights.read(meta.name, positions)
    if len(parts) > 1:
        differ = old != new
        positions, old, new = positions[differ], old[differ], new[differ]
    return Change(meta, positions, old, new) if positions.size else None


def _from_full(meta: ParamMeta, parts: Sequence[Opened], weights: Weights) -> Change | None:
    new = parts[0].bits(meta.name).copy()
    for one in parts[1:]:
        sparse = one.sparse(meta.name)
        new[sparse.positions] = sparse.values(new[sparse.positions])
    return change_to(meta, weights.read(meta.name), new)


def change_to(meta: ParamMeta, old: NDArray[Any], new: NDArray[Any]) -> Change | None:
    """What leads a tensor from ``old`` to ``new``, unsigned bits (numel,) each; None when they are equal."""
    positions = changed(signed(new), signed(old)).numpy()
    if 2 * positions.size > meta.numel:
        return Change(meta, None, old, new)
    return Change(meta, positions, old[positions], new[positions]) if positions.size else None


def _whole(meta: ParamMeta, bits: NDArray[Any]) -> int:
    return tensor_digest(meta, signed(bits))
