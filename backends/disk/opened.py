"""A version opened for reading: its shards' headers, and one tensor's bytes at a time, each proved by checksum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from weightsync.backends.disk import sections
from weightsync.backends.disk.index import FileEntry, Index
from weightsync.backends.disk.shards import DTYPES, NAMES, Held, read_header
from weightsync.backends.disk.store import Progress, Store, unheard
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta
from weightsync.reference.protocol import FULL


@dataclass(frozen=True, slots=True)
class Section:
    """Where one tensor's part of a version is.

    Attributes:
        meta: the checkpoint tensor.
        encoding: see ``sections``.
        count: elements that it names.
        checksum: xxh3-128 of its bytes.
    """

    meta: ParamMeta
    encoding: str
    count: int
    checksum: str
    file: str
    held: Held


class Opened:
    """One version, ready to be read by tensor.

    Args:
        store: where it is.
        index: its index.
        progress: told the bytes read.

    Raises:
        PatchMismatch: a shard is of another size than the index says, damaged, or names a tensor twice.
    """

    def __init__(self, store: Store, index: Index, progress: Progress = unheard) -> None:
        self.index = index
        self._store, self._progress = store, progress
        self.sections: dict[str, Section] = {}
        for entry in index.files:
            if entry.header:
                self._open(entry)

    def bits(self, name: str) -> NDArray[Any]:
        """All of a tensor in a full version: unsigned bits (numel,), its own memory."""
        section = self.sections[name]
        raw = self._raw(section)
        return np.frombuffer(raw, np.dtype(f"<u{section.meta.itemsize}"))

    def sparse(self, name: str) -> sections.Sparse:
        """The changes of a tensor in a delta."""
        section = self.sections[name]
        return sections.decode(self._raw(section), section.count, section.meta.numel, name)

    def _raw(self, section: Section) -> bytes:
        raw = self._store.read(
            f"{self.index.folder}/{section.file}", section.held.offset, section.held.nbytes
        )
        if xxhash.xxh3_128_hexdigest(raw) != section.checksum:
            raise PatchMismatch(
                f"tensor {section.meta.name!r} of version {self.index.version} has another checksum than its header "
                "says; the file is damaged, publish a full version"
            )
        self._progress(len(raw))
        return raw

    def _open(self, entry: FileEntry) -> None:
        path = f"{self.index.folder}/{entry.name}"
        size = self._store.size(path)
        if size != entry.bytes:
            raise PatchMismatch(f"file {path!r} has {size} bytes, expected {entry.bytes}; it was cut short")
        header = read_header(lambda offset, nbytes: self._store.read(path, offset, nbytes), size, path)
        if header.checksum != entry.header:
            raise PatchMismatch(
                f"file {path!r} has another header than the index says; it is damaged or stale"
            )
        table = header.table()
        if set(table) != set(header.tensors):
            raise PatchMismatch(f"file {path!r} has a table of other tensors than it holds; it is damaged")
        for name, held in header.tensors.items():
            said = table[name]
            if self.index.kind == FULL:
                section = Section(held.meta, sections.DENSE, held.meta.numel, str(said), entry.name, held)
            else:
                section = _section(said, held, entry.name)
            if name in self.sections:
                raise PatchMismatch(f"version {self.index.version} names tensor {name!r} in two files")
            self.sections[name] = section


def _section(said: object, held: Held, file: str) -> Section:
    name = held.meta.name
    if isinstance(said, list) and len(said) == 5 and held.meta.dtype.itemsize == 1:
        dtype, shape, encoding, count, checksum = said
        numbers = [count, *(shape if isinstance(shape, list) else ["no list"])]
        if all(type(one) is int and 0 <= one < 1 << 62 for one in numbers) and dtype in NAMES.values():
            if encoding != sections.GAPS:
                raise PatchMismatch(
                    f"section of {name!r} has encoding {encoding!r}, expected {sections.GAPS!r}; use the same release "
                    "on both sides"
                )
            return Section(
                ParamMeta(name, DTYPES[dtype], tuple(shape)), encoding, count, str(checksum), file, held
            )
    raise PatchMismatch(f"section of {name!r} is described as {str(said)[:80]}; the shard is damaged")
