"""Name -> module of every backend, imported only when asked for; a failed import is remembered with its reason.

Other packages add backends through the entry point group ``weightsync.backends``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

from weightsync.reference.errors import BackendUnavailable

GROUP = "weightsync.backends"

BUILT_IN: Mapping[str, str] = {
    "inprocess": "weightsync.backends.inprocess:InprocessWorld",
    "gloo": "weightsync.backends.gloo:GlooWorld",
}
"""Backend -> where its world is: what makes the verbs of its ranks."""


class Entry(Protocol):
    """What is used of ``importlib.metadata.EntryPoint``."""

    @property
    def name(self) -> str:
        """Name of the backend."""

    @property
    def value(self) -> str:
        """``module:attribute``."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a backend is not here.

    Attributes:
        module: what was imported.
        error: what that raised.
    """

    module: str
    error: Exception

    def __str__(self) -> str:
        return f"{self.module} could not be imported: {type(self.error).__name__}: {self.error}"


class Registry:
    """The backends of one installation.

    Args:
        entries: backends of other packages; by default those that are installed. A name of ours keeps its meaning.
    """

    def __init__(self, entries: Iterable[Entry] | None = None) -> None:
        found = entry_points(group=GROUP) if entries is None else entries
        self._places = {entry.name: entry.value for entry in found} | dict(BUILT_IN)
        self._failures: dict[str, Failure] = {}

    def names(self) -> tuple[str, ...]:
        """Every known name, ours first, whether or not it can be imported here."""
        return (*BUILT_IN, *sorted(self._places.keys() - BUILT_IN.keys()))

    def load(self, name: str) -> Any:
        """The world of a backend.

        Raises:
            BackendUnavailable: the name is unknown, or its module could not be imported; says what there is, or why.
        """
        if name not in self._places:
            raise BackendUnavailable(
                f"backend {name!r} is unknown; expected one of {', '.join(self.names())}"
            )
        module, _, attribute = self._places[name].partition(":")
        try:
            world = getattr(import_module(module), attribute) if name not in self._failures else None
        except Exception as error:  # a device's module raises whatever its driver raises
            self._failures[name] = Failure(module, error)
            raise self._unavailable(name) from error
        if world is None:
            raise self._unavailable(name)
        return world

    def why_not(self, name: str) -> Failure | None:
        """None when the backend can be loaded here, else the reason; raises BackendUnavailable for an unknown name."""
        try:
            self.load(name)
        except BackendUnavailable:
            if name not in self._failures:
                raise
        return self._failures.get(name)

    def _unavailable(self, name: str) -> BackendUnavailable:
        return BackendUnavailable(
            f"backend {name!r} is not available here: {self._failures[name]}; install what it needs, or take "
            f"another of {', '.join(self.names())}"
        )
