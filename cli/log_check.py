"""Lines of ``--log-json`` against what is documented, and a run's updates told again from them."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from weightsync.cli.logs import KEYS, MESSAGE, JsonLines, attached

UPDATE = {"version", "reason", "kind", "members", "full", "changed", "elements", "density"} | {
    "full_bytes", "delta_bytes", "bits_per_change", "digest", "exposed_ns",
}  # fmt: skip
EVENTS: Mapping[str, tuple[str, set[str]]] = {
    "run_started": ("weightsync.run", {"scenario", "backend", "seed", "steps", "fingerprint"}),
    "run_ended": ("weightsync.run", {"backend", "ok", "verdict"}),
    "step": ("weightsync.run", {"step"}),
    "audit_failed": ("weightsync.run", {"version", "label", "dirty", "found"}),
    "update_started": ("weightsync.trainer", {"highest"}),
    "update_committed": ("weightsync.trainer", UPDATE),
    "update_aborted": ("weightsync.trainer", UPDATE),
    "rollout_lost": ("weightsync.trainer", {"rollout", "why"}),
    "rollout_back": ("weightsync.trainer", {"rollout"}),
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


def outcomes_of(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The updates of a result, told again from the lines of its log; digests of single ranks are not in it."""
    rows = []
    for line in found:
        if line["event"] in ("update_committed", "update_aborted"):
            row = {key: line[key] for key in UPDATE - {"digest", "exposed_ns"}}
            row |= {"update": line["update"], "committed": line["event"] == "update_committed"}
            rows.append(row)
    return rows
