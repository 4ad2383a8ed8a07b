"""Publishing: one state after another, each as a folder whose index is written last."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from weightsync.backends.disk.cleaner import clean, discard, hidden, show
from weightsync.backends.disk.files import Bytes
from weightsync.backends.disk.index import (
    FileEntry,
    Index,
    highest_tried,
    listing,
    read_index,
    remember_highest,
)
from weightsync.backends.disk.leases import Clock, leases
from weightsync.backends.disk.names import CLAIM, INDEX, KEPT, plain_name, version_folder
from weightsync.backends.disk.pack import Changed, Put, delta_shards, fingerprint, full_shards, weight_map
from weightsync.backends.disk.store import Progress, Store, unheard
from weightsync.reference.detect import changed
from weightsync.reference.digest import digest_sum, key, state_digest, wrap
from weightsync.reference.errors import PatchMismatch, PlanMismatch, StaleVersion
from weightsync.reference.params import ParamMeta, fresh_copy, int_view
from weightsync.reference.protocol import DELTA, FULL

LOCK = f"{KEPT}/publisher.lock"


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """How versions are laid out and how long they stay.

    Attributes:
        anchor_every: a full version after so many deltas.
        keep: newest versions that a reader without any can reach.
        shard_bytes: largest shard, unless one tensor is larger.
    """

    anchor_every: int = 20
    keep: int = 40
    shard_bytes: int = 4 << 30


class Publisher:
    """The one publisher of a folder; a context manager that holds the folder's lock.

    Its baseline is a copy of the last durable version's state in host memory; it moves only once a version is
    durable, so a failed publish is followed by a delta on the same base, under a new number.

    Args:
        store: where versions go.
        tensors: the checkpoint's tensors, in order.
        settings: see there.
        extras: small files that full versions carry too, such as ``config.json``; name -> bytes.
        clock: for leases.
        progress: told the bytes written.

    Attributes:
        version: the version whose state the baseline is, or 0.
    """

    def __init__(
        self,
        store: Store,
        tensors: Sequence[ParamMeta],
        settings: PublisherSettings | None = None,
        extras: Mapping[str, bytes] | None = None,
        clock: Clock = time.time_ns,
        progress: Progress = unheard,
    ) -> None:
        self.store = store
        self.tensors = tuple(tensors)
        self.settings = settings or PublisherSettings()
        self.version = 0
        self._extras = {plain_name(name): raw for name, raw in (extras or {}).items()}
        self._clock, self._progress = clock, progress
        self._fingerprint = fingerprint(self.tensors)
        self._baseline: dict[str, Tensor] = {}
        self._digest = 0
        self._highest = 0
        self._deltas = 0  # since the last full version
        self._litter = 0  # version that failed, whose files are still there
        self._held = ExitStack()

    def __enter__(self) -> Publisher:
        """Take the lock, finish what a killed publisher or cleaner left, and number above all it tried.

        Raises:
            FolderLocked: another publisher is at work.
        """
        with ExitStack() as stack:
            stack.enter_context(self.store.lock(LOCK))
            self._resume()
            self._held = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Let the lock go."""
        self._held.close()

    def _resume(self) -> None:
        known = [highest_tried(self.store), *(lease.version for lease in leases(self.store))]
        self._highest = max(known)
        for version in hidden(self.store):
            show(self.store, version)
        found = listing(self.store)
        if found.unfinished:
            remember_highest(self.store, self._highest)
        for version in found.unfinished:
            if self._ours(version):
                discard(self.store, version)

    def _ours(self, version: int) -> bool:
        """True for a folder that a publisher of this kind began, or an empty one; others' folders stay."""
        names = self.store.list(version_folder(version))
        return not names or CLAIM in names

    def adopt(self, state: Mapping[str, Tensor], version: int | None = None) -> None:
        """Go on with deltas after ``version``, the newest by default: ``state`` is what it holds, proved by digest.

        Raises:
            StaleVersion: it is another state, or there is no such version.
        """
        there = listing(self.store).indexes
        newest = there[max(there)] if there else None
        if newest is None or (version is not None and version != newest.version):
            last = "none" if newest is None else str(newest.version)
            raise StaleVersion(
                f"version {version} is not the newest, which is {last}; publish without a base"
            )
        self._check(state)
        digest = state_digest((meta, state[meta.name]) for meta in self.tensors)
        if newest.fingerprint != self._fingerprint or newest.after != digest:
            raise StaleVersion(
                f"the base state's digest is {digest}, that of version {newest.version} is {newest.after}; name "
                "the checkpoint that was published last, or publish a full version"
            )
        self._baseline = {meta.name: fresh_copy(state[meta.name]) for meta in self.tensors}
        self.version, self._digest, self._deltas = newest.version, digest, 0
        while newest.kind == DELTA and newest.base in there:
            newest, self._deltas = there[newest.base], self._deltas + 1

    def publish(self, state: Mapping[str, Tensor], full: bool = False) -> Index:
        """Publish ``state`` as the next version; durable and visible when this returns.

        Args:
            state: name -> tensor on the host, of the publisher's dtypes and shapes; read only, until it returns.
            full: a full version, also where a delta would do.

        Raises:
            PlanMismatch: a tensor is missing or of another dtype or shape; nothing was written.
            OSError: the folder cannot be written. The number is used up and the baseline has not moved.
        """
        self._check(state)
        kind = FULL if full or not self._baseline or self._deltas >= self.settings.anchor_every else DELTA
        if self._litter:
            discard(self.store, self._litter)
            self._litter = 0
        version = self._highest + 1
        self._highest = self._litter = version
        folder = version_folder(version)
        self.store.put(f"{folder}/{CLAIM}", [f"{version}\n".encode()], exclusive=True)
        index, moves = self._write(state, kind, version)
        try:
            self.store.put(f"{folder}/{INDEX}", [index.dump()])
        except Exception:
            self._settle_doubt(version)
            raise
        self._litter = 0
        self._move_baseline(state, moves)
        self.version, self._digest = version, index.after
        self._deltas = 0 if kind == FULL else self._deltas + 1
        return index

    def clean(self) -> tuple[int, ...]:
        """Remove versions that are past ``keep`` and that no reader may need; returns them."""
        return clean(self.store, self._clock(), self.settings.keep).removable

    def _check(self, state: Mapping[str, Tensor]) -> None:
        for meta in self.tensors:
            found = state.get(meta.name)
            if found is None or found.dtype != meta.dtype or tuple(found.shape) != meta.shape:
                said = "missing" if found is None else f"{found.dtype} {list(found.shape)}"
                raise PlanMismatch(
                    f"tensor {meta.name!r} to publish is {said}, expected {meta.dtype} {list(meta.shape)}; hand in "
                    "the whole checkpoint, cast to the dtypes that travel"
                )
        unknown = sorted(set(state) - {meta.name for meta in self.tensors})
        if unknown:
            raise PlanMismatch(
                f"tensor {unknown[0]!r} to publish is unknown; make a new publisher with its metadata"
            )

    def _write(self, state: Mapping[str, Tensor], kind: str, version: int) -> tuple[Index, list[Changed]]:
        """Every file but the index; the index, and what the baseline lacks."""
        put = partial(self._put, version_folder(version))
        moves: list[Changed] = []
        encodings: dict[str, int] = {}
        delta: list[FileEntry] = []
        digest, base = self._digest, self.version
        elements = changed_elements = sum(meta.numel for meta in self.tensors)
        if self._baseline:
            moves = list(self._changes(state))
            digest = wrap(digest + sum(one.digest_change for one in moves))
            changed_elements = sum(one.positions.size for one in moves)
            delta = delta_shards(put, moves, self.settings.shard_bytes, encodings)
        else:
            digest = state_digest((meta, state[meta.name]) for meta in self.tensors)
        files = delta if kind == DELTA else self._full(put, state)
        index = Index(
            version=version,
            base=base if kind == DELTA else 0,
            kind=kind,
            fingerprint=self._fingerprint,
            before=self._digest if self._baseline else 0,
            after=digest,
            files=tuple(files),
            changed=changed_elements,
            elements=elements,
            encodings=encodings or {"dense": len(self.tensors)},
            delta=tuple(delta) if kind == FULL else (),
            delta_base=base if kind == FULL and self._baseline else 0,
        )
        return index, moves

    def _full(self, put: Put, state: Mapping[str, Tensor]) -> list[FileEntry]:
        files = full_shards(put, self.tensors, state, self.settings.shard_bytes)
        extras = {**self._extras, **weight_map(files, self.tensors, self.settings.shard_bytes)}
        for name, raw in extras.items():
            files.append(FileEntry(name, put(name, [raw]), xxhash.xxh3_128_hexdigest(raw)))
        return files

    def _changes(self, state: Mapping[str, Tensor]) -> Iterator[Changed]:
        for meta in self.tensors:
            new, old = int_view(state[meta.name]), int_view(self._baseline[meta.name])
            positions = changed(new, old)
            if positions.numel():
                before, after = old[positions], new[positions]
                change = digest_sum(key(meta), positions, after) - digest_sum(key(meta), positions, before)
                yield Changed(meta, positions.numpy(), _unsigned(after), _unsigned(before), wrap(change))

    def _put(self, folder: str, name: str, chunks: Iterable[Bytes]) -> int:
        def told() -> Iterator[Bytes]:
            for chunk in chunks:
                yield chunk
                self._progress(memoryview(chunk).nbytes)

        return self.store.put(f"{folder}/{name}", told())

    def _settle_doubt(self, version: int) -> None:
        """The index may be visible although it could not be made durable: then this version stands, and the
        baseline, which is another one's, must go.
        """
        try:
            read_index(self.store, version)
        except (OSError, PatchMismatch) as error:
            if isinstance(error, FileNotFoundError):
                return
        self._baseline, self.version, self._litter = {}, 0, 0

    def _move_baseline(self, state: Mapping[str, Tensor], moves: list[Changed]) -> None:
        if not self._baseline:
            self._baseline = {meta.name: fresh_copy(state[meta.name]) for meta in self.tensors}
        for one in moves:
            _unsigned(int_view(self._baseline[one.meta.name]))[one.positions] = one.new


def _unsigned(bits: Tensor) -> NDArray[Any]:
    array = bits.numpy()
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
