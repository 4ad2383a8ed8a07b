"""The command line: ``weightsync demo | run | status | plan | scenarios | backends | fuzz``, and those of ``disk``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from weightsync.backends.registry import Registry
from weightsync.cli import disk, scenario_files, show
from weightsync.cli import result as results
from weightsync.cli.dry_run import dry_run
from weightsync.cli.fuzzing import fuzz_command
from weightsync.cli.logs import LogFileError, log_json, logged
from weightsync.cli.model.config import CheckpointError
from weightsync.cli.parts import without_kill
from weightsync.cli.record import RunRecord
from weightsync.cli.run import BACKENDS, run
from weightsync.cli.scenario import Scenario, ScenarioError
from weightsync.cli.status import FolderInUse, status_of_run
from weightsync.cli.status_view import status_command
from weightsync.cli.tables import CheckRow, progress_bar
from weightsync.reference.errors import BackendUnavailable, WeightSyncError
from weightsync.sim.hardware import ProfileError

USAGE = (ScenarioError, CheckpointError, BackendUnavailable, ProfileError, FolderInUse, LogFileError)
"""Errors of what was asked for, which end with code 2; a run that fails ends with code 1."""

PRETRAINED = (
    "workload.steps=8",
    "workload.lr=5e-6",
    "workload.rl.base=10",
    "workload.rl.entropy=0.0",
    "workload.rl.lr_last=1e-6",
    "workload.rl.prompts=8",
    "workload.rl.samples=4",
)
"""What ``demo --rl`` changes for a checkpoint: a fine-tuning step size, and less of everything, since it is larger."""

app = typer.Typer(
    help="Weight updates from a sharded trainer to sharded rollouts, to the bit.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False, rich_markup_mode=None,
)  # fmt: skip
scenarios = typer.Typer(help="The built-in scenarios: list, show, or copy one to edit.", no_args_is_help=True)
app.add_typer(scenarios, name="scenarios")
app.command("status")(status_command)
app.command("publish")(disk.publish_command)
app.command("pull")(disk.pull_command)
app.command("inspect")(disk.inspect_command)
app.command("verify")(disk.verify_command)

SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one key of the scenario; repeatable."),
]
SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Draws everything; by default the scenario's own.")
]
OutOption = Annotated[
    Path | None,
    typer.Option(help="Folder for index.html, its pictures, and the result, conditions and trace."),
]
LogOption = Annotated[
    str | None,
    typer.Option(
        "--log-json", metavar="FILE", help="Write events there, one JSON object a line; - is stderr."
    ),
]
ScenarioArgument = Annotated[str, typer.Argument(help="A built-in scenario's name, or a TOML file.")]


@app.callback(invoke_without_command=True)
def main(
    shown: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    """Weight updates from a sharded trainer to sharded rollouts, to the bit."""
    if shown:
        print(version("weightsync"))
        raise typer.Exit


@app.command()
def demo(
    rl: Annotated[
        bool, typer.Option("--rl", help="Learn by reinforcement from what the rollouts sample (tiny-hybrid).")
    ] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="A Hugging Face safetensors folder; by default a small one is made.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps, each with an update.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results of both runs.")] = Path("weightsync-out"),
    sets: SetOption = None,
    seed: SeedOption = None,
    log: LogOption = None,
) -> None:
    """Train a small model and push it to two rollouts after each step: over gloo for real, then on the model."""
    console = Console()
    with sentences():
        overrides = []
        if checkpoint is not None:
            overrides = [f"model.checkpoint={json.dumps(str(checkpoint))}", *(PRETRAINED if rl else ())]
        if steps is not None:
            overrides.append(f"workload.steps={steps}")
        scenario = scenario_files.load("tiny-hybrid" if rl else "demo", [*overrides, *(sets or [])])
        with log_json(log):
            runs = _run_all(console, scenario, ("gloo", "sim"), seed, out)
        if runs is None:
            return
        (measured, gloo), (modelled, sim) = runs
        show.tables(console, modelled, sim.conditions, measured, gloo.conditions)
        right = show.verdicts(console, [measured, modelled], [_same_digests(measured, modelled)])
        _say_where(console, out, ("gloo", "sim"))
    if not right:
        raise typer.Exit(1)


@app.command("run")
def run_command(
    name: ScenarioArgument,
    backend: Annotated[str, typer.Option(help=f"One of {', '.join(BACKENDS)}.")] = "inprocess",
    seed: SeedOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    log: LogOption = None,
) -> None:
    """Run a scenario on one backend and check every byte."""
    console = Console()
    with sentences():
        scenario = scenario_files.load(name, sets or [])
        with log_json(log):
            runs = _run_all(console, scenario, (backend,), seed, out, nest=False)
        if runs is None:
            return
        ((found, record),) = runs
        if backend == "sim":
            show.tables(console, found, record.conditions, None, "")
        else:
            show.tables(console, None, "", found, record.conditions)
        right = show.verdicts(console, [found])
        if out is not None:
            _say_where(console, out, ("",))
    if not right:
        raise typer.Exit(1)


@app.command()
def plan(
    name: ScenarioArgument,
    seed: SeedOption = None,
    sets: SetOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Say what a scenario would send, along which routes and with how much memory; nothing moves."""
    console = Console()
    with sentences():
        scenario = scenario_files.load(name, sets or [])
        dry = dry_run(scenario, seed)
        if as_json:
            print(json.dumps(dry.to_dict(), indent=1))
            return
        show.heading(console, scenario)
        show.plan_tables(console, dry)


@app.command()
def backends() -> None:
    """List the backends that are here, and why the others are not."""
    registry, table = Registry(), Table()
    table.add_column("backend", no_wrap=True)
    table.add_column("here", no_wrap=True)
    table.add_column("why not", overflow="fold")
    for name in registry.names():
        reason = registry.why_not(name)
        table.add_row(name, "yes" if reason is None else "no", "" if reason is None else str(reason))
    table.add_row("sim", "yes", "")
    Console().print(table)


@app.command()
def fuzz(
    seeds: Annotated[int, typer.Option(min=1, help="How many seeded fault plans to run.")] = 100,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Every fault at every await instead.")
    ] = False,
    receive: Annotated[str, typer.Option(help="stage or stream; for --exhaustive.")] = "stage",
    workers: Annotated[int, typer.Option(min=1, help="How many processes share the runs.")] = 1,
) -> None:
    """Run the protocol under planted faults on sim; a plan that breaks a promise is reduced and printed."""
    with sentences():
        if receive not in ("stage", "stream"):
            raise ScenarioError(f"--receive is {receive!r}; expected stage or stream")
        found = fuzz_command(Console(), None if exhaustive else seeds, receive, workers)
    if found:
        raise typer.Exit(1)


@scenarios.command("list")
def list_scenarios() -> None:
    """Name every built-in scenario."""
    with sentences():
        table = Table()
        table.add_column("scenario", no_wrap=True)
        table.add_column("what it is")
        for name in scenario_files.names():
            table.add_row(name, scenario_files.load(name).description)
        Console().print(table)


@scenarios.command("show")
def show_scenario(name: ScenarioArgument) -> None:
    """Print a scenario's TOML."""
    with sentences():
        print(scenario_files.text(name), end="")


@scenarios.command("copy")
def copy_scenario(
    name: ScenarioArgument, path: Annotated[Path, typer.Argument(help="A new file, or a folder.")]
) -> None:
    """Write a scenario to a file of yours, to edit and run."""
    with sentences():
        print(scenario_files.copy(name, path))


@contextmanager
def sentences() -> Iterator[None]:
    """Print an error of ours as its sentence, without a traceback, and end with code 2 or 1."""
    try:
        yield
    except WeightSyncError as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, USAGE) else 1) from None


def _run_all(
    console: Console,
    scenario: Scenario,
    names: tuple[str, ...],
    seed: int | None,
    out: Path | None,
    nest: bool = True,
) -> list[tuple[results.Result, RunRecord]] | None:
    """Result and record of each run; written to ``out`` too. None where another process reports for this one."""
    torch.set_num_threads(1)
    done: list[tuple[results.Result, RunRecord]] = []
    shown: list[results.Run] = []
    show.heading(console, scenario)
    with progress_bar(console) as bar:
        for name in names:
            task = bar.add_task(f"updates on {name}", total=scenario.workload.steps)
            spared = len(names) > 1 and name != "gloo" and scenario.faults.kill is not None
            asked = without_kill(scenario) if spared else scenario
            folder = None if out is None else out / name if nest else out
            with status_of_run(folder, asked, name, seed) as board, logged(asked, name, seed) as ended:
                record = run(asked, name, seed, partial(_advance, bar, task), board.told)
                if record is None:
                    return None
                record.conditions += ", without faults.kill" if spared else ""
                done.append((results.make_result(asked, record), record))
                if folder is not None:
                    said = results.write(folder, *done[-1])
                    shown.append(results.Run(*done[-1], said, name if nest else ""))
                board.ended(**done[-1][0]["verdict"])
                ended(**done[-1][0]["verdict"])
        if out is not None:
            between = [_same_digests(done[0][0], done[1][0])] if len(done) == 2 else []
            results.write_page(out, shown, between)
    return done


def _advance(bar: Progress, task: TaskID, done: int) -> None:
    bar.update(task, completed=done)


def _same_digests(measured: results.Result, modelled: results.Result) -> CheckRow:
    """Both clocks took the same steps, so each update that committed on both has the same bits.

    Reinforcement learning takes other steps once a rollout was lost, since others draw its samples.
    """
    lost = [event["update"] for event in measured["events"] if event["event"] == "lost"]
    last = lost[0] if lost and measured["scenario"]["workload"]["kind"] == "rl" else len(measured["updates"])
    sides = [
        {u["update"]: u["digests"] for u in side["updates"] if u["committed"] and u["update"] <= last}
        for side in (measured, modelled)
    ]
    wrong = [
        str(n) for n in sides[0] if n in sides[1] and sides[0][n]["trainer.0"] != sides[1][n]["trainer.0"]
    ]
    until = "" if last == len(measured["updates"]) else f", up to the loss after update {last}"
    return CheckRow(f"digests on gloo and on sim{until}", not wrong, f"updates {', '.join(wrong)}")


def _say_where(console: Console, out: Path, folders: tuple[str, ...]) -> None:
    files = "result.json, conditions.json, trace.json (opens in Perfetto)"
    console.print(f"page: {out / 'index.html'}", highlight=False, soft_wrap=True)
    console.print(
        f"written: {', '.join(str(out / one) for one in folders)}: {files}", highlight=False, soft_wrap=True
    )


if __name__ == "__main__":
    app()
