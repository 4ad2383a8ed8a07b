"""What the commands print: a run's tables and verdict, a dry run, scenarios and backends. Rendering only."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightsync.cli.dry_run import DryRun
from weightsync.cli.losses import sentence
from weightsync.cli.result import Result, version_rows
from weightsync.cli.scenario import Scenario
from weightsync.cli.tables import CheckRow, checks_table, format_bytes, phase_table, version_table
from weightsync.cli.workload import model_shape

HIDDEN = ("idle",)
"""Phases left out of tables: rollouts waiting for the next order, training included. Files have them."""

STEPS = {
    "train": "AdamW steps",
    "rl": "updates, an AdamW step before each but the first",
    "synthetic": "synthetic steps",
}
"""What a workload does before each update."""


def heading(console: Console, scenario: Scenario) -> None:
    """What is about to run, in two lines."""
    shape, work = model_shape(scenario), scenario.workload
    elements = sum(meta.numel for meta in shape.tensors())
    rollouts = ", ".join(
        f"{'fused' if one.fused else 'unfused'} {_sizes(tp=one.tp, ep=one.ep)}" for one in scenario.rollouts
    )
    trainer, dtypes = (
        scenario.trainer,
        {str(meta.dtype).removeprefix("torch."): None for meta in shape.tensors()},
    )
    sizes = _sizes(
        tp=trainer.tp, pp=trainer.pp, ep=trainer.ep, expert_tp=trainer.etp or 1, cp=trainer.cp,
        dp=trainer.layout.replicas,
    )  # fmt: skip
    console.print(f"[bold]{scenario.name}[/bold]: {scenario.description}", highlight=False)
    steps = f"{work.steps} {STEPS[work.kind]}"
    console.print(
        f"{elements:,} elements in {len(shape.tensors())} tensors ({', '.join(dtypes)}), "
        f"{steps}; trainer {sizes}, rollouts: {rollouts}",
        highlight=False,
    )


def _sizes(*, tp: int, **others: int) -> str:
    """``TP 2 PP 2``: the tensor-parallel size, and what else is not 1."""
    more = [f"{name.upper().replace('_', '-')} {size}" for name, size in others.items() if size > 1]
    return " ".join([f"TP {tp}", *more])


def tables(
    console: Console, modelled: Result | None, modelled_on: str, measured: Result | None, measured_on: str
) -> None:
    """The table of versions, that of phases with a column per side, and the checks that failed."""
    for result in (measured, modelled):
        if result is not None:
            console.print(version_table(version_rows(result), f"versions on {result['backend']}"))
            break
    sides = [None if side is None else _shown(side["phases_ns"]) for side in (modelled, measured)]
    console.print(phase_table(sides[0], sides[1], modelled_on=modelled_on, measured_on=measured_on))
    for result in (measured, modelled):
        for event in result["events"] if result is not None else ():
            console.print(sentence(event), highlight=False, markup=False)
    failed = [
        CheckRow(f"{result['backend']}: {row['name']}", row["ok"], row["detail"])
        for result in (measured, modelled)
        if result is not None
        for row in result["checks"]
        if not row["ok"]
    ]
    if failed:
        console.print(checks_table(failed, "checks that failed"))


def verdicts(console: Console, results: Sequence[Result], more: Sequence[CheckRow] = ()) -> bool:
    """One line per run and per further check; True when all of them are right."""
    for result in results:
        right = result["verdict"]["ok"]
        console.print(Text(f"{result['backend']:<10}{result['verdict']['text']}", style=_style(right)))
    for row in more:
        said = "equal" if row.ok else f"DIFFERENT: {row.detail}"
        console.print(Text(f"{row.name}: {said}", style=_style(row.ok)))
    return all(result["verdict"]["ok"] for result in results) and all(row.ok for row in more)


def plan_tables(console: Console, dry: DryRun) -> None:
    """Updates, routes and memory of a dry run."""
    table = Table(title="updates", title_justify="left")
    for name in ("update", "kind", "changed", "buckets", "bytes"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for update in dry.updates:
        about = "" if dry.exact or update.kind == "full" else "about "
        changed, size = f"{about}{update.changed:,}", f"{about}{update.nbytes:,} B"
        table.add_row(str(update.update), update.kind, changed, str(update.buckets), size)
    console.print(table)
    routes = Table(title="routes", title_justify="left")
    for name in ("group", "route", "bytes in all"):
        routes.add_column(name, justify="right" if name == "bytes in all" else "left")
    for route in dry.routes:
        way = f"{route.root} {route.does} {', '.join(route.others)}"
        routes.add_row(route.group, way, format_bytes(route.nbytes))
    console.print(routes)
    memory = Table(title="memory per rank, at most", title_justify="left")
    columns = ("weights", "snapshots", "staged", "undo", "buckets", "total")
    memory.add_column("rank")
    for name in columns:
        memory.add_column(name, justify="right", no_wrap=True)
    for one in dry.memory:
        sizes = [getattr(one, name) for name in columns]
        memory.add_row(one.rank, *("-" if size == 0 else format_bytes(size) for size in sizes))
    console.print(memory)
    how = "exactly" if dry.exact else "about"
    console.print(f"{how} {format_bytes(dry.nbytes)} broadcast in all; {dry.note}", highlight=False)


def _shown(phases: dict[str, int]) -> dict[str, int]:
    return {phase: spent for phase, spent in phases.items() if phase not in HIDDEN}


def _style(right: bool) -> str:
    return "bold green" if right else "bold red"
