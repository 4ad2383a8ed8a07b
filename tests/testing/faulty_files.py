"""A file system in memory that can be killed at every write, rename and fsync, and forgets what was not synced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from weightsync.backends.disk.files import Bytes, at_most
from weightsync.backends.disk.mapped import Mapped
from weightsync.backends.disk.names import FolderLocked, safe_name
from weightsync.reference.errors import PatchMismatch

When = Literal["before", "half", "after"]
Lost = Literal["all", "none", "data", "names"]
"""What a power cut takes of what was not synced: everything, nothing, only bytes, only names."""


class Killed(BaseException):
    """The process ends here."""


@dataclass(eq=False)
class _File:
    now: bytearray = field(default_factory=bytearray)
    durable: bytes = b""


@dataclass(eq=False)
class Disk:
    """What outlives a process: files and folders, as they are and as they would be after a power cut."""

    names: dict[str, _File] = field(default_factory=dict)
    durable_names: dict[str, _File] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {""})
    durable_folders: set[str] = field(default_factory=lambda: {""})

    def image(self) -> tuple[object, ...]:
        """Equal for disks on which a next process finds, and may lose, the same."""
        names = tuple(sorted((name, bytes(file.now), file.durable) for name, file in self.names.items()))
        return names, frozenset(self.durable_names), frozenset(self.folders), frozenset(self.durable_folders)

    def after_crash(self, lost: Lost) -> Disk:
        """A copy of the disk as the next process finds it."""
        copy = deepcopy(self)
        if lost in ("all", "names"):
            copy.names, copy.folders = dict(copy.durable_names), set(copy.durable_folders)
        for file in {id(one): one for one in (*copy.names.values(), *copy.durable_names.values())}.values():
            if lost in ("all", "data"):
                file.now = bytearray(file.durable)
            file.durable = bytes(file.now)
        copy.names = {name: file for name, file in copy.names.items() if _folder(name) in copy.folders}
        copy.durable_names, copy.durable_folders = dict(copy.names), set(copy.folders)
        return copy


class FaultyFiles:
    """``Files`` over a ``Disk`` that raises ``Killed`` at one operation, and ever after.

    Args:
        disk: where things are.
        at: number of the operation, from 0; None for never.
        when: before it, half-way through, or after it.

    Attributes:
        done: the operations so far, by name.
    """

    def __init__(self, disk: Disk, at: int | None = None, when: When = "before") -> None:
        self.disk = disk
        self.at, self.when = at, when
        self.done: list[str] = []
        self._locked: set[str] = set()

    def make_folder(self, name: str) -> bool:
        """See ``Files``."""
        self._folder_there(_folder(name))
        if name in self.disk.folders:
            return False
        self._operate(f"make_folder {name}", lambda: self.disk.folders.add(name))
        return True

    def write(self, name: str, chunks: Iterable[Bytes]) -> int:
        """See ``Files``."""
        self._folder_there(_folder(safe_name(name)))
        file = _File()
        self._operate(f"create {name}", lambda: self.disk.names.__setitem__(name, file))
        for chunk in chunks:
            raw = bytes(memoryview(chunk).cast("B"))

            def all_of_it(raw: bytes = raw) -> None:
                file.now += raw

            def half(raw: bytes = raw) -> None:
                file.now += raw[: len(raw) // 2]

            self._operate(f"write {name}", all_of_it, half)
        return len(file.now)

    def sync(self, name: str) -> None:
        """See ``Files``."""
        file = self._file(name)
        self._operate(f"sync {name}", lambda: _sync(file))

    def sync_folder(self, name: str) -> None:
        """See ``Files``; a rename is durable with the folder of either name, both here being one."""

        def effect() -> None:
            disk = self.disk
            here = [one for one in {*disk.names, *disk.durable_names} if _folder(one) == name]
            for one in here:
                disk.durable_names.pop(one, None)
                if one in disk.names:
                    disk.durable_names[one] = disk.names[one]
            disk.durable_folders -= {one for one in disk.durable_folders if one and _folder(one) == name}
            disk.durable_folders |= {one for one in disk.folders if one and _folder(one) == name}

        self._folder_there(name)
        self._operate(f"sync_folder {name}", effect)

    def rename(self, name: str, to: str) -> None:
        """See ``Files``."""
        self._file(name)
        self._operate(
            f"rename {name} {to}", lambda: self.disk.names.__setitem__(to, self.disk.names.pop(name))
        )

    def list(self, name: str) -> list[str]:
        """See ``Files``."""
        files = [one.rpartition("/")[2] for one in self.disk.names if _folder(one) == name]
        below = [one.rpartition("/")[2] + "/" for one in self.disk.folders if one and _folder(one) == name]
        return sorted(files + below)

    def size(self, name: str) -> int:
        """See ``Files``."""
        return len(self._file(name).now)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """See ``Files``."""
        raw = bytes(self._file(name).now[offset : offset + nbytes])
        if len(raw) != nbytes:
            raise PatchMismatch(f"file {name!r} was cut short, expected {nbytes} bytes at {offset}")
        return raw

    def read_whole(self, name: str, most: int) -> bytes:
        """See ``Files``."""
        return self.read(name, 0, at_most(name, self.size(name), most))

    def remove(self, name: str) -> None:
        """See ``Files``."""
        if name in self.disk.names:
            self._operate(f"remove {name}", lambda: self.disk.names.pop(name))

    def remove_folder(self, name: str) -> None:
        """See ``Files``."""
        if name in self.disk.folders:
            self._operate(f"remove_folder {name}", lambda: self.disk.folders.discard(name))

    @contextmanager
    def lock(self, name: str, wait: bool) -> Iterator[None]:
        """See ``Files``; locks die with the process, so they are not on the disk."""
        if name in self._locked:
            raise FolderLocked(f"{name} is locked; one process never waits for itself")
        self._locked.add(name)
        try:
            yield
        finally:
            self._locked.discard(name)

    def map(self, name: str) -> Mapped:
        """See ``Files``."""
        return _FaultyMap(self, name, self._file(name))

    def _operate(
        self, name: str, effect: Callable[[], object], half: Callable[[], object] | None = None
    ) -> None:
        number = len(self.done)
        self.done.append(name)
        if self.at is not None and number > self.at:
            raise Killed
        if number != self.at:
            effect()
            return
        if self.when == "after":
            effect()
        elif self.when == "half" and half is not None:
            half()
        raise Killed

    def _file(self, name: str) -> _File:
        if name not in self.disk.names:
            raise FileNotFoundError(name)
        return self.disk.names[name]

    def _folder_there(self, name: str) -> None:
        if name not in self.disk.folders:
            raise FileNotFoundError(name)


class _FaultyMap:
    def __init__(self, files: FaultyFiles, name: str, file: _File) -> None:
        self._files, self._name, self._file = files, name, file

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(bytes(self._file.now[offset : offset + nbytes]), np.uint8)

    def scatter(self, offset: int, positions: NDArray[Any] | slice, values: NDArray[Any]) -> None:
        at = np.arange(values.size) if isinstance(positions, slice) else positions

        def write(count: int) -> None:
            raw = np.frombuffer(bytes(self._file.now[offset:]), np.uint8).copy()
            whole = raw[: raw.size // values.itemsize * values.itemsize].view(values.dtype)
            whole[at[:count]] = values[:count]
            self._file.now[offset:] = raw.tobytes()

        self._files._operate(
            f"scatter {self._name}", lambda: write(values.size), lambda: write(values.size // 2)
        )

    def sync(self) -> None:
        self._files._operate(f"sync {self._name}", lambda: _sync(self._file))

    def close(self) -> None:
        pass


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _sync(file: _File) -> None:
    file.durable = bytes(file.now)
