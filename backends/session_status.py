"""What a receiver session says of its rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """What one rollout rank holds.

    Attributes:
        version: the label: the version whose bits it holds, unless it is dirty; 0 before the first.
        dirty: None, or why the weights may be none of a version's.
        highest: the highest version number ever tried.
        receiving: the version in progress, or None.
        prepared: True while that version is applied and waits for ``commit`` or ``abort``.
        may_generate: True while the weights are exactly those of ``version``. A rollout may generate while
            this is so on all its ranks, with one version.
    """

    version: int
    dirty: str | None
    highest: int
    receiving: int | None
    prepared: bool
    may_generate: bool
