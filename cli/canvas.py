"""Colours of the result page, and one drawing as two pictures: an SVG in the page's own colours, a PNG in light ones.

A drawing asks for colours by name. For the SVG each name has a sentinel colour, which becomes a CSS variable, so one
picture follows light and dark; text stays text. Equal drawings give equal bytes.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = {
    "bg": ("#ffffff", "#14171b"),
    "card": ("#f5f6f8", "#1d2126"),
    "ink": ("#1b1f24", "#e7e9ec"),
    "muted": ("#57606b", "#a3adb8"),
    "grid": ("#dfe3e8", "#30363d"),
    "link": ("#0b57d0", "#8ab4f8"),
    "good": ("#116932", "#4ade80"),
    "bad": ("#b3141d", "#ff8a80"),
    "quiet": ("#d6dbe1", "#3a424b"),
    "unsent": ("#b4bdc8", "#4b5560"),
    "on-slice": ("#ffffff", "#14171b"),
    "measured": ("#1d4ed8", "#8aa9ff"),
    "modelled": ("#b4540a", "#f3a64f"),
    "whole": ("#1d4ed8", "#8aa9ff"),
    "part": ("#0f766e", "#2dd4bf"),
    "connect": ("#5b6470", "#a8b2bd"),
    "pause_flush": ("#9d174d", "#f7a8d0"),
    "source_materialize": ("#3730a3", "#a5b4fc"),
    "snapshot": ("#1d4ed8", "#8aa9ff"),
    "diff": ("#0369a1", "#38bdf8"),
    "tp_gather": ("#0f766e", "#2dd4bf"),
    "hf_conversion": ("#155e63", "#5eead4"),
    "encode": ("#7e22ce", "#c99bfd"),
    "broadcast": ("#c2410c", "#fb923c"),
    "decode": ("#a21caf", "#ee8cfb"),
    "validate": ("#4d6b0f", "#b5e35a"),
    "apply": ("#15703a", "#4ade80"),
    "digest": ("#8a5a06", "#f2c530"),
    "commit": ("#134e3a", "#8af0c5"),
    "continue": ("#7c3f58", "#e6a3bd"),
    "rollback": ("#9f1239", "#fda4af"),
    "train": ("#334e9c", "#9fbcf7"),
    "generate": ("#0e6a85", "#67d8ef"),
    "paused": ("#be123c", "#fb8ba0"),
}
"""Name -> (light, dark). Text on any slice is ``on-slice``; a phase that is not here is ``connect``."""

SENTINELS = {name: f"#a5{number:02x}5a" for number, name in enumerate(COLOURS)}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}

Colours = Mapping[str, str]
DPI = 160
RC: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "path.simplify": False,
}


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture before it is drawn.

    Attributes:
        name: of the PNG's file, and what makes the SVG's ids its own.
        title: what it shows, in a few words.
        alt: the same for who does not see it, with its main numbers.
        draw: makes the figure from colours by name.
        hints: gid of an artist -> what stands beside the pointer over it.
        wide: drawn for the page's whole width.
    """

    name: str
    title: str
    alt: str
    draw: Callable[[Colours], Figure]
    hints: Mapping[str, str] = field(default_factory=dict)
    wide: bool = False


def axes(
    width: float,
    height: float,
    colours: Colours,
    *,
    left: float,
    bottom: float,
    right: float = 0.12,
    top: float = 0.3,
) -> tuple[Figure, Axes]:
    """A figure of ``width`` by ``height`` inches with one plain pair of axes, margins in inches."""
    figure = Figure(figsize=(width, height), facecolor=colours["bg"])
    box = (
        left / width,
        bottom / height,
        (width - left - right) / width,
        (height - bottom - top) / height,
    )
    ax = figure.add_axes(box, facecolor=colours["bg"])
    for side, spine in ax.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(colours["grid"])
    ax.tick_params(which="both", color=colours["grid"], labelcolor=colours["muted"])
    ax.xaxis.label.set_color(colours["muted"])
    ax.yaxis.label.set_color(colours["muted"])
    ax.set_axisbelow(True)
    return figure, ax


def png(drawing: Drawing) -> bytes:
    """The picture in light colours."""
    out = io.BytesIO()
    with _settings():
        drawing.draw(LIGHT).savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def svg(drawing: Drawing) -> str:
    """The picture as an ``<svg>`` element to stand in a page that has the CSS variables ``--NAME`` and ``--sans``."""
    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with _settings({"svg.hashsalt": drawing.name}):
        drawing.draw(SENTINELS).savefig(out, format="svg", metadata=nothing)
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"font: ([^;\"]*?)([\d.]+px) [^;\"]*", r"font: \1\2 var(--sans)", text)
    text = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", text)
    for name, sentinel in SENTINELS.items():
        text = text.replace(sentinel, f"var(--{name})")
    for gid, hint in drawing.hints.items():
        text = text.replace(f'<g id="{gid}">', f"<g><title>{html.escape(hint)}</title>")
    text = _own_ids(text, drawing.name)
    text = re.sub(r"\s*\n\s*", "\n", text)
    return re.sub(r"<svg [^>]*?(viewBox=\"[^\"]+\")[^>]*>", rf"<svg {_said(drawing)} \1>", text, count=1)


@contextmanager
def _settings(more: Mapping[str, str] | None = None) -> Iterator[None]:
    """Ours alone, whatever a matplotlibrc of the user says."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(RC | dict(more or {}))
        yield


def _said(drawing: Drawing) -> str:
    return f'role="img" aria-label="{html.escape(drawing.alt)}"'


def _own_ids(text: str, name: str) -> str:
    """Ids that are referred to get a prefix of the picture's own; the others go."""
    used = set(re.findall(r"(?:href=\"|url\()#([\w.-]+)", text))

    def identity(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in used else ""

    text = re.sub(r" id=\"([^\"]*)\"", identity, text)
    return re.sub(r"((?:href=\"|url\()#)", rf"\1{name}-", text)
