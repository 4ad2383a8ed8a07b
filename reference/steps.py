"""Steps: byte-moving work that pauses once, half-way, so that a simulated clock can show races.

Moving all bytes when a verb starts hides a racing writer; half at the start and half at the end does not.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]
"""A generator that yields exactly once, half-way through its byte movement, and returns its result."""


def run(step: Step[T]) -> T:
    """Drive a step through and return its result; what every real backend does."""
    while True:
        try:
            next(step)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
