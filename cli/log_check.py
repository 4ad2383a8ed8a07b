"""Lines of ``--log-json`` against what is documented, and a run's updates told again from them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightsync.cli.logs import KEYS, MESSAGE, JsonLines, attached

UPDATE = {"version", "reason", "kind", "members", "full", "squashed", "gone", "rejoined", "changed"} | {
    "elements", "density",
    "full_bytes", "delta_bytes", "bits_per_change", "digest", "exposed_ns",
}  # fmt: skip
OWN = {"digest", "exposed_ns"}
"""Keys of an update's line that its row in ``result.json`` has under another name, or measured around more."""

UNTOLD = {"forms", "digests", "tensors", "total_ns", "exposed_ns", "paused_ns"}
"""Keys of an update in ``result.json`` that no line tells, or not as measured there."""

EVENTS: Mapping[str, tuple[str, set[str]]] = {
    "run_started": ("weightsync.run", {"scenario", "backend", "seed", "steps", "fingerprint"}),
    "run_ended": ("weightsync.run", {"backend", "ok", "verdict"}),
    "step": ("weightsync.run", {"step"}),
    "audit_failed": ("weightsync.run", {"version", "label", "dirty", "found"}),
    "update_started": ("weightsync.trainer", {"highest"}),
    "update_committed": ("weightsync.trainer", UPDATE),
    "update_aborted": ("weightsync.trainer", UPDATE),
    "rollout_lost": ("weightsync.trainer", {"rollout", "why"}),
    "rollout_back": ("weightsync.trainer", {"rollout", "full"}),
    "rollout_dirty": ("weightsync.rollout", {"version", "why"}),
    "update_given_up": ("weightsync.rollout", {"version", "why"}),
}
"""Event -> its logger, and the keys that stand in its line beside those of every line."""


class _Keeper(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(json.loads(JsonLines().format(record)))


@contextlib.contextmanager
def lines() -> Iterator[list[dict[str, Any]]]:
    """Every line that is logged in the block, as whoever reads the file finds it."""
    keeper = _Keeper()
    with attached(keeper):
        yield keeper.found


def faults_of(line: Mapping[str, Any]) -> list[str]:
    """Where a line is not as documented; a message of a library, which is no event, has its text."""
    wrong = []
    if tuple(line)[:6] != KEYS:
        wrong.append(f"keys begin with {tuple(line)[:6]}")
    if line["event"] == MESSAGE:
        return wrong if isinstance(line.get(MESSAGE), str) else [*wrong, "a message has no text"]
    if line["event"] not in EVENTS:
        return [*wrong, f"event {line['event']} is none"]
    logger, keys = EVENTS[line["event"]]
    if line["logger"] != logger:
        wrong.append(f"{line['event']} is logged by {line['logger']}")
    more = set(line) - set(KEYS)
    if more != keys and not (line["event"] == "step" and keys <= more):
        wrong.append(f"{line['event']} has {sorted(more ^ keys)} too many or too few")
    ranked = line["event"] not in ("run_started", "run_ended")
    if not all(isinstance(line[key], int if ranked else type(None)) for key in ("time_ns", "update")):
        wrong.append(f"{line['event']}: time {line['time_ns']}, update {line['update']}")
    if isinstance(line["rank"], str) != ranked:
        wrong.append(f"{line['event']}: rank {line['rank']}")
    if line["level"] not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        wrong.append(f"level {line['level']}")
    return wrong


def rows_of(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The updates of a result, as far as a log can tell them."""
    return [{key: row[key] for key in row if key not in UNTOLD} for row in result["updates"]]


def outcomes_of(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The updates of a result, as ``rows_of`` has them, told again from the lines of its log."""
    rows = []
    for line in found:
        if line["event"] in ("update_committed", "update_aborted"):
            row = {key: line[key] for key in UPDATE - OWN}
            row |= {"update": line["update"], "committed": line["event"] == "update_committed"}
            rows.append(row)
    return rows


def gone_of(found: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """Number of each rollout that was lost and is not back by the end of a log, and why. ValueError if none can be so.

    A rollout is lost once before it is back, and back only after it was lost.
    """
    gone: dict[int, str] = {}
    for line in found:
        number = line.get("rollout")
        if line["event"] not in ("rollout_lost", "rollout_back"):
            continue
        if (number in gone) != (line["event"] == "rollout_back"):
            raise ValueError(
                f"update {line['update']}: {line['event']} of rollout {number}, gone are {sorted(gone)}"
            )
        if line["event"] == "rollout_lost":
            gone[line["rollout"]] = line["why"]
        else:
            del gone[line["rollout"]]
    return gone
