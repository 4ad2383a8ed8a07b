"""Bitwise change detection: where two tensors differ, and the bits that each has there.

On the host, eight bytes are compared at a time, block by block, and only the words that differ are looked into, so
that no scratch grows with the tensor and what is looked into is still in the cache. Other devices take the plain way.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import int_view

WIDE = 1 << 31
"""From this many elements on, a tensor's positions do not fit int32."""

BLOCK_ELEMENTS = 1 << 20
"""Elements that are compared at a time; scratch is about one byte for each."""

_REFINED = 1 << 15  # words or groups looked into at a time: their scratch stays in the cache
_DENSE = (
    0.005  # from this share of changed elements on, comparing elements costs less than looking into words
)
_CROWDED = 0.05  # from this share on, most groups of eight have a change, and looking for them is in vain
_STRIDED_ELEMENTS = 1 << 20  # of a tensor that is not contiguous, so many are copied at a time
_SHARED_WORDS = 1 << 18  # a share of fewer words is not worth a thread
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}

Integers = NDArray[Any]


@dataclass(frozen=True, eq=False, slots=True)
class Differing:
    """Where two tensors differ; new memory.

    Attributes:
        positions: flat, row-major, ascending (n,), int32, or int64 from 2**31 elements on.
        new: the new bits there (n,), an integer dtype of the tensor's itemsize.
        old: the old bits there (n,), or None where nobody asked for them or knows them.
    """

    positions: Tensor
    new: Tensor
    old: Tensor | None


class Detector:
    """Compares tensors with a fixed number of threads, made at the first need and kept until ``close``.

    Args:
        threads: threads on the host; with 1 there are none beside the caller's.

    Raises:
        ValueError: fewer than one thread.
    """

    def __init__(self, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"a detector with {threads} threads compares nothing; give 1 or more")
        self.threads = threads
        self._pool: ThreadPoolExecutor | None = None

    def __enter__(self) -> Detector:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; repeatable. A later ``find`` starts new ones."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def find(self, new: Tensor, old: Tensor, *, old_bits: bool = True) -> Differing:
        """Where two tensors of one dtype and shape differ in any bit, and what each has there.

        Args:
            new: of any strides; only read.
            old: likewise.
            old_bits: False leaves the old bits out.

        Raises:
            PatchMismatch: the dtypes or shapes differ.
        """
        require_alike(new, old)
        if new.device.type != "cpu" or old.device.type != "cpu":
            return _plain(new, old, old_bits)
        kind = np.int64 if new.numel() >= WIDE else np.int32
        found: list[tuple[Integers, ...]] = []
        for start, left, right in _contiguous(new, old):
            found += self._flat(int_view(left).numpy(), int_view(right).numpy(), start, kind, old_bits)
        if not found:
            none = int_view(new.new_empty(0))
            return Differing(torch.from_numpy(np.empty(0, kind)), none, none.clone() if old_bits else None)
        if len(found) == 1:
            columns = [torch.from_numpy(column) for column in found[0]]
        else:
            columns = [torch.from_numpy(np.concatenate(column)) for column in zip(*found, strict=True)]
        return Differing(columns[0], columns[1], columns[2] if old_bits else None)

    def _flat(
        self, new: Integers, old: Integers, start: int, kind: type[np.integer[Any]], old_bits: bool
    ) -> list[tuple[Integers, ...]]:
        words = new.nbytes // 8
        shares = min(self.threads, words // _SHARED_WORDS)
        if shares < 2:
            return _scan(new, old, start, kind, old_bits)
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, "weightsync-detect")
        lanes = 8 // new.itemsize
        cuts = [words * share // shares * lanes for share in range(shares)] + [new.size]
        spans = [slice(low, high) for low, high in pairwise(cuts)]
        others = [
            self._pool.submit(_scan, new[span], old[span], start + span.start, kind, old_bits)
            for span in spans[1:]
        ]
        found = _scan(new[spans[0]], old[spans[0]], start, kind, old_bits)
        for other in others:
            found += other.result()
        return found


def changed(new: Tensor, old: Tensor) -> Tensor:
    """Flat positions, int64 (n,) ascending, at which two tensors of one dtype and shape differ in any bit.

    Equal to ``changed_plain``.
    """
    return Detector().find(new, old, old_bits=False).positions.to(torch.int64)


def changed_plain(new: Tensor, old: Tensor) -> Tensor:
    """The same positions by the obvious comparison of integer views: the oracle of ``changed``."""
    require_alike(new, old)
    return torch.nonzero(int_view(new) != int_view(old)).reshape(-1)


def require_alike(new: Tensor, old: Tensor) -> None:
    """Raise PatchMismatch unless both tensors are of one dtype and shape."""
    if new.dtype != old.dtype or new.shape != old.shape:
        raise PatchMismatch(
            f"tensors to compare are {new.dtype} {list(new.shape)} and {old.dtype} {list(old.shape)}, "
            "expected one dtype and shape; cast before the diff"
        )


def _plain(new: Tensor, old: Tensor, old_bits: bool) -> Differing:
    at = changed_plain(new, old)
    kept = int_view(old)[at] if old_bits else None
    return Differing(at.to(torch.int64 if new.numel() >= WIDE else torch.int32), int_view(new)[at], kept)


def _contiguous(new: Tensor, old: Tensor, start: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Both tensors in row-major runs of which ``int_view`` copies little, each with its first position."""
    if new.numel() <= _STRIDED_ELEMENTS or (new.is_contiguous() and old.is_contiguous()):
        yield start, new, old
        return
    row = new[0].numel()
    rows = max(1, _STRIDED_ELEMENTS // row)
    for top in range(0, new.shape[0], rows):
        if rows > 1:
            yield start + top * row, new[top : top + rows], old[top : top + rows]
        else:
            yield from _contiguous(new[top], old[top], start + top * row)


def _scan(
    new: Integers, old: Integers, start: int, kind: type[np.integer[Any]], old_bits: bool
) -> list[tuple[Integers, ...]]:
    """Positions plus ``start``, new bits and old bits of what differs in two flat arrays, in order."""
    words = new.nbytes // 8
    whole = words * (8 // new.itemsize)
    block = Block(new.dtype, min(whole, BLOCK_ELEMENTS))
    found: list[tuple[Integers, ...]] = []
    for first in range(0, whole, BLOCK_ELEMENTS):
        a, b = (
            new[first : min(whole, first + BLOCK_ELEMENTS)],
            old[first : min(whole, first + BLOCK_ELEMENTS)],
        )
        for at in block.positions(a, b):
            if at.size:
                placed = np.empty(at.size, kind)
                np.add(at, first + start, out=placed, casting="unsafe")
                found.append((placed, a.take(at), *((b.take(at),) if old_bits else ())))
    tail = (new[whole:] != old[whole:]).nonzero()[0] + whole
    if tail.size:
        found.append(((tail + start).astype(kind), new[tail], *((old[tail],) if old_bits else ())))
    return found


class Block:
    """Scratch for blocks of up to ``size`` elements, and the way that the density of the last block suggests.

    Args:
        dtype: the integer dtype of the elements.
        size: a multiple of the elements in eight bytes.
    """

    def __init__(self, dtype: np.dtype[Any], size: int) -> None:
        self.dtype = dtype
        self.lanes = 8 // dtype.itemsize
        self.dense = False
        spare = size // 8 + 8
        self._mask = np.empty(size + spare, np.bool_)
        self._groups = np.empty(size // 8 + spare, np.bool_)

    def positions(self, a: Integers, b: Integers) -> Iterator[Integers]:
        """Positions at which two flat blocks differ, ascending, int64, in one run or several."""
        if self.lanes > 1 and not self.dense:
            count = 0
            for at in self._by_word(a, b):
                count += at.size
                yield at
            self.dense = count > _DENSE * a.size
            return
        mask = self._mask[: a.size]
        np.not_equal(a, b, out=mask)
        self._mask[a.size :] = True
        count = int(np.count_nonzero(mask))
        self.dense = count > _DENSE * a.size
        if a.size % 8 or count > _CROWDED * a.size:
            yield _nonzero(self._mask, a.size)
        else:
            yield from self._by_group(mask.view(np.uint64))

    def _by_word(self, a: Integers, b: Integers) -> Iterator[Integers]:
        """Compare eight bytes at a time, then look into the words that differ."""
        left, right = a.view(np.uint64), b.view(np.uint64)
        mask = self._mask[: left.size]
        np.not_equal(left, right, out=mask)
        where = mask.nonzero()[0]
        for cut in range(0, where.size, _REFINED):
            at = where[cut : cut + _REFINED]
            differing = left.take(at)
            differing ^= right.take(at)
            yield _spread(at, differing.view(_UNSIGNED[self.dtype.itemsize]) != 0, self.lanes)

    def _by_group(self, mask: Integers) -> Iterator[Integers]:
        """Find the groups of eight elements with a change among them, then look into those."""
        groups = self._groups[: mask.size]
        np.not_equal(mask, 0, out=groups)
        self._groups[mask.size :] = True
        where = _nonzero(self._groups, mask.size)
        for cut in range(0, where.size, _REFINED):
            at = where[cut : cut + _REFINED]
            yield _spread(at, mask.take(at).view(np.bool_), 8)


def _spread(at: Integers, flags: Integers, lanes: int) -> Integers:
    """Positions of the set ``flags`` (n * lanes,) of groups ``at`` (n,), each of ``lanes`` elements."""
    which = flags.nonzero()[0]
    shift = lanes.bit_length() - 1
    positions = at.take(which >> shift)
    positions <<= shift
    which &= lanes - 1
    positions += which
    return positions


def _nonzero(flags: Integers, size: int) -> Integers:
    """Where the first ``size`` flags are set; what stands behind them is set, for an eighth of ``size`` at least.

    numpy looks for the next set flag where up to one in ten is, and branches wrongly at each; where more are, it
    takes each flag without a branch. Some set flags more bring it there.
    """
    count = int(np.count_nonzero(flags[:size]))
    if not size // 20 < count <= size // 10:
        return flags[:size].nonzero()[0]
    spare = size // 8 + 1
    return flags[: size + spare].nonzero()[0][:count]
