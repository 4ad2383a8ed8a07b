"""Pulling into tensors in memory, with an undo log; and as buckets, for the ranks of a rollout."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightsync.backends.disk.chains import cheapest_chain
from weightsync.backends.disk.index import listing
from weightsync.backends.disk.opened import Opened
from weightsync.backends.disk.squash import Change, signed, squash
from weightsync.backends.disk.store import Progress, Store, unheard
from weightsync.reference.buckets import DELTA, Bucket, Heading, Range, RangeSpec, end_bucket, pack_bucket
from weightsync.reference.delta import Cells, UndoLog
from weightsync.reference.digest import combine, state_digest, wrap
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch, StaleVersion
from weightsync.reference.params import ParamMeta, int_view


class LiveWeights:
    """Tensors in memory, of any strides, on any device; see ``Weights``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)
        self.metas = {name: ParamMeta.of(name, tensor) for name, tensor in tensors.items()}

    def read(self, name: str, positions: NDArray[Any] | None = None) -> NDArray[Any]:
        """A copy of the unsigned bits at flat positions (n,), or of the whole tensor (numel,)."""
        tensor = self.tensors[name]
        if positions is None:
            bits = int_view(tensor).cpu()
        else:
            bits = Cells.of(tensor).read(torch.from_numpy(positions).to(tensor.device)).cpu()
        return bits.numpy().view(np.dtype(f"u{bits.itemsize}")).copy()


@dataclass(eq=False, slots=True)
class LivePrepared:
    """Changes that are read, decoded and proved, in memory."""

    version: int
    digest: int
    chain: tuple[int, ...]
    changes: list[Change] = field(default_factory=list)


class LiveReader:
    """Keeps tensors in memory at versions of a store.

    Args:
        store: where versions are published.
        tensors: name -> live tensor; written in place, never replaced.
        version: the version that they hold; 0 when unknown.
        progress: told the bytes read.

    Attributes:
        version: the version that they hold.
        digest: of the state that they hold.
    """

    def __init__(
        self, store: Store, tensors: Mapping[str, Tensor], version: int = 0, progress: Progress = unheard
    ) -> None:
        self.store, self.version = store, version
        self.weights = LiveWeights(tensors)
        self.digest = self.count()
        self._log = UndoLog()
        self._undo_to: tuple[int, int] | None = None
        self._progress = progress

    def count(self) -> int:
        """Digest of every bit, read now."""
        weights = self.weights
        return state_digest((weights.metas[name], tensor) for name, tensor in weights.tensors.items())

    def prepare(self, target: int | None = None) -> LivePrepared:
        """Read ahead to ``target``, by default the newest; the tensors are only read.

        Raises:
            StaleVersion: the target is not there, or no chain leads to it.
            PatchMismatch: something read is damaged.
        """
        there = listing(self.store).indexes
        target = max(there, default=0) if target is None else target
        if target not in there or target < self.version:
            raise StaleVersion(
                f"version {target} is not published there, or is older than {self.version}; name another"
            )
        chain = cheapest_chain(there, target, self.version, self.digest)
        opened = [Opened(self.store, one, self._progress) for one in chain]
        changes = list(squash(opened, self.weights))
        after = combine([self.digest, *(one.digest_change for one in changes)])
        if after != there[target].after:
            raise PatchMismatch(
                f"the digest of version {target} would be {after} here, expected {there[target].after}; the tensors "
                f"are not version {self.version}: make a new reader without a version"
            )
        return LivePrepared(target, after, tuple(one.version for one in chain), changes)

    def apply(self, prepared: LivePrepared) -> int:
        """Write it in place, O(changed); returns the elements written. The old bits stay until ``commit``.

        Raises:
            StaleVersion: the tensors are not what it was prepared for; nothing was written.
        """
        moved = combine([self.digest, *(one.digest_change for one in prepared.changes)])
        if self._undo_to is not None or moved != prepared.digest:
            raise StaleVersion(
                f"version {prepared.version} was prepared for other tensors than these, or the last step was neither "
                "committed nor rolled back; do that, and prepare again"
            )
        self._undo_to = (self.version, self.digest)
        writes = []
        for one in prepared.changes:
            cells = Cells.of(self.weights.tensors[one.meta.name])
            at = torch.arange(one.new.size) if one.positions is None else torch.from_numpy(one.positions)
            at = at.to(cells.bits.device)
            self._log.record(cells, at)
            writes.append((cells, at, signed(one.new).to(cells.bits.device)))
        for cells, at, bits in writes:
            cells.write(at, bits)
        self.version, self.digest = prepared.version, prepared.digest
        return sum(one.new.size for one in prepared.changes)

    def commit(self) -> None:
        """Keep what was applied: the old bits go. Repeatable."""
        self._log.clear()
        self._undo_to = None

    def rollback(self) -> None:
        """Every old bit and the old version back, if a step was applied and not committed. Repeatable."""
        if self._undo_to is not None:
            self._log.undo()
            self.version, self.digest = self._undo_to
            self.commit()

    def pull(self, target: int | None = None) -> int:
        """Prepare, apply and commit; returns the version held."""
        self.apply(self.prepare(target))
        self.commit()
        return self.version


def update_buckets(
    changes: Iterable[Change], tensors: Sequence[ParamMeta], heading: Heading, digest: int
) -> Iterator[Bucket]:
    """Changes as the buckets of one update, a bucket per tensor, and the trailer: what a ``Target`` takes.

    Args:
        changes: of a step, for example a journal's.
        tensors: the plan's checkpoint tensors, in wire order.
        heading: a delta's: base, version and group epoch, with sequence 0.
        digest: of the state that they lead to.

    Raises:
        PatchMismatch: the heading is no delta's, or a tensor is not in the plan.
    """
    if heading.kind != DELTA:
        raise PatchMismatch(f"changes go in an update of kind {heading.kind!r}, expected {DELTA!r}")
    numbers = {meta.name: number for number, meta in enumerate(tensors)}
    found = {change.meta.name: change for change in changes}
    unknown = sorted(set(found) - set(numbers))
    if unknown:
        raise PatchMismatch(f"tensor {unknown[0]!r} is changed but not in the plan; compare the two models")
    sequence = nbytes = 0
    for meta in tensors:
        change = found.get(meta.name)
        if change is None:
            continue
        bits, positions = signed(change.new), None
        if change.positions is not None:
            positions = torch.from_numpy(change.positions.astype(np.int32))
        encoding = Encoding.DENSE if positions is None else Encoding.INT32
        spec = RangeSpec(numbers[meta.name], encoding, 0, bits.numel())
        bucket = pack_bucket(heading.at(sequence), [Range(spec, positions, bits)], tensors)
        sequence, nbytes = sequence + 1, nbytes + bucket.nbytes
        yield bucket
    yield end_bucket(heading.at(sequence), wrap(digest), buckets=sequence, nbytes=nbytes)
