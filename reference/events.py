"""Events of the protocol, as records of the standard ``logging`` under loggers named ``weightsync.*``.

A record carries ``event`` (a stable name, see ``docs/running.md``), ``rank``, ``update``, ``time_ns`` on the rank's
own clock, and ``data``, a JSON-ready mapping. No handler is set here but the null handler: who wants to read the
records attaches one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weightsync.reference.rank import Verbs

TRAINER, ROLLOUT = "weightsync.trainer", "weightsync.rollout"
"""The loggers of the two halves of the protocol."""

logging.getLogger("weightsync").addHandler(logging.NullHandler())


def log(
    logger: str,
    level: int,
    event: str,
    data: Mapping[str, Any],
    *,
    rank: str | None = None,
    update: int | None = None,
    time_ns: int | None = None,
) -> None:
    """One record; its message, for people, is the event with its data."""
    target = logging.getLogger(logger)
    if target.isEnabledFor(level):
        said = ", ".join(f"{key} {value}" for key, value in data.items() if value not in (None, ""))
        known = {"event": event, "rank": rank, "update": update, "time_ns": time_ns, "data": dict(data)}
        where = "" if rank is None else f"{rank}: "
        target.log(level, "%s%s%s", where, event, f" ({said})" if said else "", extra=known)


def log_of(verbs: Verbs, logger: str, level: int, event: str, **data: Any) -> None:
    """One record of a rank, in its present update, now."""
    log(logger, level, event, data, rank=str(verbs.me), update=verbs.update, time_ns=verbs.now_ns())
