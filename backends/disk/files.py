"""The few file-system calls that everything here is made of, and the local file system behind them.

Nothing is durable before ``sync`` of the file and ``sync_folder`` of its folder; the callers order those, and a
test's file system that forgets what was not synced checks them.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol, TypeAlias

from weightsync.backends.disk.mapped import Mapped, MappedFile
from weightsync.backends.disk.names import FolderLocked, safe_name
from weightsync.reference.errors import PatchMismatch

Bytes: TypeAlias = "bytes | bytearray | memoryview"


class Files(Protocol):
    """One folder and what is below it. Names are relative; ``""`` is the folder itself."""

    def make_folder(self, name: str) -> bool:
        """True if it was made, False if it was there."""

    def write(self, name: str, chunks: Iterable[Bytes]) -> int:
        """A new file, or an old one anew, of these bytes; returns how many. Not durable yet."""

    def sync(self, name: str) -> None:
        """Return once the file's bytes are durable; its name may not be."""

    def sync_folder(self, name: str) -> None:
        """Return once the folder's names are durable."""

    def rename(self, name: str, to: str) -> None:
        """Another name for a file, replacing what had it."""

    def list(self, name: str) -> list[str]:
        """Names in a folder, sorted, those of folders with ``/`` at their end; none if it is not there."""

    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError if there is none."""

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Exactly these bytes; PatchMismatch when the file is shorter."""

    def read_whole(self, name: str, most: int) -> bytes:
        """All of a file, as it was at one instant; PatchMismatch when it has more than ``most`` bytes."""

    def remove(self, name: str) -> None:
        """A file goes; it may be gone already."""

    def remove_folder(self, name: str) -> None:
        """An empty folder goes; it may be gone already."""

    def lock(self, name: str, wait: bool) -> AbstractContextManager[None]:
        """Exclusive between processes and threads, free again when its holder dies; FolderLocked if not ``wait``
        and it is held.
        """

    def map(self, name: str) -> Mapped:
        """A file's memory, shared with whoever else maps it."""


class LocalFiles:
    """A folder of this machine's file system. No link below it is followed, and only regular files are opened."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)

    def make_folder(self, name: str) -> bool:
        """See ``Files``; the root's own parents are made too."""
        if not name:
            there = self.root.is_dir()
            self.root.mkdir(parents=True, exist_ok=True)
            return not there
        with self._parent(name) as (parent, last):
            try:
                os.mkdir(last, dir_fd=parent)
            except FileExistsError:
                os.close(_open_folder(last, parent, name))
                return False
        return True

    def write(self, name: str, chunks: Iterable[Bytes]) -> int:
        """See ``Files``."""
        done = 0
        with os.fdopen(self._open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb", buffering=0) as file:
            for chunk in chunks:
                view = memoryview(chunk).cast("B")
                while view.nbytes:
                    written = file.write(view)
                    view = view[written:]
                    done += written
        return done

    def sync(self, name: str) -> None:
        """See ``Files``."""
        handle = self._open(name, os.O_RDWR)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def sync_folder(self, name: str) -> None:
        """See ``Files``."""
        handle = self._folder(name)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, name: str, to: str) -> None:
        """See ``Files``."""
        with self._parent(name) as (source, last), self._parent(to) as (target, new):
            os.replace(last, new, src_dir_fd=source, dst_dir_fd=target)

    def list(self, name: str) -> list[str]:
        """See ``Files``; links and whatever else is neither file nor folder are left out."""
        try:
            handle = self._folder(name)
        except FileNotFoundError:
            return []
        found = []
        try:
            with os.scandir(handle) as entries:
                names = [entry.name for entry in entries]
            for entry in names:
                try:
                    mode = os.stat(entry, dir_fd=handle, follow_symlinks=False).st_mode
                except FileNotFoundError:
                    continue  # it went meanwhile
                if stat.S_ISDIR(mode):
                    found.append(entry + "/")
                elif stat.S_ISREG(mode):
                    found.append(entry)
        finally:
            os.close(handle)
        return sorted(found)

    def size(self, name: str) -> int:
        """See ``Files``."""
        handle = self._open(name, os.O_RDONLY)
        try:
            return os.fstat(handle).st_size
        finally:
            os.close(handle)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """See ``Files``."""
        handle = self._open(name, os.O_RDONLY)
        try:
            return _read(handle, name, offset, nbytes)
        finally:
            os.close(handle)

    def read_whole(self, name: str, most: int) -> bytes:
        """See ``Files``."""
        handle = self._open(name, os.O_RDONLY)
        try:
            return _read(handle, name, 0, at_most(name, os.fstat(handle).st_size, most))
        finally:
            os.close(handle)

    def remove(self, name: str) -> None:
        """See ``Files``."""
        try:
            with self._parent(name) as (parent, last):
                os.unlink(last, dir_fd=parent)
        except FileNotFoundError:
            pass

    def remove_folder(self, name: str) -> None:
        """See ``Files``."""
        try:
            with self._parent(name) as (parent, last):
                os.rmdir(last, dir_fd=parent)
        except FileNotFoundError:
            pass

    @contextmanager
    def lock(self, name: str, wait: bool) -> Iterator[None]:
        """See ``Files``; flock on a file that stays."""
        handle = self._open(name, os.O_RDWR | os.O_CREAT)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                raise FolderLocked(
                    f"{self.root / name} is locked by another process; wait for it, or end it"
                ) from None
            yield
        finally:
            os.close(handle)

    def map(self, name: str) -> Mapped:
        """See ``Files``."""
        handle = self._open(name, os.O_RDWR)
        try:
            return MappedFile(handle, os.fstat(handle).st_size)
        finally:
            os.close(handle)

    @contextmanager
    def _parent(self, name: str) -> Iterator[tuple[int, str]]:
        folder, _, last = safe_name(name).rpartition("/")
        handle = self._folder(folder)
        try:
            yield handle, last
        finally:
            os.close(handle)

    def _folder(self, name: str) -> int:
        """Handle of a folder, reached without following a link."""
        handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        for part in safe_name(name).split("/") if name else ():
            try:
                inner = _open_folder(part, handle, name)
            finally:
                os.close(handle)
            handle = inner
        return handle

    def _open(self, name: str, flags: int) -> int:
        with self._parent(name) as (parent, last):
            try:
                handle = os.open(last, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=parent)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
                    raise _not_followed(name) from None
                raise
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise _not_followed(name)
        return handle


def at_most(name: str, size: int, most: int) -> int:
    """``size``; PatchMismatch when it is more than ``most``."""
    if size > most:
        raise PatchMismatch(f"file {name!r} has {size} bytes, expected at most {most}; do not use it")
    return size


def _read(handle: int, name: str, offset: int, nbytes: int) -> bytes:
    size = os.fstat(handle).st_size
    if offset < 0 or nbytes < 0 or offset + nbytes > size:
        raise PatchMismatch(
            f"file {name!r} has {size} bytes, expected at least {offset + nbytes}; it was cut short"
        )
    parts: list[bytes] = []
    while nbytes and (part := os.pread(handle, nbytes, offset)):
        parts.append(part)
        offset, nbytes = offset + len(part), nbytes - len(part)
    if nbytes:
        raise PatchMismatch(f"file {name!r} ended {nbytes} bytes early; it was cut short while it was read")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _open_folder(part: str, parent: int, name: str) -> int:
    try:
        return os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise _not_followed(name) from None
        raise


def _not_followed(name: str) -> PatchMismatch:
    return PatchMismatch(
        f"{name!r} is a link, a device or another special file, expected a plain one; links are not followed here"
    )
