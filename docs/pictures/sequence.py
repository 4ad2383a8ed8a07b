"""What a recording comes to in a sequence chart: arrows, boxes, stages and pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from canvas import BAD, BUCKET, INK, MUTED, PALE, ROLLOUT, TRAINER, Canvas
from chart import ARROW, BOX, BOX_WIDTH, DATA, LANES, Band, Chart, Item, Places, X
from recording import Recording, Said

from weightsync.reference.trace import Span

LINE, ROW, SLOPE = 13, 18, 5
STAGES = {
    "connect": ("who takes part,", "on which base?"),
    "source": ("snapshot, and", "what changed"),
    "start": ("ready for this", "version?"),
    "transfer": ("send, prove,", "apply"),
    "commit": ("new label,", "generate on"),
}
LOCAL = {
    "connect", "snapshot", "diff", "digest", "merge", "narrow", "encode", "decode", "validate",
    "pause", "apply", "rollback", "commit", "resume",
}  # fmt: skip
REPLIES = {"start": "ready", "commit": "done", "rollback": "done", "apply": "digest share"}


def gap(a: str, b: str) -> str:
    """Name of the column between two neighbouring lanes."""
    return "|".join(sorted((a, b), key=LANES.index))


def words(said: Said, follower: bool) -> tuple[str, str]:
    """What an arrow says, and in which colour."""
    body = said.message.get("body", {})
    if said.kind == "vote":
        return ("vote: yes", MUTED) if said.message["ok"] else ("vote: no", BAD)
    if said.kind == "verdict":
        yes = all(vote["ok"] for vote in said.message["votes"].values())
        return ("verdict: go on", MUTED) if yes else ("verdict: give up", BAD)
    if said.kind == "request":
        if said.op == "hello":
            return f"hello, epoch {body['epoch']}", INK
        if said.op == "start":
            return f"start {body['version']} on {body['base']}", INK
        if said.op in ("abort", "rollback"):
            return {"abort": f"abort {body['version']}", "rollback": "roll back"}[said.op], BAD
        return {"prepare": f"prepare {body.get('version')}", "commit": f"commit {body.get('version')}"}.get(
            said.op, said.op
        ), INK
    if said.op == "hello":
        return f"holds {body['version']}, {'dirty' if body['dirty'] else 'clean'}", INK
    if said.op == "prepare":
        return "received" if follower else "prepared", INK
    return REPLIES.get(said.op, said.op), INK


def messages(recording: Recording, since: int, until: int, wanted: Callable[[Said], bool]) -> list[Item]:
    """Control messages as thin arrows with a word on each."""
    items = []
    seen: Counter[tuple[str, int]] = Counter()
    for said in recording.said:
        if said.arrived_ns is None or not (since <= said.sent_ns < until) or not wanted(said):
            continue
        text, color = words(said, follower=said.source == LANES[3])
        way = (gap(said.source, said.target), said.sent_ns)
        nth = seen[way]  # messages of one instant go one after the other
        seen[way] += 1

        def draw(
            canvas: Canvas,
            places: Places,
            said: Said = said,
            text: str = text,
            color: str = color,
            nth: int = nth,
        ) -> None:
            x, to_x = float(X[said.source]), float(X[said.target])
            y = places.y(said.sent_ns + nth) + ARROW
            sign = 1 if to_x > x else -1
            x += sign * places.half(said.source, y)
            to_x -= sign * places.half(said.target, y + SLOPE)
            canvas.arrow(x, y, to_x, y + SLOPE, color=color)
            canvas.text((x + to_x) / 2, y + SLOPE / 2 - 4, text, size=11.5, color=color, halo=True)

        items.append(Item(said.sent_ns + nth, said.arrived_ns + nth, way[:1], ROW, SLOPE, draw))
    return items


def buckets(recording: Recording, spans: Sequence[Span]) -> list[Item]:
    """Buckets as thick arrows from the lead through the leader to the last rank, from when all were ready."""
    items = []
    receives = [span for span in spans if span.verb == "receive"]
    for sent in recording.sent:
        ready = [span.start_ns for span in receives if span.end_ns == sent.end_ns]
        if not ready:
            continue
        start_ns = max(sent.start_ns, *ready)
        name = "END" if sent.kind == "end" else f"{sent.kind}, {sent.nbytes} B"

        def draw(canvas: Canvas, places: Places, name: str = name, start_ns: int = start_ns) -> None:
            at = places.y(start_ns) + DATA
            canvas.arrow(X[LANES[1]], at, X[LANES[3]], at, color=BUCKET, width=3.2)
            canvas.dot(X[LANES[2]], at, 4.5, fill=BUCKET)
            canvas.text(
                (X[LANES[1]] + X[LANES[2]]) / 2 + 4,
                at - 6,
                name,
                size=11.5,
                color=BUCKET,
                bold=True,
                halo=True,
            )

        columns = (gap(LANES[1], LANES[2]), gap(LANES[2], LANES[3]))
        items.append(Item(start_ns, sent.end_ns, columns, ROW + 4, DATA - ARROW + SLOPE, draw))
    return items


def collectives(spans: Sequence[Span]) -> list[Item]:
    """Gathers and all-gathers among the trainer's ranks; each starts when both have come."""
    items = []
    for verb, text in (("exchange", "counts"), ("gather", "gather")):
        pairs = [[span for span in spans if (span.rank, span.verb) == (lane, verb)] for lane in LANES[:2]]
        for one, other in zip(*pairs, strict=True):
            start_ns, end_ns = max(one.start_ns, other.start_ns), other.end_ns

            def draw(canvas: Canvas, places: Places, start_ns: int = start_ns, text: str = text) -> None:
                at = places.y(start_ns) + DATA
                canvas.arrow(X[LANES[0]], at, X[LANES[1]], at, color=BUCKET, width=2.2)
                if text != "gather":
                    canvas.arrow(X[LANES[1]], at, X[LANES[0]], at, color=BUCKET, width=2.2)
                middle = (X[LANES[0]] + X[LANES[1]]) / 2
                canvas.text(middle, at - 5, text, size=11.5, color=BUCKET, halo=True)

            items.append(Item(start_ns, end_ns, (gap(*LANES[:2]),), ROW + 4, DATA - ARROW + SLOPE, draw))
    return items


def boxes(spans: Sequence[Span], hidden: frozenset[str] = frozenset()) -> list[Item]:
    """What ranks do on their own: verbs that follow each other share one box."""
    items = []
    for lane in LANES:
        run: list[Span] = []
        own = [span for span in spans if span.rank == lane and span.verb in LOCAL - hidden]
        for span in [*own, None]:
            alone = {"pause", "resume"} & {one.verb for one in (*run[-1:], span) if one is not None}
            if run and (span is None or alone or span.start_ns - run[-1].end_ns > 1000):
                items.append(_box(lane, run))
                run = []
            if span is not None:
                run.append(span)
    return items


def _box(lane: str, run: Sequence[Span]) -> Item:
    names = list(dict.fromkeys(span.verb for span in run))
    color = TRAINER if lane.startswith("trainer") else ROLLOUT
    height = LINE * len(names) + 5
    start_ns = run[0].start_ns

    def draw(canvas: Canvas, places: Places) -> None:
        top = places.y(start_ns) + BOX
        canvas.rect(X[lane] - BOX_WIDTH / 2, top, BOX_WIDTH, height, fill=PALE[color], edge=color, radius=6)
        for row, name in enumerate(names):
            canvas.text(X[lane], top + 12.5 + LINE * row, name, size=11)

    slope = height + BOX - ARROW + 1
    return Item(start_ns, run[-1].end_ns, (lane,), slope, slope, draw, (lane, height))


def pauses(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """From the end of each pause to the start of the next resume."""
    found, since = [], None
    for span in sorted((s for s in spans if s.verb in ("pause", "resume")), key=lambda s: s.start_ns):
        if span.verb == "pause":
            since = span.end_ns
        elif since is not None:
            found.append((since, span.start_ns))
            since = None
    return found


def stages(spans: Sequence[Span], update: int) -> list[Band]:
    """The lead's stages of one update: start, end, name, question. Each ends with the lead's agreement."""
    own = [span for span in spans if span.rank == LANES[1] and span.update == update]
    ends = sorted(span.end_ns for span in own if span.verb == "agree")
    starts = [min(span.start_ns for span in own), *ends]
    return [
        Band(start, end, f"{number} {name}", STAGES[name])
        for number, (name, start, end) in enumerate(zip(STAGES, starts, ends, strict=False), start=1)
    ]


def failures(spans: Sequence[Span]) -> list[Item]:
    """Calls that failed: one cross for those of one instant."""
    items = []
    failed = [(span.start_ns, span.rank) for span in spans if span.verb == "call" and not span.ok]
    for start_ns, lane in dict.fromkeys(failed):
        text = f"commit fails, {failed.count((start_ns, lane))} times"

        def draw(
            canvas: Canvas, places: Places, start_ns: int = start_ns, lane: str = lane, text: str = text
        ) -> None:
            x, y = X[lane], places.y(start_ns) + DATA
            for way in (-6, 6):
                canvas.line(x - 6, y - way, x + 6, y + way, color=BAD, width=2.6)
            canvas.text(x + 14, y + 4, text, size=11.5, color=BAD, anchor="start", halo=True)

        columns = (lane, gap(LANES[1], LANES[2]))
        items.append(Item(start_ns, start_ns + 1, columns, 2 * ROW, ROW, draw))
    return items


def of_update(said: Said, *updates: int) -> bool:
    """False for a ballot of another update, and for the end of the run."""
    if said.kind in ("request", "reply"):
        return said.op != "bye"
    return int(said.op.split("/")[0]) in updates


def success(recording: Recording) -> str:
    """The chart of one update from connect to commit."""
    spans = recording.spans(3)
    bands = stages(spans, 3)
    since, until = bands[0].start_ns, bands[-1].end_ns
    said = messages(recording, since, until + 1, lambda said: of_update(said, 3))
    bands[-1].end_ns = max(item.end_ns for item in said)
    chart = Chart(
        "One weight update, stage by stage, as a sequence chart",
        "One update, drawn from a run on the simulated clock; time runs down.",
        [*said, *buckets(recording, spans), *collectives(spans), *boxes(spans)],
        bands,
        pauses(spans),
    )
    return chart.show()


def rollback(recording: Recording) -> str:
    """The chart of an update that fails after prepare, and of how the next one begins."""
    bands = [*stages(recording.spans(2), 2)[3:], *stages(recording.spans(3), 3)[:1]]
    bands[1].words = ("the lead cannot", "say commit")
    bands[2].name, bands[2].words = "next: 1 connect", ("the rollout holds", "version 1, clean")
    since, until = bands[0].start_ns, bands[-1].end_ns
    spans = [
        span for span in (*recording.spans(2), *recording.spans(3)) if since < span.end_ns <= until
    ]  # fmt: skip
    said = messages(recording, since, until, lambda said: of_update(said, 2, 3))
    chart = Chart(
        "An update that fails between prepare and commit, and its rollback, as a sequence chart",
        "Version 2 fails between prepare and commit, on the simulated clock with a planted fault.",
        [*said, *buckets(recording, spans), *collectives(spans), *boxes(spans), *failures(spans)],
        bands,
        pauses(spans),
        ("Stages 2 to 5 follow as ever: version 3 is a delta on version 1, and commits.",),
    )
    return chart.show()
