"""Versions in any store that fsspec knows: S3 and its like, or a plain directory. An object appears whole, when its
upload ends, so there is nothing to rename: the index, written last, is the commit.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from weightsync.backends.disk.files import Bytes, at_most
from weightsync.backends.disk.leases import Clock
from weightsync.backends.disk.names import FolderLocked, safe_name
from weightsync.backends.disk.store import LocalStore, Store
from weightsync.reference.errors import PatchMismatch

PART_BYTES = 16 << 20
"""Size of one part of a multipart upload: what an upload holds in memory."""
LOCK_NS = 3_600_000_000_000
_TMP = ".tmp"


class ObjectStore:
    """A folder of an object store.

    Args:
        url: such as ``s3://bucket/run7`` or ``memory://run7``.
        options: for the file system: ``endpoint_url``, ``key``, ``anon`` and so on.
        clock: for the lock.
        part_bytes: size of one part of an upload.
    """

    def __init__(
        self,
        url: str,
        options: dict[str, Any] | None = None,
        clock: Clock = time.time_ns,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.fs, self.root = fsspec.url_to_fs(url, **(options or {}))
        self.root = self.root.rstrip("/")
        self._clock, self._part_bytes = clock, part_bytes

    def put(self, name: str, chunks: Iterable[Bytes], exclusive: bool = False) -> int:
        """See ``Store``; parts are uploaded as they fill, and given up when ``chunks`` raises."""
        path = self._path(name)
        if exclusive:
            return self._create(path, b"".join(bytes(chunk) for chunk in chunks))
        file, draft = self.fs.open(path + _TMP, "wb", block_size=self._part_bytes), path + _TMP
        if isinstance(
            file, AbstractBufferedFile
        ):  # such an object appears when it is closed, so it needs no draft
            _give_up(file)
            file, draft = self.fs.open(path, "wb", block_size=self._part_bytes), path
        done = 0
        try:
            for chunk in chunks:
                view = memoryview(chunk)
                for start in range(0, view.nbytes, self._part_bytes):
                    done += file.write(bytes(view[start : start + self._part_bytes]))
        except BaseException:
            _give_up(file)
            raise
        file.close()
        if draft != path:
            self.fs.mv(draft, path)
        self.fs.invalidate_cache()
        return done

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """See ``Store``."""
        if nbytes == 0:
            return b""
        raw: bytes = self.fs.cat_file(self._path(name), start=offset, end=offset + nbytes)
        if len(raw) != nbytes:
            raise PatchMismatch(
                f"object {name!r} gave {len(raw)} bytes at {offset}, expected {nbytes}; it was cut short"
            )
        return raw

    def read_whole(self, name: str, most: int) -> bytes:
        """See ``Store``."""
        at_most(name, self.size(name), most)
        raw: bytes = self.fs.cat_file(self._path(name))
        at_most(name, len(raw), most)
        return raw

    def size(self, name: str) -> int:
        """See ``Store``."""
        return int(self.fs.info(self._path(name))["size"])

    def list(self, folder: str) -> list[str]:
        """See ``Store``."""
        self.fs.invalidate_cache()
        path = f"{self.root}/{safe_name(folder)}" if folder else self.root
        try:
            found = self.fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        names = []
        for entry in found:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if entry["name"].rstrip("/").lstrip("/") != path.lstrip("/") and not name.endswith(_TMP):
                names.append(name + "/" if entry["type"] == "directory" else name)
        return sorted(names)

    def remove(self, name: str) -> None:
        """See ``Store``."""
        with suppress(FileNotFoundError):
            self.fs.rm_file(self._path(name))
        self.fs.invalidate_cache()

    def remove_folder(self, folder: str) -> None:
        """See ``Store``."""
        with suppress(FileNotFoundError):
            self.fs.rm(self._path(folder), recursive=True)
        self.fs.invalidate_cache()

    @contextmanager
    def lock(self, name: str, wait: bool = False) -> Iterator[None]:
        """See ``Store``: an object that says whose the lock is and when it ends, an hour after it was taken.

        Where the store creates objects exclusively (S3 does), no two hold it at once; an ended one is taken over.
        """
        path, mine = self._path(name), uuid.uuid4().hex
        body = json.dumps({"owner": mine, "ends_ns": self._clock() + LOCK_NS}).encode()
        try:
            self._create(path, body)
        except FileExistsError:
            try:
                ends_ns = int(json.loads(self.read_whole(name, 1 << 16))["ends_ns"])
            except (ValueError, KeyError, TypeError):
                ends_ns = 1 << 62
            if ends_ns > self._clock():
                raise FolderLocked(
                    f"{self.root}/{name} is locked by another publisher; end it, or remove that object if it is dead"
                ) from None
            self.remove(name)
            self._create(path, body)
        try:
            yield
        finally:
            self.remove(name)

    def _create(self, path: str, raw: bytes) -> int:
        """An object that was not there; FileExistsError if it was."""
        self.fs.invalidate_cache()
        if self.fs.exists(path):
            raise FileExistsError(path)
        try:
            self.fs.pipe_file(path, raw, mode="create")
        except OSError as error:
            if isinstance(error, FileExistsError) or "PreconditionFailed" in str(error):
                raise FileExistsError(path) from None
            raise
        self.fs.invalidate_cache()
        return len(raw)

    def _path(self, name: str) -> str:
        return f"{self.root}/{safe_name(name)}"


def open_store(where: str, options: dict[str, Any] | None = None) -> Store:
    """A store for a folder's path or a URL: ``file://`` and plain paths are local, the rest is fsspec's."""
    scheme, split, path = where.partition("://")
    if not split:
        return LocalStore(where)
    return LocalStore(path) if scheme == "file" else ObjectStore(where, options)


def _give_up(file: Any) -> None:
    """End an upload without an object."""
    with suppress(Exception):  # some file systems cannot; what was sent then never becomes an object
        file.discard()
    with suppress(AttributeError):
        file.closed = True
