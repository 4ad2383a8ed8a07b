"""``--log-json``: what the loggers named ``weightsync.*`` say, as one JSON object a line."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from weightsync.cli.record import RankRecord
from weightsync.cli.scenario import Scenario
from weightsync.cli.status import owns_run
from weightsync.cli.verify import Audit
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.events import log, log_of
from weightsync.reference.rank import Verbs
from weightsync.reference.trainer import Trainer

RUN = "weightsync.run"
"""The logger of a run, beside those of the protocol."""

KEYS = ("time_ns", "level", "logger", "event", "rank", "update")
"""The first keys of every line; those of the event follow."""

MESSAGE = "message"
"""The event of a record that has no other: its text is under ``message``."""


class LogFileError(WeightSyncError):
    """The file of ``--log-json`` cannot be written."""


def line_of(record: logging.LogRecord) -> dict[str, Any]:
    """One record as a line, before it is text; a number that JSON does not have stands as its name."""
    known = vars(record)
    data = known.get("data", {"message": record.getMessage()})
    values = (known.get("time_ns"), record.levelname, record.name, known.get("event", MESSAGE))
    line = dict(zip(KEYS, (*values, known.get("rank"), known.get("update")), strict=True))
    return line | {key: _plain(value) for key, value in data.items()}


def record_of(line: Mapping[str, Any]) -> logging.LogRecord:
    """The record that ``line_of`` wrote in another process."""
    data = {key: value for key, value in line.items() if key not in KEYS}
    known = {key: line[key] for key in ("time_ns", "event", "rank", "update")}
    level = logging.getLevelNamesMapping()[line["level"]]
    text = f"{line['event']} {data}"
    return logging.makeLogRecord(
        {
            "name": line["logger"],
            "levelname": line["level"],
            "levelno": level,
            "msg": text,
            "data": data,
            **known,
        }
    )


class JsonLines(logging.Formatter):
    """One JSON object a record."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        return json.dumps(line_of(record))


class ToLauncher(logging.Handler):
    """Hands every record of a rank's process to its launcher.

    Args:
        say: takes the kind of a word and the word; see ``telling.Wire.say``.
    """

    def __init__(self, say: Callable[[str, object], None]) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        """Hand it over."""
        try:
            self._say("log", line_of(record))
        except Exception:
            self.handleError(record)


def through(say: Callable[[str, object], None]) -> None:
    """From now on this process, a rank's, logs to its launcher, and warnings to its stderr too."""
    errors = logging.StreamHandler()
    errors.setLevel(logging.WARNING)
    root = logging.getLogger("weightsync")
    root.setLevel(logging.DEBUG)
    for handler in (ToLauncher(say), errors):
        root.addHandler(handler)


def pass_on(line: Mapping[str, Any]) -> None:
    """Log here what a rank's process logged."""
    record = record_of(line)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


@contextlib.contextmanager
def log_json(target: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Write every event of the block to a file, or to stderr for ``-``; None writes nothing.

    Raises:
        LogFileError: the file cannot be opened.
    """
    if target is None or not owns_run(environ):
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stream = (
                sys.stderr if target == "-" else stack.enter_context(Path(target).open("w", encoding="utf-8"))
            )
        except OSError as error:
            raise LogFileError(
                f"--log-json {target} cannot be written: {error.strerror}; name a file in a folder that is there"
            ) from None
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonLines())
        stack.enter_context(attached(handler))
        yield


@contextlib.contextmanager
def attached(handler: logging.Handler) -> Iterator[None]:
    """Hand every record of the block to ``handler``, down to debug."""
    root = logging.getLogger("weightsync")
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(before)


# ---- events of a run ------------------------------------------------------------------------------------------------


def step(half: Trainer, record: RankRecord) -> None:
    """The optimizer step before the next update, as the curve has it; the lead's."""
    if half.lead and record.curve:
        verbs = half.verbs
        update, now_ns = half.updates + 1, verbs.now_ns()
        log(RUN, logging.INFO, "step", record.curve[-1], rank=str(verbs.me), update=update, time_ns=now_ns)


def audited(audit: Audit, verbs: Verbs) -> None:
    """A rank's bytes were compared; logged when they are not the trainer's."""
    if not audit.check.ok:
        about = {"version": audit.version, "label": audit.label, "dirty": audit.dirty}
        log_of(verbs, RUN, logging.ERROR, "audit_failed", **about, found=audit.check.detail)


class Ended(Protocol):
    """Told the verdict of a run."""

    def __call__(self, ok: bool, text: str) -> None:
        """The run is over."""


@contextlib.contextmanager
def logged(scenario: Scenario, backend: str, seed: int | None) -> Iterator[Ended]:
    """Log the start and the end of the run in the block: its verdict, which is told, or the error that ended it."""
    work = scenario.workload

    def event(level: int, name: str, **data: Any) -> None:
        # No rank's clock runs yet, or any more.
        log(RUN, level, name, data | {"backend": backend})

    def ended(ok: bool, text: str) -> None:
        event(logging.INFO if ok else logging.ERROR, "run_ended", ok=ok, verdict=text)

    about = {"scenario": scenario.name, "seed": work.seed if seed is None else seed, "steps": work.steps}
    event(logging.INFO, "run_started", **about, fingerprint=scenario.fingerprint())
    try:
        yield ended
    except BaseException as error:
        ended(False, str(error) or type(error).__name__)
        raise


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
