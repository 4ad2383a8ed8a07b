"""Steps: byte-moving work that pauses once, half-way, so that a simulated clock can show races.

Moving all bytes when a verb starts hides a racing writer; half at the start and half at the end does not. At its
pause a step says what it touches, so that a clock can price it and a ledger can hold the interval against others.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Touched:
    """What one step reads and writes.

    Attributes:
        nbytes: bytes it reads or writes, whichever is more.
        reads: names of the rank's memories it reads: ``live``, ``slot0``, ``slot1``, ``weights``.
        writes: names of the rank's memories it writes.
    """

    nbytes: int
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


Step = Generator[Touched, None, T]
"""A generator that yields exactly once, half-way through its byte movement, and returns its result."""


def run(step: Step[T]) -> T:
    """Drive a step through and return its result; what every real backend does."""
    while True:
        try:
            next(step)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
