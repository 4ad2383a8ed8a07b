"""Sparse patches, and in-place writes that can be undone.

Everything works on integer views: a NaN equals itself, and 0.0 to -0.0 is a change. Positions are flat in the
row-major order of a tensor's shape, whatever its strides.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from weightsync.reference.detect import Detector
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.steps import Step, Touched, run

_CELLS_AT_ONCE = 1 << 14


@dataclass(frozen=True, eq=False, slots=True)
class SparsePatch:
    """New values for some elements of one tensor.

    Attributes:
        meta: the tensor, in checkpoint coordinates.
        positions: strictly ascending flat positions (n,), int32, or int64 from 2**31 elements on.
        values: the new values (n,), of the tensor's own dtype.
    """

    meta: ParamMeta
    positions: Tensor
    values: Tensor

    @property
    def nnz(self) -> int:
        """Number of elements the patch names."""
        return self.positions.numel()


def diff(meta: ParamMeta, new: Tensor, old: Tensor, detector: Detector | None = None) -> SparsePatch:
    """The patch that turns ``old`` into ``new``, both of ``meta``'s dtype and shape; nothing is advanced.

    ``detector`` lends its threads; without one the caller's thread compares alone.

    Raises:
        PatchMismatch: a tensor has another dtype or shape. A cast belongs before the diff: in fp32 more
            elements differ than in the bf16 that travels.
    """
    for given in (new, old):
        if given.dtype != meta.dtype or tuple(given.shape) != meta.shape:
            raise PatchMismatch(
                f"tensor {meta.name!r} came to the diff as {given.dtype} {list(given.shape)}, expected "
                f"{meta.dtype} {list(meta.shape)}; cast it once, before the diff and before its metadata is "
                "written"
            )
    found = (detector or Detector()).find(new, old, old_bits=False)
    return SparsePatch(meta, found.positions, found.new.view(meta.dtype))


def check_positions(name: str, numel: int, positions: Tensor, *, base: int = 0, after: int = -1) -> None:
    """Refuse positions that are out of bounds, repeated or out of order.

    Args:
        name: the tensor's name, for the error.
        numel: its number of elements.
        positions: integer tensor (n,), relative to ``base``.
        base: flat position that they count from.
        after: the last position, from the tensor's start, that an earlier piece of the update named.

    Raises:
        PatchMismatch: naming the tensor and the first bad position.
    """
    if positions.numel() == 0:
        return
    flat = positions.cpu().numpy()
    ascending = bool((flat[1:] > flat[:-1]).all())
    if ascending and flat[0] >= 0 and int(flat[0]) + base > after and int(flat[-1]) + base < numel:
        return
    flat = flat.astype(np.int64)
    outside = np.flatnonzero((flat < 0) | (flat >= numel - base))
    if outside.size:
        raise PatchMismatch(
            f"patch for {name!r} names position {flat[outside[0]] + base}, expected {base} to {numel - 1}; "
            "compare the tensor's shape on both sides"
        )
    flat += base
    previous = np.concatenate(([after], flat[:-1]))
    first = int(np.flatnonzero(flat <= previous)[0])
    raise PatchMismatch(
        f"patch for {name!r} names position {flat[first]} after position {previous[first]}, expected "
        "strictly ascending positions; sort them and name each element once"
    )


def check_patch(patch: SparsePatch, expected: ParamMeta) -> None:
    """Refuse a patch that does not fit the tensor it is meant for, before anything is written.

    Raises:
        PatchMismatch: name, dtype, shape, lengths, bounds or order do not fit.
    """
    name = expected.name
    if patch.meta != expected:
        raise PatchMismatch(
            f"patch is for {patch.meta.name!r} {patch.meta.dtype} {list(patch.meta.shape)}, expected "
            f"{name!r} {expected.dtype} {list(expected.shape)}; compare the plans of both sides"
        )
    if patch.values.dtype != expected.dtype:
        raise PatchMismatch(
            f"patch for {name!r} carries {patch.values.dtype} values, expected {expected.dtype}; "
            "cast before the diff"
        )
    if patch.positions.dtype not in (torch.int32, torch.int64):
        raise PatchMismatch(
            f"patch for {name!r} carries {patch.positions.dtype} positions, expected int32 or int64; "
            "convert them"
        )
    if patch.positions.ndim != 1 or patch.values.shape != patch.positions.shape:
        raise PatchMismatch(
            f"patch for {name!r} carries positions {list(patch.positions.shape)} and values "
            f"{list(patch.values.shape)}, expected two flat tensors of one length; send one value per "
            "position"
        )
    check_positions(name, expected.numel, patch.positions)


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """A tensor's bits, read and written in place by flat position or by row, whatever its strides.

    Attributes:
        bits: integer view of the tensor; shares its memory.
        width: elements that one index stands for: 1, or those of a row.
        lines: the same memory as (n, width), or (n,) for width 1; None when the strides forbid it.
    """

    bits: Tensor
    width: int
    lines: Tensor | None

    @classmethod
    def of(cls, tensor: Tensor, width: int = 1) -> Cells:
        """The tensor as cells of ``width`` elements, in row-major order of its shape."""
        bits = tensor.detach().view(int_view(tensor.new_empty(0)).dtype)
        if not bits.is_contiguous():
            return cls(bits, width, None)
        return cls(bits, width, bits.view(-1) if width == 1 else bits.view(-1, width))

    def read(self, index: Tensor) -> Tensor:
        """A new tensor, (n,) or (n, width), with the bits at ``index`` (int64 (n,))."""
        if self.lines is not None:
            return self.lines.index_select(0, index)
        return self.bits[self._unravel(index)]

    def write(self, index: Tensor, values: Tensor) -> None:
        """Overwrite the bits at ``index`` (int64 (n,), checked by the caller) with ``values``."""
        if self.lines is not None:
            self.lines.index_copy_(0, index, values)
        else:
            self.bits[self._unravel(index)] = values

    def _unravel(self, index: Tensor) -> tuple[Tensor, ...]:
        if self.width != 1:
            index = index[:, None] * self.width + torch.arange(self.width, device=index.device)
        return torch.unravel_index(index, self.bits.shape)


@dataclass(eq=False, slots=True)
class UndoLog:
    """The old bits of everything that an update overwrote, in the order in which it did.

    ``undo`` may be repeated, also after it was abandoned half-way: the log stays until ``clear``.
    """

    entries: list[tuple[Cells, Tensor, Tensor]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes that the log holds: old bits and int64 indices."""
        return sum(index.nbytes + old.nbytes for _, index, old in self.entries)

    def record(self, cells: Cells, index: Tensor) -> None:
        """Keep the bits at ``index``; to be called before they are overwritten."""
        if index.numel():
            self.entries.append((cells, index, cells.read(index)))

    def overwrite(self, cells: Cells, index: Tensor, values: Tensor) -> Tensor:
        """Overwrite the bits at ``index``, each kept before it is; returns the old bits, in the log's memory.

        Block by block, so that what was read is still in the cache when it is written.
        """
        old = torch.empty_like(values)
        at_once = max(1, _CELLS_AT_ONCE // cells.width)
        for start in range(0, index.numel(), at_once):
            block = slice(start, start + at_once)
            old[block] = cells.read(index[block])
            self.entries.append((cells, index[block], old[block]))
            cells.write(index[block], values[block])
        return old

    def steps(self) -> Step[int]:
        """Write the old bits back, last entry first, pausing half-way; returns the number of elements
        written.
        """
        written, half = 0, len(self.entries) // 2
        for cells, index, old in reversed(self.entries[half:]):
            cells.write(index, old)
            written += old.nbytes
        yield Touched(sum(old.nbytes for _, _, old in self.entries), writes=("weights",))
        for cells, index, old in reversed(self.entries[:half]):
            cells.write(index, old)
            written += old.nbytes
        return written

    def undo(self) -> int:
        """Write the old bits back without pausing; returns the bytes written."""
        return run(self.steps())

    def clear(self) -> None:
        """Forget everything: what was overwritten stays overwritten."""
        self.entries.clear()


def apply(patch: SparsePatch, target: Tensor, log: UndoLog | None = None) -> int:
    """Write one patch into ``target`` in place, O(changed); returns the number of elements written.

    The old bits go to ``log`` first, when there is one.

    Raises:
        PatchMismatch: the patch does not fit; ``target`` is untouched.
    """
    check_patch(patch, ParamMeta.of(patch.meta.name, target))
    cells, positions = Cells.of(target), patch.positions.to(torch.int64)
    if log is None:
        cells.write(positions, int_view(patch.values))
    else:
        log.overwrite(cells, positions, int_view(patch.values))
    return patch.nnz
