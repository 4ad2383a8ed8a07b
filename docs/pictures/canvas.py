"""A canvas that writes SVG: plain text out, equal bytes from equal calls, readable on light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

INK, MUTED, FAINT = "#1f2a37", "#667085", "#d8dce3"
CARD, EDGE = "#fcfcfa", "#d5d9e0"
TRAINER, ROLLOUT, BUCKET, BAD = "#3b5bdb", "#0b7a75", "#d9480f", "#c92a2a"
PALE = {TRAINER: "#e7ecff", ROLLOUT: "#dcf3ef", BUCKET: "#ffe9dc", BAD: "#ffe3e3", MUTED: "#f0f2f5"}
"""The light tint of each colour, for what is filled."""

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


class Canvas:
    """Shapes in the order in which they are drawn, on a light rounded card.

    Args:
        width: in pixels; a picture is to be read at about 700.
        title: what a screen reader says.
    """

    def __init__(self, width: int, title: str) -> None:
        self.width = width
        self.title = title
        self._shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, *,
        fill: str = "none", edge: str = "none", radius: float = 0, opacity: float = 1,
    ) -> None:  # fmt: skip
        """A rectangle, rounded if asked."""
        more = f' fill-opacity="{_n(opacity)}"' if opacity < 1 else ""
        self._shapes.append(
            f'<rect x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="{_n(radius)}" '
            f'fill="{fill}" stroke="{edge}"{more}/>'
        )

    def line(
        self, x: float, y: float, to_x: float, to_y: float, *,
        color: str = INK, width: float = 1.2, dash: str = "", opacity: float = 1,
    ) -> None:  # fmt: skip
        """A straight line."""
        more = f' stroke-dasharray="{dash}"' if dash else ""
        more += f' stroke-opacity="{_n(opacity)}"' if opacity < 1 else ""
        self._shapes.append(
            f'<line x1="{_n(x)}" y1="{_n(y)}" x2="{_n(to_x)}" y2="{_n(to_y)}" stroke="{color}" '
            f'stroke-width="{_n(width)}"{more}/>'
        )

    def arrow(
        self, x: float, y: float, to_x: float, to_y: float, *, color: str = INK, width: float = 1.2, dash: str = ""
    ) -> None:  # fmt: skip
        """A line with a filled head at its end."""
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5 or 1
        along, across = ((to_x - x) / length, (to_y - y) / length), 2.2 + width
        back = 5 + 2 * width
        base = (to_x - back * along[0], to_y - back * along[1])
        self.line(x, y, *base, color=color, width=width, dash=dash)
        self.polygon(
            [
                (to_x, to_y),
                (base[0] - across * along[1], base[1] + across * along[0]),
                (base[0] + across * along[1], base[1] - across * along[0]),
            ],
            fill=color,
        )

    def polygon(self, points: Sequence[tuple[float, float]], *, fill: str, opacity: float = 1) -> None:
        """A filled polygon."""
        more = f' fill-opacity="{_n(opacity)}"' if opacity < 1 else ""
        listed = " ".join(f"{_n(x)},{_n(y)}" for x, y in points)
        self._shapes.append(f'<polygon points="{listed}" fill="{fill}"{more}/>')

    def dot(self, x: float, y: float, radius: float, *, fill: str) -> None:
        """A filled circle."""
        self._shapes.append(f'<circle cx="{_n(x)}" cy="{_n(y)}" r="{_n(radius)}" fill="{fill}"/>')

    def curve(
        self, x: float, y: float, to_x: float, to_y: float, *, color: str, width: float, opacity: float = 1
    ) -> None:
        """An S from left to right."""
        middle = (x + to_x) / 2
        self._shapes.append(
            f'<path d="M{_n(x)} {_n(y)} C{_n(middle)} {_n(y)} {_n(middle)} {_n(to_y)} {_n(to_x)} {_n(to_y)}" '
            f'fill="none" stroke="{color}" stroke-width="{_n(width)}" stroke-opacity="{_n(opacity)}"/>'
        )

    def text(
        self, x: float, y: float, words: str, *,
        size: float = 12, color: str = INK, anchor: str = "middle", bold: bool = False, mono: bool = False,
        halo: bool = False, turned: bool = False,
    ) -> None:  # fmt: skip
        """One line of text with its baseline at ``y``; a halo keeps it readable over lines, ``turned`` reads down."""
        more = ' font-weight="600"' if bold else ""
        more += f' font-family="{MONO}"' if mono else ""
        more += (
            f' stroke="{CARD}" stroke-width="3.5" stroke-linejoin="round" paint-order="stroke"'
            if halo
            else ""
        )
        more += f' transform="rotate(90 {_n(x)} {_n(y)})"' if turned else ""
        self._shapes.append(
            f'<text x="{_n(x)}" y="{_n(y)}" font-size="{_n(size)}" fill="{color}" text-anchor="{anchor}"{more}>'
            f"{escape(words)}</text>"
        )

    def render(self, height: float) -> str:
        """The whole picture as SVG text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{_n(height)}" '
            f'viewBox="0 0 {self.width} {_n(height)}" font-family="{FONT}" role="img">'
        )
        card = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{_n(height - 1)}" rx="12" fill="{CARD}" '
            f'stroke="{EDGE}"/>'
        )
        return "\n".join([head, f"<title>{escape(self.title)}</title>", card, *self._shapes, "</svg>", ""])


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
