"""A sequence chart: lanes, stages, and items between instants.

Time runs downwards. Its order is true; its lengths are not, since every event gets the room that its words need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from canvas import BUCKET, MUTED, PALE, ROLLOUT, TRAINER, Canvas

LANES = ("trainer.1", "trainer.0", "rollout0.0", "rollout0.1")
ROLES = ("trainer rank", "trainer's lead", "rollout's leader", "rollout rank")
X = dict(zip(LANES, (174, 326, 484, 636), strict=True))
WIDTH, TOP, BOX_WIDTH = 720, 80, 74
ARROW, DATA, BOX, BORDER = 13, 18, 19, 16
"""How far below its instant an arrow, a data arrow and the top of a box are drawn, and what follows the border of
a stage.
"""


@dataclass
class Item:
    """Something to draw between two instants.

    Attributes:
        columns: lanes or gaps of which nothing else is drawn until ``room`` pixels below its start.
        slope: pixels between its start and its end, at least.
        box: the lane and the height of a box; arrows end at its edge.
    """

    start_ns: int
    end_ns: int
    columns: tuple[str, ...]
    room: float
    slope: float
    draw: Callable[[Canvas, Places], None]
    box: tuple[str, float] | None = None


class Places:
    """Where instants are drawn: as close as the room of every item allows, and never against time.

    Args:
        items: what is to be drawn.
        bands: stages; what starts where one ends is drawn below the border.
    """

    def __init__(self, items: Sequence[Item], bands: Sequence[Band]) -> None:
        self._heights: dict[int, float] = {}
        self._borders: dict[int, float] = {}
        free: dict[str, float] = {}
        ends: dict[int, float] = {}
        height: float = TOP
        spans = [(one.start_ns, one.end_ns) for one in items] + [(one.start_ns, one.end_ns) for one in bands]
        for t in sorted({t for span in spans for t in span}):
            height = max(height, ends.get(t, 0))
            if any(t in (band.start_ns, band.end_ns) for band in bands):
                first = height == TOP
                self._borders[t] = height + (0 if first else ARROW + 8)
                height += 4 if first else BORDER
            starting = [item for item in items if item.start_ns == t]
            height = max([height, *(free.get(column, 0) for item in starting for column in item.columns)])
            self._heights[t] = height
            for item in starting:
                free.update(dict.fromkeys(item.columns, height + item.room))
                ends[item.end_ns] = max(ends.get(item.end_ns, 0), height + item.slope)
            for band in bands:
                if band.start_ns == t:
                    least = self._borders[t] + 5 + 14 * len(band.words)
                    ends[band.end_ns] = max(ends.get(band.end_ns, 0), least)
        tops = [(item.box, self._heights[item.start_ns] + BOX) for item in items if item.box is not None]
        self._boxes = [(lane, top, top + tall) for (lane, tall), top in tops]

    def y(self, t: int) -> float:
        """Height of an instant."""
        return self._heights[t]

    def border(self, t: int) -> float:
        """Height of the border between two stages."""
        return self._borders[t]

    def half(self, lane: str, y: float) -> float:
        """How far from the middle of a lane an arrow ends at height ``y``."""
        inside = any(lane == other and top <= y <= bottom for other, top, bottom in self._boxes)
        return BOX_WIDTH / 2 if inside else 0


@dataclass
class Band:
    """One stage: from when to when, its name, and in a few words what it is about."""

    start_ns: int
    end_ns: int
    name: str
    words: tuple[str, ...]


@dataclass
class Chart:
    """Items, bands and pauses of one stretch of a recording; ``show`` draws them."""

    title: str
    caption: str
    items: list[Item]
    bands: list[Band]
    paused: list[tuple[int, int]]
    end: tuple[str, ...] = ()

    def show(self) -> str:
        """The chart as SVG text."""
        canvas, places = Canvas(WIDTH, self.title), Places(self.items, self.bands)
        bottom = places.border(self.bands[-1].end_ns)
        for number, band in enumerate(self.bands):
            top, foot = places.border(band.start_ns), places.border(band.end_ns)
            if number % 2 == 0:
                canvas.rect(8, top, WIDTH - 16, foot - top, fill="#f1f3f7", radius=6)
            canvas.text(20, top + 18, band.name, bold=True, anchor="start", size=13)
            for row, line in enumerate(band.words):
                canvas.text(20, top + 33 + 14 * row, line, anchor="start", size=11, color=MUTED)
        for start, end in self.paused:
            top, foot = places.y(start) + ARROW, places.y(end) + BOX
            left, right = X["rollout0.0"] - 52, X["rollout0.1"] + 66
            canvas.rect(left, top, right - left, foot - top, fill="#ffd43b", radius=6, opacity=0.33)
            canvas.text(
                right - 15, (top + foot) / 2, "generation paused", size=11, color="#8a6100", turned=True
            )
        for lane, role in zip(LANES, ROLES, strict=True):
            color = TRAINER if lane.startswith("trainer") else ROLLOUT
            canvas.line(X[lane], TOP - 12, X[lane], bottom + 6, color=color, width=1.4, opacity=0.55)
            canvas.rect(X[lane] - 60, 34, 120, 38, fill=PALE[color], edge=color, radius=8)
            canvas.text(X[lane], 50, role, size=12, bold=True)
            canvas.text(X[lane], 65, lane, size=11, color=MUTED, mono=True)
        canvas.text(20, 22, self.caption, anchor="start", size=12, color=MUTED)
        for item in sorted(self.items, key=lambda item: item.box is None):
            item.draw(canvas, places)
        for row, line in enumerate(self.end):
            canvas.text(20, bottom + 24 + 17 * row, line, anchor="start", size=12.5)
        foot = bottom + 17 * len(self.end) + 10
        legend(canvas, foot + 16)
        return canvas.render(foot + 32)


def legend(canvas: Canvas, y: float) -> None:
    """What the shapes mean."""
    canvas.arrow(20, y - 4, 50, y - 4)
    canvas.text(56, y, "control message", anchor="start", size=11, color=MUTED)
    canvas.arrow(170, y - 4, 200, y - 4, color=BUCKET, width=3.2)
    canvas.text(208, y, "data: parts of a bucket, a bucket", anchor="start", size=11, color=MUTED)
    canvas.rect(402, y - 12, 26, 15, fill=PALE[ROLLOUT], edge=ROLLOUT, radius=5)
    canvas.text(434, y, "what a rank does on its own", anchor="start", size=11, color=MUTED)
