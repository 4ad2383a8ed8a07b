"""A checkpoint folder made from a full version: its files, copied and proved."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from weightsync.backends.disk.checkpoint import Checkpoint, State, write_state
from weightsync.backends.disk.files import Files
from weightsync.backends.disk.index import FileEntry, Index
from weightsync.backends.disk.names import KEPT
from weightsync.backends.disk.store import LocalStore, Progress, Store
from weightsync.reference.errors import PatchMismatch

MAKING = "making"
PART = 8 << 20


def half_made(files: Files) -> bool:
    """True when a killed process left the folder while it made it."""
    return MAKING in files.list(KEPT)


def make_fresh(store: Store, files: Files, index: Index, progress: Progress) -> State:
    """Copy the files of a full version, at most 8 MiB in memory at once; durable, its state written last.

    Raises:
        PatchMismatch: a file has another size or checksum than its index says.
    """
    here = LocalStore(files)
    here.put(f"{KEPT}/{MAKING}", [b""])
    for entry in index.files:
        here.put(entry.name, parts(store, index.folder, entry, progress))
    checkpoint = Checkpoint(files)
    found = checkpoint.fingerprint
    checkpoint.close()
    if found != index.fingerprint:
        raise PatchMismatch(f"version {index.version} holds other tensors than its index says; it is damaged")
    state = State(index.version, index.after, index.fingerprint)
    write_state(files, state)
    here.remove(f"{KEPT}/{MAKING}")
    return state


def parts(store: Store, folder: str, entry: FileEntry, progress: Progress) -> Iterator[bytes]:
    """A file of a version in parts; PatchMismatch at its end, or before it starts, when it is another file."""
    name = f"{folder}/{entry.name}"
    size, hasher = store.size(name), xxhash.xxh3_128()
    if size != entry.bytes:
        raise PatchMismatch(f"file {name!r} has {size} bytes, expected {entry.bytes}; it was cut short")
    for start in range(0, size, PART):
        part = store.read(name, start, min(PART, size - start))
        hasher.update(part)
        progress(len(part))
        yield part
    if hasher.hexdigest() != entry.checksum:
        raise PatchMismatch(f"file {name!r} has another checksum than its index says; publish a full version")
