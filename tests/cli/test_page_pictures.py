"""The page's pictures from data made by hand: colours that can be read, the Gantt, axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weightsync.cli import canvas, pictures
from weightsync.cli.gantt import QUIET, gantt, typical
from weightsync.cli.lanes import place
from weightsync.reference.trace import Span, Trace


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(part * weight for part, weight in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


PAPER = ("bg", "card", "grid", "quiet", "unsent", "on-slice")
TEXTS = ("ink", "muted", "link", "good", "bad")


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_and_slices_can_be_read(theme: int) -> None:
    def colour(name: str) -> str:
        return canvas.COLOURS[name][theme]

    for name in TEXTS:
        assert min(contrast(colour(name), colour(behind)) for behind in ("bg", "card")) >= 4.5, name
    for name in canvas.COLOURS.keys() - {*PAPER, *TEXTS}:
        assert contrast(colour(name), colour("on-slice")) >= 4.5, name
        assert contrast(colour(name), colour("bg")) >= 3, name


def test_no_two_colours_of_the_palette_share_a_sentinel() -> None:
    assert len(set(canvas.SENTINELS.values())) == len(canvas.COLOURS)
    assert not set(canvas.SENTINELS.values()) & {one for pair in canvas.COLOURS.values() for one in pair}


def test_the_typical_update_is_the_median_delta() -> None:
    def update(
        number: int, kind: str, total: int, committed: bool = True, members: Sequence[int] = (0, 1)
    ) -> dict[str, Any]:
        return {
            "update": number, "kind": kind, "total_ns": total, "committed": committed, "members": list(members),
        }  # fmt: skip

    full, slow, fast, middle = (
        update(1, "full", 1),
        update(2, "delta", 9),
        update(3, "delta", 3),
        update(4, "delta", 5),
    )
    assert typical([full, slow, fast, middle]) == middle
    assert typical([full, slow, fast, update(4, "delta", 5, committed=False)]) == fast
    assert typical([full, fast, update(4, "delta", 1, members=[0])]) == fast  # a rollout was lost meanwhile
    assert typical([full]) == full
    assert typical([update(1, "full", 1, committed=False)]) is None


def test_a_gantt_shows_one_update_in_the_lanes_of_the_trace() -> None:
    start, end = 1_000, 9_000
    spans = [
        Span("trainer.0", "join", "wait", 2_000, 8_000, 0, 2),
        Span("trainer.0", "send", "broadcast", 3_000, 4_000, 96, 2, ok=False),
        Span("rollout0.0", "serve", "idle", 0, 20_000, 0, 2),
        Span("trainer.0", "send", "broadcast", 9_500, 9_900, 96, 3),
    ]
    job = Trace([Span("trainer.0", "train", "train", 0, 1_500)])
    drawing = gantt(place(Trace(spans), job), 2, start, end, "gantt", "modelled on sim")
    assert list(drawing.hints.values()) == [
        "trainer.0: train (train), 1.50 µs",
        "trainer.0: join (wait), 6.00 µs",
        "trainer.0: send (broadcast), 1.00 µs, 96 B, failed",
        "rollout0.0: serve (idle), 20.0 µs",
    ]
    assert "8.00 µs on 2 ranks in 3 lanes" in drawing.alt
    svg = canvas.svg(drawing)
    assert svg.count("<title>") == 4
    assert "var(--train)" in svg
    assert "var(--bad)" in svg  # the failed slice has a red edge
    for lane in ("trainer.0  training", "protocol 1", "rollout0.0  protocol 1"):
        assert f">{lane}</text>" in svg


def test_waiting_slices_are_muted_and_count_no_depth() -> None:
    spans = [
        Span("trainer.0", "join", "wait", 0, 100, 0, 1),
        Span("trainer.0", "gather", "tp_gather", 10, 90, 0, 1),
        Span("trainer.0", "encode", "encode", 20, 80, 0, 1),
    ]
    drawing = gantt(place(Trace(spans)), 1, 0, 100, "gantt", "modelled on sim")
    (ax,) = drawing.draw(canvas.LIGHT).axes
    heights = {patch.get_gid(): (patch.get_height(), patch.get_facecolor()) for patch in ax.patches}
    outer, gather, encode = (heights[f"slice-{number}"] for number in range(3))
    assert gather[0] > encode[0] > outer[0]
    assert len({colour for _, colour in heights.values()}) == 3
    assert set(QUIET) >= {"wait", "idle", "control"}


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("1.50 MB", "1.5 MB"), ("2.00 kB", "2 kB"), ("10.0 ms", "10 ms"), ("100 ms", "100 ms"),
        ("0 ns", "0"), ("640 B", "640 B"),
    ],
)  # fmt: skip
def test_a_tick_says_no_more_than_it_has_to(text: str, short: str) -> None:
    assert pictures.tick(text) == short


def test_large_reductions_get_a_log_axis() -> None:
    def sizes(delta: int) -> str:
        update = {"update": 1, "full": [], "full_bytes": 0, "delta_bytes": delta, "tensors": None}
        (drawing,) = pictures.sizes({"updates": [update], "dense_bytes": 10_000})
        scale: str = drawing.draw(canvas.LIGHT).axes[0].get_yscale()
        return scale

    assert sizes(9_000) == "linear"
    assert sizes(90) == "log"
