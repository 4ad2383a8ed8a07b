"""A file in memory, written in place."""

from __future__ import annotations

import mmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Mapped(Protocol):
    """A file in memory, written in place."""

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """uint8 (nbytes,), in the file's memory; to be read only."""

    def scatter(self, offset: int, positions: NDArray[Any] | slice, values: NDArray[Any]) -> None:
        """Write ``values`` at element ``positions``, counted from byte ``offset`` in elements of their dtype."""

    def sync(self) -> None:
        """Return once what was written is durable."""

    def close(self) -> None:
        """Let the memory go; views of it must be gone."""


class MappedFile:
    """``Mapped`` over an open file; the handle may be closed at once."""

    def __init__(self, handle: int, size: int) -> None:
        self._map = mmap.mmap(handle, size) if size else None
        self._bytes = np.frombuffer(self._map if self._map is not None else b"", np.uint8)

    def view(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """See ``Mapped``."""
        return self._bytes[offset : offset + nbytes]

    def scatter(self, offset: int, positions: NDArray[Any] | slice, values: NDArray[Any]) -> None:
        """See ``Mapped``."""
        whole = self._bytes[offset:]
        usable = whole[: whole.size // values.itemsize * values.itemsize]
        usable.view(values.dtype)[positions] = values

    def sync(self) -> None:
        """See ``Mapped``."""
        if self._map is not None:
            self._map.flush()

    def close(self) -> None:
        """See ``Mapped``."""
        self._bytes = np.empty(0, np.uint8)
        self._map = None  # unmapped once the last view is gone
