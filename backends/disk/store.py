"""Where versions are kept: whole files under names, each put at once. A folder here, objects elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from weightsync.backends.disk.files import Bytes, Files, LocalFiles

Progress = Callable[[int], None]
"""Told the bytes that moved since the last call."""

_TMP = ".tmp"


def unheard(moved: int) -> None:
    """Nobody listens."""


class Store(Protocol):
    """Files that are there whole or not at all. Names are relative, parts joined by ``/``."""

    def put(self, name: str, chunks: Iterable[Bytes], exclusive: bool = False) -> int:
        """A file of these bytes, durable once this returns; returns how many.

        Readers see it whole or, until then, what had the name before. With ``exclusive``, FileExistsError if the
        name is taken.
        """

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes; PatchMismatch when there are fewer, FileNotFoundError when there is no file."""

    def read_whole(self, name: str, most: int) -> bytes:
        """All of a file, as it was at one instant; PatchMismatch when it has more than ``most`` bytes."""

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError when there is none."""

    def list(self, folder: str) -> list[str]:
        """Names in a folder, sorted, those of folders with ``/`` at their end."""

    def remove(self, name: str) -> None:
        """A file goes, durably; it may be gone already."""

    def remove_folder(self, folder: str) -> None:
        """A folder and the files in it go; it may be gone already."""

    def lock(self, name: str, wait: bool = False) -> AbstractContextManager[None]:
        """Exclusive among writers; FolderLocked if not ``wait`` and it is held."""


class LocalStore:
    """A folder, on a local or a shared file system, put to with a temporary name, fsync, rename and fsync.

    Args:
        files: the folder.
    """

    def __init__(self, files: Files | Path | str) -> None:
        self.files: Files = LocalFiles(files) if isinstance(files, str | os.PathLike) else files

    def put(self, name: str, chunks: Iterable[Bytes], exclusive: bool = False) -> int:
        """See ``Store``. ``exclusive`` rests on the lock that the caller holds."""
        folder, _, last = name.rpartition("/")
        self._make(folder)
        if exclusive and last in self.files.list(folder):
            raise FileExistsError(f"{name!r} is there already")
        draft = f"{folder}/{last}{_TMP}" if folder else f"{last}{_TMP}"
        written = self.files.write(draft, chunks)
        self.files.sync(draft)
        self.files.rename(draft, name)
        self.files.sync_folder(folder)
        return written

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """See ``Store``."""
        return self.files.read(name, offset, nbytes)

    def read_whole(self, name: str, most: int) -> bytes:
        """See ``Store``."""
        return self.files.read_whole(name, most)

    def size(self, name: str) -> int:
        """See ``Store``."""
        return self.files.size(name)

    def list(self, folder: str) -> list[str]:
        """See ``Store``; half-written files are left out."""
        return [name for name in self.files.list(folder) if not name.endswith(_TMP)]

    def remove(self, name: str) -> None:
        """See ``Store``."""
        folder = name.rpartition("/")[0]
        self.files.remove(name)
        self.files.sync_folder(folder)

    def remove_folder(self, folder: str) -> None:
        """See ``Store``."""
        for name in self.files.list(folder):
            if name.endswith("/"):
                self.remove_folder(f"{folder}/{name[:-1]}")
            else:
                self.files.remove(f"{folder}/{name}")
        self.files.remove_folder(folder)
        self.files.sync_folder(folder.rpartition("/")[0])

    def lock(self, name: str, wait: bool = False) -> AbstractContextManager[None]:
        """See ``Store``."""
        self._make(name.rpartition("/")[0])
        return self.files.lock(name, wait)

    def _make(self, folder: str) -> None:
        """The folder and its parents, their names durable."""
        self.files.make_folder("")
        above = ""
        for part in folder.split("/") if folder else ():
            inner = f"{above}/{part}" if above else part
            if self.files.make_folder(inner):
                self.files.sync_folder(above)
            above = inner
