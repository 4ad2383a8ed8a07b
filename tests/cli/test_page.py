"""What the result page says and how its pictures are made, without a browser."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from weightsync.cli import canvas, page, page_checks, pictures
from weightsync.cli import result as results
from weightsync.cli.gantt import typical
from weightsync.cli.record import RunRecord
from weightsync.cli.run import run
from weightsync.cli.scenario_files import load
from weightsync.cli.tables import CheckRow, format_bytes


def made(*overrides: str, backend: str = "sim") -> results.Run:
    scenario = load("tiny-sync", overrides)
    record = run(scenario, backend)
    assert record is not None
    return shown(results.make_result(scenario, record), record)


def shown(result: results.Result, record: RunRecord, folder: str = "") -> results.Run:
    return results.Run(result, record, results.conditions(record), folder)


def with_curve(one: results.Run, **more: Any) -> results.Run:
    steps = range(1, 1 + len(one.result["updates"]))
    curve = [
        {"step": step, "loss": 2 / step, "lr": 1e-3} | {k: v / step for k, v in more.items()}
        for step in steps
    ]
    return dataclasses.replace(one, result={**one.result, "curve": curve})


class Tags(HTMLParser):
    """Every start tag of a page with its attributes, and the text of its headings."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, *tags: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag in tags]


@pytest.fixture(scope="module")
def tiny() -> results.Run:
    return made()


def test_a_page_stands_alone_and_has_real_headings_and_captions(tiny: results.Run) -> None:
    html = page.render([tiny]).html
    tags = Tags(html)
    assert [tag for tag, _ in tags.found if re.fullmatch("h[1-6]", tag)] == ["h1"] + ["h2"] * 7
    assert len(tags.of("table")) == len(tags.of("caption")) == 4
    assert all(one.get("scope") for one in tags.of("th"))
    assert not tags.of("script", "iframe", "object", "embed", "img")
    assert all(re.fullmatch(r"[\w.-]+\.json|pictures/[\w-]+\.png", one["href"] or "") for one in tags.of("a"))
    assert {one["href"] for one in tags.of("link")} == {"data:,"}
    assert "://" not in re.sub(r' xmlns(:\w+)?="[^"]*"', "", html)
    assert all(one["role"] == "img" and one["aria-label"] for one in tags.of("svg"))
    ids = Counter(one["id"] for _, one in tags.found if "id" in one)
    assert max(ids.values()) == 1


def test_links_lead_to_what_was_written(tmp_path: Path) -> None:
    runs = []
    for backend in ("inprocess", "sim"):
        one = made(backend=backend)
        said = results.write(tmp_path / backend, one.result, one.record)
        runs.append(dataclasses.replace(one, conditions=said, folder=backend))
    results.write_page(tmp_path, runs)
    links = Tags((tmp_path / "index.html").read_text()).of("a")
    assert len(links) == 6 + 5
    for one in links:
        assert (tmp_path / str(one["href"])).is_file()
    assert {file.stem for file in (tmp_path / "pictures").iterdir()} == {
        "bytes", "tensors", "phases", "gantt-inprocess", "gantt-sim",
    }  # fmt: skip


def test_equal_runs_give_equal_pictures_and_others_do_not(tiny: results.Run) -> None:
    again, other = made(), made("workload.density=0.9")
    assert again.result == tiny.result
    pages = [page.render([one]) for one in (tiny, again, other)]
    svgs = [re.findall("<svg.*?</svg>", one.html, flags=re.DOTALL) for one in pages]
    assert pages[0].pngs == pages[1].pngs
    assert svgs[0] == svgs[1]
    assert pages[0].pngs["bytes"] != pages[2].pngs["bytes"]
    assert svgs[0] != svgs[2]


def test_a_picture_has_the_pages_colours_and_no_other(tiny: results.Run) -> None:
    one = with_curve(tiny, reward=1)
    svgs = re.findall("<svg.*?</svg>", page.render([one]).html, flags=re.DOTALL)
    assert len(svgs) == 6
    for svg in svgs:
        assert re.findall("#[0-9a-f]{6}", svg) == []
        assert set(re.findall(r"var\(--([\w-]+)\)", svg)) <= {*canvas.COLOURS, "sans"}
        assert "DejaVu" not in svg
    assert len({svg for svg in svgs if "<text" in svg}) == 6


def test_a_users_matplotlib_settings_do_not_change_a_picture(tiny: results.Run) -> None:
    (drawing,) = [one for one in pictures.sizes(tiny.result) if one.name == "bytes"]
    before = canvas.svg(drawing)
    with canvas.mpl.rc_context({"axes.facecolor": "red", "font.size": 30, "axes.grid": True}):
        assert canvas.svg(drawing) == before


def test_a_job_without_a_curve_has_no_empty_picture(tiny: results.Run) -> None:
    assert pictures.curves(tiny.result) == []
    assert "The job" not in page.render([tiny]).html
    assert [one.name for one in pictures.curves(with_curve(tiny).result)] == ["loss", "density"]
    both = pictures.curves(with_curve(tiny, reward=1).result)
    assert [one.name for one in both] == ["reward", "density"]
    assert both[0].alt == "Mean reward per step: 1 at step 1, 0.333 at step 3."


def test_events_are_listed_and_marked(tiny: results.Run) -> None:
    curved = with_curve(tiny, reward=1)
    events = [
        {"update": 2, "event": "lost", "rank": "rollout1.0"},
        {"update": 3, "event": "rejoined", "version": 3},
    ]
    eventful = dataclasses.replace(curved, result={**curved.result, "events": events})
    html = page.render([eventful]).html
    assert re.findall(r"<th scope=\"col\" class=\"text\">(update|event|rank|version)</th>", html) == [
        "update", "event", "rank", "version",
    ]  # fmt: skip
    assert "<h2>Events" in html
    assert "<h2>Events" not in page.render([curved]).html
    assert canvas.svg(pictures.curves(eventful.result)[0]) != canvas.svg(pictures.curves(curved.result)[0])


def test_what_a_scenario_says_is_text_not_markup(tiny: results.Run) -> None:
    bad = "<script>alert('x')</script>"
    scenario = {**tiny.result["scenario"], "description": bad}
    events = [{"step": 1, bad: bad}]
    html = page.render(
        [dataclasses.replace(tiny, result={**tiny.result, "scenario": scenario, "events": events})]
    ).html
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 3


def test_key_figures_are_those_of_the_result(tiny: results.Run) -> None:
    updates = tiny.result["updates"]
    figures = {one.label: one for one in page.key_figures(tiny.result)}
    sent = sum(one["full_bytes"] + one["delta_bytes"] for one in updates)
    assert figures["updates"].value == "3 of 3"
    assert figures["last version"].value == "3"
    assert figures["bytes broadcast"].value == format_bytes(sent)
    assert format_bytes(3 * updates[0]["full_bytes"]) in figures["bytes broadcast"].note
    low, high = sorted(one["density"] for one in updates[1:])
    assert figures["median density"].value == pictures.percent((low + high) / 2)
    waits, paused = page.key_times([tiny])
    update = typical(updates)
    assert update is not None
    assert waits.value == pictures.clock(update["exposed_ns"])
    assert waits.note == f"modelled on sim, update {update['update']}"
    assert paused.value == pictures.clock(max(update["paused_ns"].values()))


def test_measured_and_modelled_have_a_column_each() -> None:
    html = page.render([made(backend="inprocess"), made()]).html
    for words in ("measured on inprocess</th>", "modelled on sim</th>", "measured on inprocess, update"):
        assert words in html
    alone = re.sub("<style>.*</style>", "", page.render([made(backend="inprocess")]).html, flags=re.DOTALL)
    assert "measured" in alone
    assert "modelled" not in alone


def verdict_of(
    rows: list[CheckRow], more: list[CheckRow] | None = None, values: bool = True
) -> page_checks.Verdict:
    result = {"backend": "sim", "values": values, "checks": [dataclasses.asdict(row) for row in rows]}
    return page_checks.verdict([result], more or [])


def test_the_verdict_is_green_only_when_every_check_held() -> None:
    good, bad = CheckRow("update 1 commits", True), CheckRow("update 2 commits", False, "it said no")
    assert verdict_of([good, good]) == page_checks.Verdict(
        True, "All 2 checks hold, bit for bit.", ("2 of 2 on sim",)
    )
    wrong = verdict_of([good, bad])
    assert not wrong.right
    assert wrong.text == "1 of 2 checks failed, first on sim: update 2 commits: it said no."
    assert not verdict_of([good], [bad]).right
    assert verdict_of([good], [bad]).parts == ("1 of 1 on sim", "0 of 1 between them")
    assert not verdict_of([]).right
    assert "no bytes were compared" in verdict_of([good], values=False).text


def test_checks_are_grouped_by_kind_and_none_is_lost() -> None:
    one = made("faults.flip_bit={rollout=1,rank=0,version=2}")
    groups = {group.what: group.counts[0] for group in page_checks.groups([one.result], [])}
    assert groups == {
        "updates commit": (2, 3),
        "bytes of rollout 0, rank 0 after each version": (2, 2),
        "bytes of rollout 1, rank 0 after each version": (1, 2),
        "bytes of rollout 1, rank 1 after each version": (2, 2),
        "digest of each version on every rank": (1, 2),
        "no read races a write": (1, 1),
    }
    html = page.render([one]).html
    for row in one.result["checks"]:
        assert row["ok"] or html.count(row["name"]) >= 1
    assert 'class="verdict wrong"' in html
