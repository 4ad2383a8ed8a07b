"""A Gantt of one update: one row per lane of each rank, slices by phase, nested slices inside. Pure rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator

from weightsync.cli.canvas import COLOURS, Colours, Drawing, axes
from weightsync.cli.lanes import Placed
from weightsync.cli.pictures import clock, tick
from weightsync.cli.tables import format_bytes, in_order
from weightsync.reference.trace import Span

QUIET = ("control", "lock_wait", "wait", "idle")
"""Phases in which a rank waits for others; drawn muted."""
WIDTH, LEFT, RIGHT, ROW = 11.0, 1.6, 0.3, 0.25  # inches
LEGEND_COLUMNS = 9
LETTER = 4.1
"""Points that one letter of a label takes, at most."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One span as it is drawn.

    Attributes:
        span: the span.
        row: its row, from the top.
        depth: how many slices of its row it lies inside; slices that only wait do not count.
        start_ns, end_ns: what of it is shown, from the window's start on.
    """

    span: Span
    row: int
    depth: int
    start_ns: int
    end_ns: int


def typical(updates: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The median update by total time, of the committed deltas to most rollouts; of all where there is no delta."""
    most = max((len(one["members"]) for one in updates if one["committed"]), default=0)
    committed = [one for one in updates if one["committed"] and len(one["members"]) == most]
    some = [one for one in committed if one["kind"] == "delta"] or committed
    ordered = sorted(some, key=lambda one: (one["total_ns"], one["update"]))
    return ordered[(len(ordered) - 1) // 2] if ordered else None


def gantt(placed: Sequence[Placed], update: int, start_ns: int, end_ns: int, name: str, how: str) -> Drawing:
    """The picture of one update.

    Args:
        placed: every span of the run in its lane.
        update: number of the update.
        start_ns: when the first trainer rank entered it.
        end_ns: when the last one returned.
        name: of the picture.
        how: ``measured on gloo`` or ``modelled on sim``.
    """
    rows, slices = _slices(placed, start_ns, end_ns)
    length = end_ns - start_ns
    order = in_order(one.span.phase for one in slices)
    legend = [phase for phase in order if phase not in QUIET]
    waiting = [phase for phase in order if phase in QUIET]
    hints = {f"slice-{number}": _hint(one) for number, one in enumerate(slices)}
    alt = (
        f"Gantt of update {update}, {how}: {clock(length)} on {len({rank for rank, _ in rows})} ranks in {len(rows)} "
        f"lanes; phases {', '.join(legend + waiting)}."
    )

    def draw(colours: Colours) -> Figure:
        foot = 0.5 + 0.19 * -(-(len(legend) + 1) // LEGEND_COLUMNS)
        figure, ax = axes(
            WIDTH, 0.1 + foot + ROW * len(rows), colours, left=LEFT, right=RIGHT, bottom=foot, top=0.1
        )
        points_per_ns = 72 * (WIDTH - LEFT - RIGHT) / max(1, length)
        for row in range(1, len(rows)):
            if rows[row][0] != rows[row - 1][0]:
                ax.axhline(row - 0.5, color=colours["grid"], lw=0.8)
        for number, one in enumerate(slices):
            _draw(ax, one, f"slice-{number}", points_per_ns, colours)
        ax.set_xlim(0, max(1, length))
        ax.set_ylim(len(rows) - 0.5, -0.5)
        firsts = [row == 0 or rows[row][0] != rows[row - 1][0] for row in range(len(rows))]
        texts = [
            f"{rank}  {lane}" if first else lane for (rank, lane), first in zip(rows, firsts, strict=True)
        ]
        ax.set_yticks(range(len(rows)), texts, fontsize=8)
        for label, first in zip(ax.get_yticklabels(), firsts, strict=True):
            label.set_color(colours["ink" if first else "muted"])
        ax.tick_params(axis="y", length=0)
        ax.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(clock(round(value)))))
        ax.grid(axis="x", color=colours["grid"], lw=0.6)
        ax.set_xlabel(f"since the update began ({how})")
        handles = [Patch(color=colours[_colour(phase)], label=phase) for phase in legend]
        if waiting:
            handles.append(Patch(color=colours["quiet"], label="waiting"))
        figure.legend(
            handles=[one for column in range(LEGEND_COLUMNS) for one in handles[column::LEGEND_COLUMNS]],
            loc="lower left", bbox_to_anchor=(LEFT / WIDTH, 0), ncols=LEGEND_COLUMNS,
            frameon=False, labelcolor=colours["ink"], fontsize=8, borderaxespad=0, borderpad=0,
            handlelength=1, handleheight=0.9, handletextpad=0.4, columnspacing=1.2, labelspacing=0.4,
        )  # fmt: skip
        return figure

    return Drawing(name, f"Update {update}, {how}", alt, draw, hints, wide=True)


def _slices(
    placed: Sequence[Placed], start_ns: int, end_ns: int
) -> tuple[list[tuple[str, str]], list[Slice]]:
    """Rows as (rank, lane), and what of the window lies in each, outer slices before inner ones."""
    shown = [one for one in placed if _overlaps(one.span, start_ns, end_ns)]
    places = sorted({(one.pid, one.tid, one.span.rank, one.lane) for one in shown})
    rows = {place[:2]: row for row, place in enumerate(places)}
    open_spans: list[list[Span]] = [[] for _ in places]
    slices = []
    for one in shown:
        span, row = one.span, rows[one.pid, one.tid]
        outer = open_spans[row]
        while outer and outer[-1].end_ns <= span.start_ns:
            outer.pop()
        depth = sum(other.phase not in QUIET for other in outer)
        start, end = max(span.start_ns, start_ns), min(span.end_ns, end_ns)
        slices.append(Slice(span, row, depth, start - start_ns, end - start_ns))
        outer.append(span)
    return [place[2:] for place in places], slices


def _overlaps(span: Span, start_ns: int, end_ns: int) -> bool:
    if span.duration_ns == 0:
        return start_ns <= span.start_ns <= end_ns
    return span.start_ns < end_ns and span.end_ns > start_ns


def _draw(ax: Any, one: Slice, gid: str, points_per_ns: float, colours: Colours) -> None:
    span, width_ns = one.span, one.end_ns - one.start_ns
    width = width_ns * points_per_ns
    quiet = span.phase in QUIET
    height = max(0.3, 0.84 - 0.2 * one.depth) if not quiet else 0.1 if one.depth else 0.5
    middle = one.row + (0.3 if quiet and one.depth else 0)  # waiting inside a slice is a strip at its foot
    ax.add_patch(
        Rectangle(
            (one.start_ns, middle - height / 2), max(width_ns, 0.7 / points_per_ns), height, gid=gid,
            facecolor=colours[_colour(span.phase)], edgecolor=colours["bg" if span.ok else "bad"],
            linewidth=(0.5 if width > 2 else 0) if span.ok else 1.2, zorder=1 + one.depth + (not quiet),
        )
    )  # fmt: skip
    if not quiet and height > 0.4 and width > LETTER * len(span.verb) + 4:
        ax.text(
            one.start_ns + width_ns / 2, one.row, span.verb,
            ha="center", va="center_baseline", fontsize=7, color=colours["on-slice"], zorder=9,
        )  # fmt: skip


def _colour(phase: str) -> str:
    return "quiet" if phase in QUIET else phase if phase in COLOURS else "connect"


def _hint(one: Slice) -> str:
    span = one.span
    moved = f", {format_bytes(span.nbytes)}" if span.nbytes else ""
    failed = "" if span.ok else ", failed"
    return f"{span.rank}: {span.verb} ({span.phase}), {clock(span.duration_ns)}{moved}{failed}"
