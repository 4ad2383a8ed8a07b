"""The pictures of a result beside its Gantt: curves, bytes, tensors, phases. Pure rendering of result dicts."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter, PercentFormatter

from weightsync.cli.canvas import Colours, Drawing, axes
from weightsync.cli.tables import format_bytes, format_ns, in_order

Result = Mapping[str, Any]

WIDTH, HEIGHT = 5.0, 2.6
HIDDEN = ("idle",)
"""Phases left out, as in the tables."""
LOG_FROM = 20
"""How many times the smallest update the dense one has to be before bytes get a log axis."""


def curves(result: Result) -> list[Drawing]:
    """Reward, loss and density per step; empty where the job says nothing of its steps."""
    found: list[Drawing] = []
    steps = result["curve"]
    for key, title, floor in (("reward", "Mean reward", 0.0), ("loss", "Loss", None)):
        points = [(one["step"], one[key]) for one in steps if key in one]
        if points and not (key == "loss" and found):
            first, last = points[0], points[-1]
            alt = f"{title} per step: {first[1]:.3g} at step {first[0]}, {last[1]:.3g} at step {last[0]}."
            found.append(
                Drawing(
                    key,
                    f"{title} per step",
                    alt,
                    _line(points, title.lower(), "whole", floor, _marks(result)),
                )
            )
    if found:
        found.append(_density(result))
    return found


def sizes(result: Result) -> list[Drawing]:
    """Bytes of each update beside a dense one, and how its tensors travelled."""
    found = [_bytes(result)]
    sent = [(one["update"], one["tensors"]) for one in result["updates"] if one["tensors"]]
    if sent:
        found.append(_tensors(sent))
    return found


def phases(sides: Sequence[tuple[str, Result]]) -> Drawing:
    """Time per phase as one dot per side (``measured``, ``modelled``), on a log axis."""
    shown = {
        name: {phase: ns for phase, ns in result["phases_ns"].items() if phase not in HIDDEN}
        for name, result in sides
    }
    names = in_order(phase for side in shown.values() for phase in side)
    said = "; ".join(
        f"{name}: " + ", ".join(f"{phase} {clock(side[phase])}" for phase in names if phase in side)
        for name, side in shown.items()
    )

    def draw(colours: Colours) -> Figure:
        figure, ax = axes(WIDTH, 0.95 + 0.27 * len(names), colours, left=1.05, bottom=0.45, top=0.4)
        at = {phase: len(names) - 1 - number for number, phase in enumerate(names)}
        for phase in names:
            both = [side[phase] for side in shown.values() if side.get(phase)]
            if len(both) > 1:
                ax.plot((min(both), max(both)), (at[phase],) * 2, color=colours["quiet"], lw=2, zorder=1)
        for (name, side), marker in zip(shown.items(), "oD", strict=False):
            points = [(ns, at[phase]) for phase, ns in side.items() if ns]
            ax.plot(
                [x for x, _ in points], [y for _, y in points],
                marker, color=colours[name], ms=5, label=name, clip_on=False, zorder=2,
            )  # fmt: skip
        ax.set_xscale("log")
        ax.set_yticks([at[phase] for phase in names], names)
        ax.set_ylim(-0.7, len(names) - 0.3)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(clock(round(value)))))
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.grid(axis="x", color=colours["grid"], lw=0.6)
        ax.set_xlabel("summed over ranks and updates")
        _legend(ax, colours)
        return figure

    return Drawing("phases", "Time per phase", f"Time per phase, summed over ranks. {said}.", draw)


def clock(duration_ns: int) -> str:
    """A duration as ``format_ns`` writes it, with the sign for micro."""
    return format_ns(duration_ns).replace(" us", " µs")


def tick(text: str) -> str:
    """A number with its unit as an axis has it: ``1.50 MB`` is ``1.5 MB``, ``0 ns`` is ``0``."""
    return "0" if text.startswith("0 ") else re.sub(r"(\.\d*?)0+ ", r"\1 ", text).replace(". ", " ")


def percent(share: float) -> str:
    """A share, 0 to 1, with three digits: ``3.19 %``."""
    return f"{100 * share:.3g} %"


def _density(result: Result) -> Drawing:
    points = [(one["update"], one["density"]) for one in result["updates"] if one["committed"]]
    alt = "Density, the share of elements that changed, per update: " + (
        f"{percent(points[0][1])} in update {points[0][0]}, {percent(points[-1][1])} in update {points[-1][0]}."
        if points
        else "no update was committed."
    )
    smallest = min((share for _, share in points if share), default=1.0)
    return Drawing(
        "density", "Density: changed elements per update", alt,
        _line(points, "share of all elements", "part", None, _marks(result), share=True, log=smallest * LOG_FROM < 1),
    )  # fmt: skip


def _marks(result: Result) -> list[int]:
    """Steps at which something was lost, restarted or came back."""
    return sorted({one["update"] for one in result.get("events", ()) if isinstance(one.get("update"), int)})


def _line(
    points: Sequence[tuple[float, float]],
    label: str,
    colour: str,
    floor: float | None,
    marks: Sequence[int],
    share: bool = False,
    log: bool = False,
) -> Callable[[Colours], Figure]:
    def draw(colours: Colours) -> Figure:
        figure, ax = axes(WIDTH, HEIGHT, colours, left=0.62, bottom=0.45)
        for step in marks:
            ax.axvline(step, color=colours["bad"], lw=1, ls=(0, (3, 2)))
        few = len(points) <= 40
        ax.plot(
            [x for x, _ in points], [y if y or not log else math.nan for _, y in points], "o-" if few else "-",
            ms=3.5, lw=1.6, color=colours[colour], clip_on=False,
        )  # fmt: skip
        if log:
            ax.set_yscale("log")
            ax.yaxis.set_minor_formatter(NullFormatter())
        elif floor is not None or share:
            ax.set_ylim(bottom=0.0)
        if share:
            ax.yaxis.set_major_formatter(
                FuncFormatter(lambda value, _: percent(value)) if log else PercentFormatter(1.0, symbol=" %")
            )
        ax.grid(axis="y", color=colours["grid"], lw=0.6)
        _steps_axis(ax, [x for x, _ in points], "update" if share else "step")
        ax.set_title(label, color=colours["muted"])
        return figure

    return draw


def _bytes(result: Result) -> Drawing:
    updates, dense = result["updates"], result["dense_bytes"]
    sent = [(one["update"], one["full_bytes"] + one["delta_bytes"]) for one in updates]
    smallest = min((size for _, size in sent if size), default=dense)
    log = smallest * LOG_FROM < dense
    total = sum(size for _, size in sent)
    alt = (
        f"Bytes broadcast per update beside {format_bytes(dense)} for a dense one: {format_bytes(total)} in "
        f"{len(sent)} updates, the smallest {format_bytes(smallest)}."
    )

    def draw(colours: Colours) -> Figure:
        figure, ax = axes(WIDTH, HEIGHT, colours, left=0.72, bottom=0.45, top=0.4)
        for full, colour, label in ((True, "whole", "full update"), (False, "part", "delta")):
            mine = [
                (number, size)
                for (number, size), one in zip(sent, updates, strict=True)
                if size and bool(one["full"]) == full
            ]
            if mine:
                xs, ys = [x for x, _ in mine], [y for _, y in mine]
                if log:
                    ax.plot(
                        xs,
                        ys,
                        "o",
                        ms=4 if len(sent) <= 40 else 2.5,
                        color=colours[colour],
                        label=label,
                        clip_on=False,
                    )
                else:
                    ax.bar(xs, ys, 0.8, color=colours[colour], label=label)
        ax.axhline(dense, color=colours["muted"], lw=1.2, ls=(0, (4, 2)), label="dense")
        if log:
            ax.set_yscale("log")
            ax.yaxis.set_minor_formatter(NullFormatter())
        else:
            ax.set_ylim(0, dense * 1.08)
        _steps_axis(ax, [number for number, _ in sent], "update")
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: tick(format_bytes(round(value)))))
        ax.grid(axis="y", color=colours["grid"], lw=0.6)
        _legend(ax, colours)
        return figure

    return Drawing("bytes", "Bytes per update", alt, draw)


def _tensors(sent: Sequence[tuple[int, Mapping[str, int]]]) -> Drawing:
    kinds = (
        ("dense", "whole", "whole"),
        ("sparse", "part", "changed elements"),
        ("unchanged", "unsent", "not at all"),
    )
    said = "; ".join(
        f"update {number}: " + ", ".join(f"{counts[key]} {label}" for key, _, label in kinds)
        for number, counts in (sent[0], sent[-1])
    )

    def draw(colours: Colours) -> Figure:
        figure, ax = axes(WIDTH, HEIGHT, colours, left=0.62, bottom=0.45, top=0.4)
        xs, floor = [number for number, _ in sent], [0] * len(sent)
        for key, colour, label in kinds:
            heights = [counts[key] for _, counts in sent]
            ax.bar(xs, heights, 0.8, bottom=floor, color=colours[colour], label=label)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
        _steps_axis(ax, xs, "update")
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        _legend(ax, colours)
        return figure

    return Drawing("tensors", "How the tensors travelled", f"Tensors by how they travelled; {said}.", draw)


def _steps_axis(ax: Axes, numbers: Sequence[float], label: str) -> None:
    ax.set_xlim(min(numbers, default=1) - 0.6, max(numbers, default=1) + 0.6)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    ax.set_xlabel(label)


def _legend(ax: Axes, colours: Colours) -> None:
    ax.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, labelcolor=colours["ink"],
        borderaxespad=0.2, handlelength=1.4, columnspacing=1.4, handletextpad=0.5,
    )  # fmt: skip
