"""What the result page says was checked: the verdict in one sentence, groups of checks, and those that failed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync.cli.tables import CheckRow

Result = Mapping[str, Any]

COMMIT = re.compile(r"update \d+ commits")
AUDIT = re.compile(r"(rollout \d+, rank \d+), version \d+")


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence about all runs.

    Attributes:
        right: whether every check held.
        text: the sentence.
        parts: how many checks held, per run and between the runs.
    """

    right: bool
    text: str
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """Checks of one kind: what they compare, and per place (held, of how many), or None where there are none."""

    what: str
    counts: tuple[tuple[int, int] | None, ...]


def verdict(results: Sequence[Result], more: Sequence[CheckRow]) -> Verdict:
    """Green only when every check of every run held, those between the runs too, and there was one."""
    rows = [(where, row) for where, rows in _all(results, more) for row in rows]
    wrong = [(where, row) for where, row in rows if not row.ok]
    parts = tuple(
        f"{sum(row.ok for row in rows)} of {len(rows)} {where}" for where, rows in _all(results, more) if rows
    )
    if not rows:
        return Verdict(False, "Nothing was checked.", ())
    if wrong:
        where, row = wrong[0]
        first = f"{row.name}: {row.detail}" if row.detail else row.name
        return Verdict(False, f"{len(wrong)} of {len(rows)} checks failed, first {where}: {first}.", parts)
    if not all(result["values"] for result in results):
        return Verdict(True, "Every update committed; values = false, so no bytes were compared.", parts)
    return Verdict(True, f"All {len(rows)} checks hold, bit for bit.", parts)


def places(results: Sequence[Result], more: Sequence[CheckRow]) -> list[str]:
    """Where checks were made: on each backend, and between them."""
    return [where for where, rows in _all(results, more) if rows]


def groups(results: Sequence[Result], more: Sequence[CheckRow]) -> list[Group]:
    """All checks by kind, in the order in which the kinds first came, counted per place."""
    kinds: dict[str, dict[str, list[bool]]] = {}
    for where, rows in _all(results, more):
        for row in rows:
            kinds.setdefault(_kind(row.name), {}).setdefault(where, []).append(row.ok)
    counted = {
        what: {where: (sum(held), len(held)) for where, held in found.items()}
        for what, found in kinds.items()
    }
    return [
        Group(what, tuple(found.get(where) for where in places(results, more)))
        for what, found in counted.items()
    ]


def failed(results: Sequence[Result], more: Sequence[CheckRow]) -> list[tuple[str, CheckRow]]:
    """(where, check) of each one that failed, in full."""
    return [(where, row) for where, rows in _all(results, more) for row in rows if not row.ok]


def _all(results: Sequence[Result], more: Sequence[CheckRow]) -> list[tuple[str, list[CheckRow]]]:
    sides = [(f"on {result['backend']}", [CheckRow(**row) for row in result["checks"]]) for result in results]
    return [*sides, ("between them", list(more))]


def _kind(name: str) -> str:
    if COMMIT.fullmatch(name):
        return "updates commit"
    if audit := AUDIT.fullmatch(name):
        return f"bytes of {audit[1]} after each version"
    return re.sub(r"version \d+", "each version", name)
