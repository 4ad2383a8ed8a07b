"""``weightsync status``: a run's folder as a table, as JSON, once or until the run ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from weightsync.cli.status import DEAD, ENDED, RUNNING, Found, NoStatus, read

LOOK_S = 0.5
"""How often ``--watch`` looks."""


def status_command(
    folder: Annotated[Path, typer.Argument(help="What --out of the run named.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the raw data; with --watch a line a change.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Look again until the run ends.")] = False,
) -> None:
    """Say how a run stands: version, lag and state of every rollout rank.

    Ends with 0 when all is clean, 1 when a rollout is dirty, behind or gone or the run failed or died, 2 without a run.
    """
    try:
        pause = partial(time.sleep, LOOK_S) if watch else None
        found = (print_json if as_json else print_table)(folder, pause)
    except NoStatus as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if not found.clean:
        raise typer.Exit(1)


def print_json(folder: Path, pause: Callable[[], None] | None) -> Found:
    """Print the status once; or, given what to do between two looks, each that differs, a line each, to the end."""
    found = read(folder)
    print(json.dumps(found.to_dict(), indent=None if pause else 1), flush=True)
    while pause is not None and found.state == RUNNING:
        pause()
        before, found = found, read(folder)
        if found != before:
            print(json.dumps(found.to_dict()), flush=True)
    return found


def print_table(folder: Path, pause: Callable[[], None] | None, console: Console | None = None) -> Found:
    """Show the status once; or, given what to do between two looks, in place until the run ends."""
    console, found = console or Console(), read(folder)
    if pause is None:
        console.print(view(found))
        return found
    with Live(view(found), console=console, auto_refresh=False) as live:
        while found.state == RUNNING:
            pause()
            found = read(folder)
            live.update(view(found), refresh=True)
    return found


def view(found: Found) -> Group:
    """What the run is, its rollouts, its latest errors, and where it stands."""
    data, status = found.data, found.data["status"]
    head = f"{data['scenario']} on {data['backend']}: "
    if status is None:
        return Group(Text(head + "no update is over yet"), _standing(found))
    head += f"update {status['update']} of {data['steps']}, trainer at version {status['version']} "
    head += f"(highest tried {status['highest']}, group epoch {status['epoch']})"
    parts: list[Text | Table] = [Text(head), rollout_table(status)]
    parts += [
        Text(f"update {one['update']}, {one['of']}: {one['error']}", "dim") for one in data["errors"][-5:]
    ]
    return Group(*parts, _standing(found))


def rollout_table(status: Mapping[str, Any]) -> Table:
    """One row per rollout rank."""
    table = Table(title="rollouts", title_justify="left")
    for name in ("rollout", "rank", "version", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("state", "generating", "last error"):
        table.add_column(name, overflow="fold")
    for rollout in status["rollouts"]:
        for one in rollout["ranks"]:
            state = rank_state(rollout, one, status["version"])
            cells = [str(rollout["rollout"]), one["rank"].rpartition(".")[2]]
            if "silent" in one:
                cells += ["-", "-", state, "-", one["silent"]]
            else:
                generating = {True: "yes", False: "paused", None: "-"}[one["generating"]]
                cells += [str(one["version"]), str(status["version"] - one["version"])]
                cells += [state, generating, one["error"] or "-"]
            styles = ["", "", "", "", "green" if state == "clean" else "bold red", "", ""]
            # As Text, since an error may hold brackets, which rich would take for markup.
            table.add_row(*map(Text, cells, styles))
    return table


def rank_state(rollout: Mapping[str, Any], rank: Mapping[str, Any], version: int) -> str:
    """``clean``, or in which way the rank is not, and why."""
    if rollout["gone"] is not None:
        return f"gone: {rollout['gone']}"
    if "silent" in rank:
        return "silent"
    if rank["dirty"] is not None:
        return f"dirty: {rank['dirty']}"
    return "clean" if rank["version"] == version else "behind"


def _standing(found: Found) -> Text:
    if found.state == RUNNING:
        return Text("running")
    if found.state == DEAD:
        return Text(
            "dead: the process of this run ended without a verdict; this is the last it wrote",
            "bold red",
        )
    return Text(f"{found.state}: {found.data['verdict']}", "green" if found.state == ENDED else "bold red")
