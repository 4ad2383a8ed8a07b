"""What a rank's process tells its launcher: one JSON object a line on stdout, in the order in which it happened."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from weightsync.cli.logs import pass_on

Tell = Callable[[Mapping[str, Any]], None]
"""Told the status of the trainer and its rollouts after each update, as ``TrainerStatus.to_dict`` writes it."""


def unheard(status: Mapping[str, Any]) -> None:
    """Nobody listens."""


class Wire:
    """A rank's way to its launcher; from any thread.

    Args:
        stream: the process's stdout.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._turn = threading.Lock()

    def done(self, updates: int) -> None:
        """So many updates are over."""
        self.say("done", updates)

    def status(self, status: Mapping[str, Any]) -> None:
        """See ``Tell``."""
        self.say("status", dict(status))

    def say(self, kind: str, word: object) -> None:
        """One word of a kind that ``hear`` knows."""
        line = json.dumps({kind: word}) + "\n"
        with self._turn:
            self._stream.write(line)
            self._stream.flush()


def hear(line: str, progress: Callable[[int], None], tell: Tell) -> None:
    """Hand on what a rank said; lines that are no words, which a library may have printed, are left out."""
    try:
        word = json.loads(line)
    except ValueError:
        return
    match word:
        case {"done": int(updates)}:
            progress(updates)
        case {"status": dict(status)}:
            tell(status)
        case {"log": dict(logged)}:
            pass_on(logged)
