"""A rollout rank's bytes: from buckets to weights in place, one step a verb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from weightsync.reference.buckets import ABORT, END, Bucket, Range, read_abort, read_end, unpack
from weightsync.reference.decoded import Decoded
from weightsync.reference.delta import UndoLog
from weightsync.reference.digest import wrap
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.holdings import Holding, Narrowed
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.progress import Progress
from weightsync.reference.rowmap import RowMap
from weightsync.reference.share import KeptShare
from weightsync.reference.steps import Step, Touched
from weightsync.reference.wire.forms import Values
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import resolve
from weightsync.reference.writing import Holder, Write, by_position, dense_writes

WEIGHTS = "weights"

COPY = 3
"""A tied name with a storage of its own adds so many times what it differs by: no other change hides it."""


class Target:
    """The bytes of one rollout rank.

    Args:
        tensors: the plan's checkpoint tensors, in wire order.
        maps: runtime name -> its map.
        weights: runtime name -> live tensor, of any strides; written in place, never replaced.
        aliases: tied runtime name -> the name it is tied to. Tied names that share storage are written once;
            one with a storage of its own is written as well, and counts in the digest when it differs.
        route: "all": buckets name every element of the checkpoint; "owned": only what this rank holds, in the
            coordinates of ``holding``. The digest is in checkpoint coordinates either way.

    Attributes:
        holding: what buckets name.

    Raises:
        PlanMismatch: a weight is missing, has another dtype or shape than its map, or an alias is tied to
        nothing.
    """

    def __init__(
        self,
        tensors: Sequence[ParamMeta],
        maps: Mapping[str, RowMap],
        weights: Mapping[str, Tensor],
        aliases: Mapping[str, str] | None = None,
        route: Literal["all", "owned"] = "all",
    ) -> None:
        self.tensors = tuple(tensors)
        if route not in ("all", "owned"):
            raise PlanMismatch(f"route is {route!r}, expected 'all' or 'owned'; pass that of the settings")
        owned = route == "owned"
        self.holding = Holding.of(self.tensors, maps.values()) if owned else Holding.whole(self.tensors)
        self.weights = dict(weights)
        self._holders: dict[int, list[Holder]] = {}
        self._share = KeptShare(self.tensors)
        self._log = UndoLog()
        self._zstd = Zstd()
        self._resolved: dict[tuple[int, int], list[Write]] = {}
        self._progress = Progress(self.holding.tensors)
        self._narrow = Narrowed(self.holding)
        aliases = dict(aliases or {})
        seen: set[tuple[int, int]] = set()
        for name, row_map in maps.items():
            if name not in aliases and self._hold(name, row_map, seen):
                self._share.count(row_map, self.weights[name])
        for name, tied_to in aliases.items():
            if tied_to not in maps:
                raise PlanMismatch(
                    f"weight {name!r} is tied to {tied_to!r}, which has no map, expected one of the mapped "
                    "names; correct the alias table"
                )
            row_map = maps.get(name, maps[tied_to])
            if name in self.weights and self._hold(name, row_map, seen):
                self._share.count(row_map, self.weights[name], COPY)
                self._share.count(row_map, self.weights[tied_to], -COPY)
        self.unsent = tuple(name for name in self.weights if name not in maps and name not in aliases)
        """Names of weights that no update reaches."""

    def decode(self, bucket: Bucket) -> Step[Decoded]:
        """The bucket taken apart: checksum proved, table, sizes and encodings checked; nothing is written.

        Raises:
            PatchMismatch: the bucket is damaged, or names what the plan does not have.
        """
        yield Touched(bucket.nbytes)
        if bucket.header.kind == END:
            return Decoded(bucket.header, bucket.nbytes, end=read_end(bucket))
        if bucket.header.kind == ABORT:
            return Decoded(bucket.header, bucket.nbytes, aborted=read_abort(bucket))
        return Decoded(bucket.header, bucket.nbytes, tuple(unpack(bucket, self.holding.tensors, self._zstd)))

    def validate(self, decoded: Decoded, *, version: int, base: int, epoch: int, sequence: int) -> Step[None]:
        """Return if the bucket is the expected next one and everything in it fits; nothing is written.

        Validating the latest bucket again is allowed; a bucket of sequence 0 begins a new update.

        Args:
            decoded: what ``decode`` gave.
            version: the version being received.
            base: the version held, or 0 (NO_BASE) for a full update.
            epoch: the group epoch.
            sequence: buckets validated before it in this update.

        Raises:
            StaleVersion: another version or base version.
            PatchMismatch: anything else that does not fit, named.
        """
        yield Touched(decoded.nbytes)
        self._progress.advance(
            decoded.header,
            decoded.ranges,
            decoded.end,
            version=version,
            base=base,
            epoch=epoch,
            sequence=sequence,
        )
        decoded.validated = True

    def apply(self, decoded: Decoded, undo: bool) -> Step[int]:
        """Write this rank's elements of a validated bucket in place; returns the bytes written, O(changed).

        With ``undo`` the old bits are kept, each before it is overwritten, until ``commit``; a step abandoned at its
        pause can be rolled back. Applying the same bucket again is harmless: values that are differences from the old
        bits are worked out once in an update, before the bucket's first write, and kept until it ends.

        Raises:
            PlanMismatch: the bucket was not validated; nothing was written.
        """
        if not decoded.validated:
            raise PlanMismatch("bucket was not validated, expected that before any write; validate it first")
        writes = self._writes_of(decoded)
        nbytes, log = sum(write.values.nbytes for write in writes), self._log if undo else None
        if log is None:
            self._share.forget_all()
        elif not log.entries:
            self._share.mark()
        self._write(writes, log, second=False)
        yield Touched(nbytes, writes=(WEIGHTS,))
        self._write(writes, log, second=True)
        return nbytes

    def rollback(self) -> Step[int]:
        """Every old bit back where an uncommitted apply overwrote it; returns the bytes written.
        Repeatable.
        """
        self._progress.reset()
        undone = bool(self._log.entries)
        if undone:
            self._share.forget()
        nbytes = yield from self._log.steps()
        self._log.clear()
        self._resolved.clear()
        if undone:
            self._share.restore()
        return nbytes

    def commit(self) -> Step[None]:
        """Drop the undo log: what is applied stays. Repeatable."""
        yield Touched(0)
        self._progress.reset()
        self._log.clear()
        self._resolved.clear()

    def digest(self, *, afresh: bool = False) -> Step[int]:
        """This rank's share of the digest: the rows it owns, in checkpoint coordinates.

        It follows the deltas that are applied and rolled back, and costs nothing then. ``afresh``, and the first time
        after anything else was written, every element is read: that sees a bit which changed where nothing was written.
        """
        if self._share.value is not None and not afresh:
            yield Touched(0)
            return self._share.value
        return (yield from self._share.steps())

    def same_digest(self, found: int, expected: int) -> bool:
        """True when two digests are equal."""
        return found == expected

    def snapshot_bits(self) -> dict[str, Tensor]:
        """A copy of every weight's bits as a flat integer tensor, by name; for oracles."""
        return {name: int_view(weight).clone() for name, weight in self.weights.items()}

    @property
    def fingerprint(self) -> int:
        """Of what buckets name: see ``Holding.fingerprint``."""
        return self.holding.fingerprint

    @property
    def undo_bytes(self) -> int:
        """Bytes that the undo log holds now."""
        return self._log.nbytes

    def _hold(self, name: str, row_map: RowMap, seen: set[tuple[int, int]]) -> bool:
        """Take a weight in, unless its storage is in already; True when it was taken in."""
        weight = self.weights.get(name)
        if weight is None or weight.dtype != row_map.dtype or tuple(weight.shape) != row_map.local_shape:
            found = "missing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
            raise PlanMismatch(
                f"weight {name!r} is {found}, its map expects {row_map.dtype} {list(row_map.local_shape)}; "
                "build the map from the loaded model"
            )
        storage = (weight.data_ptr(), weight.numel())
        if weight.numel() and storage in seen:
            return False
        seen.add(storage)
        for output, number in enumerate(row_map.outputs):
            narrow, index = self._narrow.map(row_map, output)
            self._holders.setdefault(number, []).append(Holder(name, narrow, index, weight))
        return True

    def _write(self, writes: Sequence[Write], log: UndoLog | None, *, second: bool) -> None:
        """Do one half of every write; the share follows those whose old bits are kept."""
        known, shift = self._share.forget(), 0
        for write in writes:
            half = write.index.numel() // 2
            taken = slice(half, None) if second else slice(0, half)
            old = write.do(taken, log)
            if old is not None and known is not None:
                shift += self._share.shift(write.cells, write.index[taken], old)
        if log is not None and known is not None:
            self._share.value = wrap(known + shift)

    def _writes_of(self, decoded: Decoded) -> list[Write]:
        """What a bucket writes on this rank, in bits; one with differences resolves them the first time only."""
        if all(one.spec.values is Values.RAW for one in decoded.ranges):
            return [write for one in decoded.ranges for write in self._writes(one)]
        heading = decoded.header.heading
        number = heading.version, heading.sequence
        if number not in self._resolved:
            self._resolved[number] = [write for one in decoded.ranges for write in self._writes(one)]
        return self._resolved[number]

    def _writes(self, one: Range) -> list[Write]:
        """What one range writes on this rank, in bits; out-of-shard elements are dropped."""
        writes: list[Write] = []
        dtype = self.holding.tensors[one.spec.tensor].dtype
        for holder in self._holders.get(one.spec.tensor, ()):
            if one.positions is not None:
                write = by_position(holder, one.positions, one.spec.base, one.bits)
                if one.spec.values is not Values.RAW:
                    old = write.cells.read(write.index)
                    write = replace(write, values=resolve(one.spec.values, write.values, old, dtype))
                writes.append(write)
            else:
                writes += dense_writes(holder, one.spec.base, one.bits)
        return [write for write in writes if write.index.numel()]
