"""A rollout rank's share of the digest, which follows every write: what an update changed is proved in O(changed).

The bits before and after a write are both read from memory, so the share tells what the weights hold, in whatever
encoding the values came. What it cannot see is a bit that changed where nothing was written: a recount reads them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weightsync.reference.delta import Cells
from weightsync.reference.digest import OwnedDigest, combine, digest_rows, key, wrap
from weightsync.reference.params import ParamMeta
from weightsync.reference.rowmap import RowMap
from weightsync.reference.rowtables import by_output
from weightsync.reference.steps import Step, Touched


@dataclass(frozen=True, eq=False)
class _Term:
    """``factor`` times the digest of the rows that a weight owns, as one map sees it."""

    row_map: RowMap
    weight: Tensor
    factor: int
    table: OwnedDigest

    def of(self) -> int:
        return self.factor * self.table.of(self.weight)


@dataclass(eq=False)
class KeptShare:
    """One rank's share of the digest, signed 64 bit.

    Args:
        metas: the plan's checkpoint tensors, by number.

    Attributes:
        value: the share of what the weights hold now; None when only a recount can tell.
    """

    metas: Sequence[ParamMeta]
    value: int | None = None
    _before: int | None = None
    _terms: list[_Term] = field(default_factory=list)
    _of_weight: dict[tuple[int, int], list[_Term]] = field(default_factory=dict)
    _apart: bool | None = None

    def count(self, row_map: RowMap, weight: Tensor, factor: int = 1) -> None:
        """Let ``weight``, seen through ``row_map``, count ``factor`` times."""
        term = _Term(row_map, weight, factor, OwnedDigest(row_map, self.metas))
        self._terms.append(term)
        self._of_weight.setdefault(_place(weight), []).append(term)
        self.value = self._before = self._apart = None

    def mark(self) -> None:
        """An update begins here; ``restore`` comes back to it."""
        self._before = self.value

    def restore(self) -> None:
        """The old bits are back where the update wrote."""
        self.value = self._before

    def forget(self) -> int | None:
        """Weights are being written: only a recount can tell the share until ``value`` is set again; what it was."""
        if self._apart is None:
            self._apart = _are_apart([term.weight for term in self._terms])
        known, self.value = self.value, None
        return known if self._apart else None

    def forget_all(self) -> None:
        """Weights are being written that no ``restore`` brings back."""
        self.value = self._before = None

    def shift(self, cells: Cells, index: Tensor, old: Tensor) -> int:
        """What the share changes by through a write of ``cells`` at ``index`` (int64 (n,)) that has just been done.

        Args:
            cells: of a weight that counts, or of one that does not.
            index: what was written.
            old: the bits that were there before, (n,) or (n, width).
        """
        terms = self._of_weight.get(_place(cells.bits), ())
        if not terms or not index.numel():
            return 0
        new = cells.read(index)
        return combine(term.factor * self._moved(term, cells.width, index, old, new) for term in terms)

    def steps(self) -> Step[int]:
        """The share, read from every weight now."""
        kept, half = self.value, len(self._terms) // 2
        shares = [term.of() for term in self._terms[:half]]
        yield Touched(sum(term.weight.nbytes for term in self._terms), reads=("weights",))
        shares += [term.of() for term in self._terms[half:]]
        self.value = combine(shares)
        if kept is not None and kept != self.value:
            self._before = None  # a bit changed beside the writes, and a rollback would not bring it back
        return self.value

    def _moved(self, term: _Term, width: int, index: Tensor, old: Tensor, new: Tensor) -> int:
        """``old`` and ``new`` of the rows or elements that the rank owns, as a difference of digests."""
        row_map, tables = term.row_map, term.row_map.tables
        if width != 1 and width != row_map.width:
            index = (index[:, None] * width + torch.arange(width, device=index.device)).reshape(-1)
            old, new, width = old.reshape(-1), new.reshape(-1), 1
        if width == 1:
            old, new = old.reshape(-1, 1), new.reshape(-1, 1)
            if (together := row_map.told_together(index)) is not None:
                number, flat = together
                return self._difference(row_map, number, old, new, flat) if number >= 0 else 0
            output, flat = row_map.to_checkpoint(index)
        else:
            output, flat = tables.told[index], tables.starts[index]
        return wrap(
            sum(
                self._difference(row_map, number, old, new, flat[chosen], chosen)
                for number, chosen in by_output(output, len(row_map.outputs))
            )
        )

    def _difference(
        self,
        row_map: RowMap,
        output: int,
        old: Tensor,
        new: Tensor,
        bases: Tensor,
        rows: Tensor | None = None,
    ) -> int:
        """What rows of one output add to the digest when ``old`` becomes ``new``; see ``digest_rows``."""
        tensor_key = key(self.metas[row_map.outputs[output]])
        return digest_rows(tensor_key, new, bases, rows) - digest_rows(tensor_key, old, bases, rows)


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel()


def _are_apart(weights: Sequence[Tensor]) -> bool:
    """True when a write to one weight changes no other; those of one place are one."""
    spans = []
    for weight in {_place(weight): weight for weight in weights if weight.numel()}.values():
        last = sum((side - 1) * stride for side, stride in zip(weight.shape, weight.stride(), strict=True))
        spans.append((weight.data_ptr(), weight.data_ptr() + (last + 1) * weight.itemsize))
    spans.sort()
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
