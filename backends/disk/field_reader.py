"""Pulling what slime, miles or SGLang's layout published, as safely as our own: proved before a byte is changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard

from weightsync.backends.disk import journal as journals
from weightsync.backends.disk.checkpoint import LOCK, Checkpoint, State, read_state, recover, write_state
from weightsync.backends.disk.field import OVERWRITE, XOR, Raw, checksum, hasher
from weightsync.backends.disk.index import LARGEST_INDEX, folders
from weightsync.backends.disk.journal import Step
from weightsync.backends.disk.names import HF_INDEX, KEPT, plain_name, version_folder
from weightsync.backends.disk.prepared import Prepared
from weightsync.backends.disk.reader import STAGED, CheckpointReader
from weightsync.backends.disk.shards import Held, ShardHeader, read_header
from weightsync.backends.disk.squash import Change, change_to
from weightsync.backends.disk.store import LocalStore, Store
from weightsync.reference.digest import wrap
from weightsync.reference.errors import PatchMismatch, StaleVersion


@dataclass(frozen=True, slots=True)
class FieldVersion:
    """One version of the field's layout, opened: a delta, or a full checkpoint when ``encoding`` is None."""

    version: int
    base: int
    encoding: str | None
    checksum_name: str
    tensors: Mapping[str, tuple[str, Held]]
    sums: Mapping[str, str]


def open_field(store: Store, version: int) -> FieldVersion:
    """One version, its headers read. Files that its index does not name are left alone.

    Raises:
        FileNotFoundError: no index, or a file that it names is missing.
        PatchMismatch: anything in it is damaged, unknown, or leaves the folder.
    """
    folder = version_folder(version)
    try:
        found: Any = json.loads(store.read_whole(f"{folder}/{HF_INDEX}", LARGEST_INDEX))
        metadata, where = dict(found.get("metadata", {})), dict(found["weight_map"])
        said, base = int(metadata.get("version", version)), int(metadata.get("base_version", 0))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise PatchMismatch(f"{folder}/{HF_INDEX} is no index of the field's layout; it is damaged") from None
    encoding, packing = metadata.get("delta_encoding"), metadata.get("compression_format", "zstd")
    if encoding not in (XOR, OVERWRITE, None) or packing != "zstd" or said != version:
        raise PatchMismatch(
            f"{folder} is version {said} with encoding {encoding!r} in {packing!r}, expected version {version} with "
            f"{XOR!r} or {OVERWRITE!r} in 'zstd'"
        )
    name = str(metadata.get("checksum_format", "xxh3-128"))
    hasher(name)
    headers: dict[str, ShardHeader] = {}
    for file in sorted({plain_name(file) for file in where.values()}):
        path = f"{folder}/{file}"
        headers[file] = read_header(lambda at, n, path=path: store.read(path, at, n), store.size(path), path)  # type: ignore[misc]
    tensors: dict[str, tuple[str, Held]] = {}
    sums: dict[str, str] = {}
    for tensor, file in where.items():
        if tensor not in headers[file].tensors:
            raise PatchMismatch(f"{folder}/{file} lacks tensor {tensor!r}, which the index says it holds")
        tensors[tensor] = (f"{folder}/{file}", headers[file].tensors[tensor])
        sums[tensor] = headers[file].metadata.get(tensor, "")
    return FieldVersion(version, base, encoding, name, tensors, sums)


class FieldReader(CheckpointReader):
    """Keeps a checkpoint folder at versions of the field's layout; version 0 is what the folder starts with.

    It takes no leases, since the field has none. Otherwise as ``CheckpointReader``: journal, lock, one apply per
    host; a wrong checksum is noticed before anything is changed.
    """

    def __init__(self, store: Store, folder: Any) -> None:
        super().__init__(store, folder, name=None)

    def newest(self) -> int:
        """The newest version with an index, or 0."""
        whole = (n for n in folders(self.store) if HF_INDEX in self.store.list(version_folder(n)))
        return max(whole, default=0)

    def _prepare(self, target: int | None) -> Prepared:
        target = self.newest() if target is None else target
        with LocalStore(self.files).lock(LOCK, wait=True):
            checkpoint = Checkpoint(self.files)
            try:
                state = recover(self.files, checkpoint)
                if state is None:
                    state = State(0, checkpoint.digest(), checkpoint.fingerprint)
                    write_state(self.files, state)
            finally:
                checkpoint.close()
        if target < state.version:
            raise StaleVersion(f"version {target} is older than {state.version}, which the checkpoint holds")
        if target == state.version:
            return Prepared(self.files, state, None, "", ())
        chain = self._chain(state.version, target)
        name = f"{KEPT}/{STAGED}{state.version}-{target}-field"
        steps: list[Step] = []

        def proof(total: int) -> Step:
            steps.append(Step(state.version, state.digest, target, wrap(state.digest + total)))
            return steps[0]

        checkpoint = Checkpoint(self.files)
        try:
            changes = _squash(self.store, chain, checkpoint)
            LocalStore(self.files).put(name, journals.chunks(changes, proof))
        finally:
            checkpoint.close()
        return Prepared(self.files, state, steps[0], name, tuple(one.version for one in chain))

    def held(self) -> State | None:
        """What the checkpoint says it holds."""
        return read_state(self.files)

    def _chain(self, version: int, target: int) -> list[FieldVersion]:
        """Back from the target to the newest full version, or to what is held."""
        chain = [open_field(self.store, target)]
        while chain[0].encoding is not None and chain[0].base > version:
            chain.insert(0, open_field(self.store, chain[0].base))
            if chain[0].version >= chain[1].version:
                raise PatchMismatch(f"version {chain[1].version} is based on {chain[0].version}")
        if chain[0].encoding is not None and chain[0].base != version:
            raise StaleVersion(
                f"version {chain[0].version} is based on {chain[0].base}, the checkpoint holds {version}; "
                "a full version is needed"
            )
        return chain


def _squash(store: Store, chain: Sequence[FieldVersion], checkpoint: Checkpoint) -> Iterator[Change]:
    metas = checkpoint.metas
    for name in sorted({name for one in chain for name in one.tensors}):
        if name not in metas:
            raise PatchMismatch(f"tensor {name!r} is to be changed, but is not here; compare the two models")
        old = checkpoint.read(name)
        raw: Raw = old.view(np.uint8).copy()
        for one in chain:
            if name in one.tensors:
                raw = _next(store, one, name, raw)
                found = checksum(one.checksum_name, raw)
                if one.encoding is not None and found != one.sums[name]:
                    raise PatchMismatch(
                        f"tensor {name!r} would have checksum {found} in version {one.version}, expected "
                        f"{one.sums[name] or 'one'}; nothing was changed, publish a full version"
                    )
        change = change_to(metas[name], old, raw.view(old.dtype))
        if change is not None:
            yield change


def _next(store: Store, one: FieldVersion, name: str, raw: Raw) -> Raw:
    path, held = one.tensors[name]
    blob = store.read(path, held.offset, held.nbytes)
    if one.encoding is None:
        if held.nbytes != raw.size:
            raise PatchMismatch(f"tensor {name!r} has {held.nbytes} bytes in {path!r}, expected {raw.size}")
        return np.frombuffer(blob, np.uint8)
    most = raw.size if one.encoding == XOR else 4 + 5 * raw.size
    try:
        said = zstandard.frame_content_size(blob)
        if not 0 <= said <= most:
            raise PatchMismatch(f"blob of {name!r} says {said} bytes, expected at most {most}; it is damaged")
        body = (
            np.frombuffer(zstandard.ZstdDecompressor().decompress(blob), np.uint8)
            if said
            else np.empty(0, np.uint8)
        )
    except zstandard.ZstdError as error:
        raise PatchMismatch(f"blob of {name!r} in {path!r} is damaged: {error}") from None
    if one.encoding == XOR:
        if body.size != raw.size:
            raise PatchMismatch(f"blob of {name!r} has {body.size} bytes, expected {raw.size}; it is damaged")
        return raw ^ body
    count = int(body[:4].view("<u4")[0]) if body.size >= 4 else -1
    if body.size != 4 + 5 * count:
        raise PatchMismatch(f"blob of {name!r} names {count} bytes in {body.size}; it is damaged")
    positions = body[4 : 4 + 4 * count].view("<u4")
    if count and int(positions.max()) >= raw.size:
        raise PatchMismatch(
            f"blob of {name!r} names byte {int(positions.max())}, expected 0 to {raw.size - 1}"
        )
    new = raw.copy()
    new[positions] = body[4 + 4 * count :]
    return new
