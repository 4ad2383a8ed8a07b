"""The result page: one or two runs of a scenario as one self-contained HTML file and its pictures. Pure rendering."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from weightsync.cli import canvas, page_checks, pictures
from weightsync.cli.gantt import gantt, typical
from weightsync.cli.lanes import place
from weightsync.cli.pictures import HIDDEN, clock, percent
from weightsync.cli.result import Result, Run
from weightsync.cli.tables import CheckRow, digest_text, format_bytes, in_order

FEW = 12
"""Up to this many updates, their table stands open."""


@dataclass(frozen=True, slots=True)
class Page:
    """What ``render`` makes.

    Attributes:
        html: the page.
        pngs: name -> picture, the same as in the page, in light colours.
    """

    html: str
    pngs: Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of the head of the page: what it is, its value, and what it depends on."""

    label: str
    value: str
    note: str


def render(runs: Sequence[Run], more: Sequence[CheckRow] = ()) -> Page:
    """The page of ``runs``, which ran one scenario; ``more`` are checks between them."""
    results = [run.result for run in runs]
    first = results[0]
    drawings = {
        "curves": pictures.curves(first),
        "sizes": pictures.sizes(first),
        "phases": [pictures.phases([(side(run), run.result) for run in runs])],
        "gantts": [found for run in runs if (found := _gantt(run, len(runs) > 1)) is not None],
    }
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"clock": clock, "bytes": format_bytes, "percent": percent}
    html = environment.from_string(_data("page.html")).render(
        css=_variables() + _data("page.css"),
        scenario=first["scenario"],
        result=first,
        verdict=page_checks.verdict(results, more),
        about=_about(first),
        figures=key_figures(first),
        times=key_times(runs),
        pictures={key: [_inline(one) for one in some] for key, some in drawings.items()},
        updates=[_row(update) for update in first["updates"]],
        few=len(first["updates"]) <= FEW,
        sides=[
            {"title": f"{side(run)} on {run.result['backend']}", "times": run.record.conditions}
            for run in runs
        ],
        phases=_phases(results),
        places=page_checks.places(results, more),
        checks=page_checks.groups(results, more),
        failed=page_checks.failed(results, more),
        events=(events := [_event(one) for one in first.get("events", ())]),
        event_keys=list(dict.fromkeys(key for one in events for key in one)),
        conditions=_conditions(runs),
        folders=[run.folder for run in runs],
        pngs=[one.name for some in drawings.values() for one in some],
    )
    return Page(html, {one.name: canvas.png(one) for some in drawings.values() for one in some})


def side(run: Run) -> str:
    """``modelled`` for a run on simulated time, else ``measured``."""
    return "modelled" if run.result["backend"] == "sim" else "measured"


def _event(event: dict[str, Any]) -> dict[str, str]:
    """An event as texts: ``at_ns`` as a time of the run's clock, lists joined, flags as yes or nothing."""
    texts = {}
    for key, value in event.items():
        if key == "at_ns":
            texts["at"] = clock(value)
        elif isinstance(value, bool):
            texts[key] = "yes" if value else ""
        else:
            texts[key] = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return texts


def key_figures(result: Result) -> list[Figure]:
    """The numbers at the head of the page that no clock decides."""
    updates = result["updates"]
    committed = [one for one in updates if one["committed"]]
    deltas = [one["density"] for one in committed if one["kind"] != "full"]
    sent = sum(one["full_bytes"] + one["delta_bytes"] for one in updates)
    dense = result["dense_bytes"] * len(updates)
    last = str(committed[-1]["version"]) if committed else "none"
    return [
        Figure("updates", f"{len(committed)} of {len(updates)}", "committed"),
        Figure("last version", last, "the newest that was committed"),
        Figure(
            "bytes broadcast", format_bytes(sent), f"{percent(sent / dense)} of {format_bytes(dense)} dense"
        ),
        Figure(
            "median density",
            percent(statistics.median(deltas)) if deltas else "-",
            "of the elements, full updates left out" if deltas else "every update was a full one",
        ),
    ]


def key_times(runs: Sequence[Run]) -> list[Figure]:
    """What the median update of every run costs the trainer and the rollouts."""
    found = []
    for run in runs:
        update = typical(run.result["updates"])
        if update is None:
            continue
        which = f"{side(run)} on {run.result['backend']}, update {update['update']}"
        found.append(Figure("training waits", clock(update["exposed_ns"]), which))
        if update["paused_ns"]:
            found.append(Figure("generation paused", clock(max(update["paused_ns"].values())), which))
    return found


def _about(result: Result) -> str:
    """Model, layouts and workload in one sentence."""
    scenario = result["scenario"]
    rollouts = ", ".join(
        f"{'fused' if one['fused'] else 'unfused'} TP {one['tp']}" for one in scenario["rollouts"]
    )
    return (
        f"{result['elements']:,} elements in {result['tensors']} tensors; trainer TP {scenario['trainer']['tp']}, "
        f"rollouts: {rollouts}; workload {scenario['workload']['kind']}, {scenario['workload']['steps']} steps, "
        f"receive = {scenario['policy']['receive']}."
    )


def _gantt(run: Run, several: bool) -> canvas.Drawing | None:
    update = typical(run.result["updates"])
    if update is None:
        return None
    backend, number = run.result["backend"], run.result["updates"].index(update)
    calls = [one.inside[number] for one in run.record.trainers]
    return gantt(
        place(run.record.trace, run.record.job),
        update["update"],
        min(start for start, _ in calls),
        max(end for _, end in calls),
        f"gantt-{backend}" if several else "gantt",
        f"{side(run)} on {backend}",
    )


def _inline(drawing: canvas.Drawing) -> dict[str, Any]:
    return {
        "name": drawing.name, "title": drawing.title, "svg": canvas.svg(drawing), "wide": drawing.wide,
    }  # fmt: skip


def _row(update: Mapping[str, Any]) -> dict[str, Any]:
    digests = {rank: int(digest, 16) for rank, digest in update["digests"].items()}
    return {
        **update,
        "bytes": update["full_bytes"] + update["delta_bytes"],
        "digest": digest_text(digests).plain,
    }


def _phases(results: Sequence[Result]) -> list[dict[str, Any]]:
    """One row per phase, verbs first, then training and generation, with a cell per run."""
    found = []
    for key, hidden in (("phases_ns", HIDDEN), ("job_ns", ())):
        for phase in in_order(phase for one in results for phase in one[key] if phase not in hidden):
            cells = [clock(one[key][phase]) if phase in one[key] else "-" for one in results]
            found.append({"phase": phase, "cells": cells})
    return found


def _conditions(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Rows of (name, a cell per run); one cell where it is the same for all."""
    rows: dict[str, list[str]] = {}
    for run in runs:
        said = run.conditions
        machine = said["machine"]
        packages = ", ".join(f"{name} {found}" for name, found in said["packages"].items() if found)
        for name, cell in (
            ("command", _command(said["command"])),
            ("date", said["date"]),
            ("seed", str(said["seed"])),
            ("times", said["times"]),
            ("machine", f"{machine['platform']}, {machine['processor']}, {machine['cpus']} CPUs"),
            ("host", machine["host"]),
            ("load before", ", ".join(map(str, machine["load"] or ["-"]))),
            ("Python", said["python"]),
            ("packages", packages),
        ):
            rows.setdefault(name, []).append(cell)
    return [(name, cells[:1] if len(set(cells)) == 1 else cells) for name, cells in rows.items()]


def _command(argv: Sequence[str]) -> str:
    """The command line without the folder that the command lies in."""
    name = Path(argv[0]).name if argv else ""
    return shlex.join(["weightsync" if name == "main.py" else name, *argv[1:]])


def _variables() -> str:
    """The colours as CSS variables, for light and for dark."""
    light, dark = (
        "".join(f"--{name}:{pair[index]};" for name, pair in canvas.COLOURS.items()) for index in (0, 1)
    )
    return f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _data(name: str) -> str:
    return (files("weightsync.cli") / "data" / name).read_text(encoding="utf-8")
