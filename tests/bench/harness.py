"""Rows of a benchmark: how they are timed, printed and written down.

A file ``bench_NAME.py`` beside this one exports ``rows()``, which yields ``Row``; before that it checks, bit
for bit, that what it times gives equal results.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        name: what is done, such as ``diff 1.0%``.
        unit: of ours, theirs and floor; with a ``/s`` in it more is better, else less is.
        ours: our number.
        compared: what ours is compared with.
        theirs: its number, on the same data.
        floor: what no implementation on this machine passes, measured here, or None where nobody knows one.
        floor_of: what the floor is.
        conditions: what the numbers depend on.
    """

    name: str
    unit: str
    ours: float
    compared: str
    theirs: float
    conditions: Mapping[str, str | int | float]
    floor: float | None = None
    floor_of: str = ""

    @property
    def ratio(self) -> float:
        """How many times better ours is; below 1 it is worse."""
        return self.ours / self.theirs if "/s" in self.unit else self.theirs / self.ours

    def as_json(self) -> dict[str, object]:
        """The row as ``bench.json`` has it."""
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": self.ours,
            "compared_with": self.compared,
            "theirs": self.theirs,
            "ratio": self.ratio,
            "floor": self.floor,
            "floor_of": self.floor_of or None,
            "conditions": dict(self.conditions),
        }


def compete(contestants: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, float]:
    """Median milliseconds of one call of each contestant.

    They take turns, so that a busy moment of the machine hits all of them; the first round is thrown away.
    """
    taken: dict[str, list[int]] = {name: [] for name in contestants}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds + 1):
            for name, call in contestants.items():
                start = time.perf_counter_ns()
                call()
                taken[name].append(time.perf_counter_ns() - start)
    finally:
        if collecting:
            gc.enable()
    return {name: statistics.median(times[1:]) / 1e6 for name, times in taken.items()}


def machine() -> dict[str, str | int]:
    """What every row of this run shares."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        cpu = models[0] if models else cpu
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        "python": platform.python_version(),
        "torch": version("torch"),
        "numpy": version("numpy"),
        "weightsync": version("weightsync"),
    }


def table(rows: Iterable[Row]) -> str:
    """The rows as aligned text."""
    lines: list[Sequence[str]] = [("row", "ours", "compared with", "theirs", "ratio", "floor", "unit")]
    for row in rows:
        floor = "-" if row.floor is None else f"{_short(row.floor)} ({row.floor_of})"
        theirs, ratio = _short(row.theirs), f"{row.ratio:.2f}x"
        lines.append((row.name, _short(row.ours), row.compared, theirs, ratio, floor, row.unit))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.3g}"
