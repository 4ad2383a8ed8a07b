"""One protocol, three clocks: what stays the same, and what each executor brings."""

from __future__ import annotations

from canvas import BAD, BUCKET, INK, MUTED, PALE, ROLLOUT, TRAINER, Canvas

WIDTH = 720
COLUMNS = (
    ("the machine's clock", "inprocess, gloo", TRAINER),
    ("simulated time", "sim", ROLLOUT),
    ("simulated, with faults", "sim with planted faults", BAD),
)
ROWS = (
    ("clock", ("asyncio", "SimPy, integer ns", "SimPy, integer ns")),
    ("control plane", ("in memory, or a TCPStore", "messages with a latency", "… that may come late")),
    ("fabric", ("in memory, or gloo", "a shared, modelled link", "… that may break")),
    ("local bytes", ("real", "real, or only counted", "real, and checked")),
)
ANSWERS = ("Does it arrive, bit for bit?", "How long will it take?", "What if it fails right here?")


def show() -> str:
    """The picture as SVG text."""
    canvas = Canvas(WIDTH, "One protocol on three clocks")
    canvas.rect(20, 18, WIDTH - 40, 56, fill=PALE[BUCKET], edge=BUCKET, radius=10)
    canvas.text(WIDTH / 2, 41, "the protocol, written once: Trainer and Rollout", bold=True, size=14.5)
    canvas.text(
        WIDTH / 2, 61, "reference/trainer.py, reference/rollout.py", size=11.5, color=MUTED, mono=True
    )
    canvas.rect(20, 92, WIDTH - 40, 46, fill=PALE[MUTED], edge=MUTED, radius=10)
    canvas.text(
        WIDTH / 2, 112, "the verbs: connect, snapshot, diff, send, receive, apply, commit, …", size=13
    )
    canvas.text(WIDTH / 2, 129, "reference/rank.py", size=11.5, color=MUTED, mono=True)
    canvas.arrow(WIDTH / 2, 75, WIDTH / 2, 91)
    label, left, wide, gap = 20, 122, 184, 10
    for number, (name, who, color) in enumerate(COLUMNS):
        x = left + number * (wide + gap)
        canvas.arrow(x + wide / 2, 139, x + wide / 2, 157)
        canvas.rect(x, 158, wide, 262, fill="#ffffff", edge=color, radius=10)
        canvas.rect(x, 158, wide, 50, fill=PALE[color], edge=color, radius=10)
        canvas.text(x + wide / 2, 179, name, bold=True, size=13)
        canvas.text(x + wide / 2, 198, who, size=12, color=MUTED)
        for row, (_, cells) in enumerate(ROWS):
            canvas.text(x + wide / 2, 236 + 34 * row, cells[number], size=12)
        canvas.line(x + 14, 358, x + wide - 14, 358, color=color, width=1, opacity=0.5)
        canvas.text(x + wide / 2, 382, "answers", size=11, color=MUTED)
        canvas.text(x + wide / 2, 402, ANSWERS[number], size=11.5, bold=True, color=INK)
    canvas.text(label, 183, "a backend", size=12, color=MUTED, anchor="start")
    canvas.text(label, 199, "supplies", size=12, color=MUTED, anchor="start")
    for row, (what, _) in enumerate(ROWS):
        canvas.text(label, 236 + 34 * row, what, bold=True, size=12.5, anchor="start")
    return canvas.render(438)
