"""The result page in a real browser: quiet, alone on the network, readable in light and dark, on a desk and a phone."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from weightsync.cli import result as results
from weightsync.cli.main import app
from weightsync.cli.run import run
from weightsync.cli.scenario_files import load
from weightsync.cli.tables import CheckRow
from weightsync.reference.trace import Span

WIDTHS, SCHEMES = (1280, 390), ("light", "dark")
LEAST_CONTRAST = 4.5
"""WCAG 2, level AA, for text of any size."""
NAMED = {"img", "image", "table", "region", "link"}

CONTRAST = """
(() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = one => {
    for (; one; one = one.parentElement) {
      const found = channels(getComputedStyle(one).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const one of document.querySelectorAll("body, body *:not(svg, svg *)")) {
    const words = [...one.childNodes].filter(n => n.nodeType === 3).map(n => n.data.trim()).join("");
    if (!words) continue;
    const [a, b] = [light(channels(getComputedStyle(one).color)), light(behind(one))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), one.tagName + " " + words.slice(0, 30)]);
  }
  return found;
})()
"""
OVERFLOW = """
(width => {
  const inside = one => {
    for (let up = one.parentElement; up; up = up.parentElement)
      if (["auto", "scroll"].includes(getComputedStyle(up).overflowX)) return true;
    return false;
  };
  return [...document.querySelectorAll("body *:not(svg *)")].filter(one => {
    const box = one.getBoundingClientRect();
    return (box.right > width + 0.5 || box.left < -0.5) && box.width && !inside(one);
  }).map(one => one.tagName + " " + (one.id || one.className) + " " + one.textContent.trim().slice(0, 30));
})(%d)
"""
SMALL = """
[...document.querySelectorAll("svg, img")].filter(one => {
  const box = one.getBoundingClientRect();
  return box.width < 100 || box.height < 50;
}).length
"""
OPEN = "document.querySelectorAll('details').forEach(one => one.open = true)"
REACHABLE = 'document.querySelectorAll("a[href], summary, [tabindex]").length'
FOCUSED = "[...document.querySelectorAll('*')].indexOf(document.activeElement)"


def problems(browser: Any, file: Path, width: int = 1280, scheme: str = "light") -> list[str]:
    """What a reader of the page would trip over, one sentence each."""
    browser.open(file, width, scheme)
    browser.run(OPEN)
    found = [f"says {one['entry']['text']!r}" for one in browser.happened("Log.entryAdded")]
    found += [f"prints {one['type']}" for one in browser.happened("Runtime.consoleAPICalled")]
    found += [
        f"throws {one['exceptionDetails']['text']}" for one in browser.happened("Runtime.exceptionThrown")
    ]
    urls = [one["request"]["url"] for one in browser.happened("Network.requestWillBeSent")]
    found += [f"asks for {url}" for url in urls if url != file.as_uri() and not url.startswith("data:")]
    found += [f"sticks out: {what}" for what in browser.run(OVERFLOW % width)]
    found += [f"{small} pictures without a size" for small in [browser.run(SMALL)] if small]
    found += [
        f"contrast {ratio:.1f} of {what}" for ratio, what in browser.run(CONTRAST) if ratio < LEAST_CONTRAST
    ]
    for node in browser.ask("Accessibility.getFullAXTree")["nodes"]:
        role = node.get("role", {}).get("value")
        if not node["ignored"] and role in NAMED and not node.get("name", {}).get("value"):
            found.append(f"{role} without a name")
    return found


@pytest.fixture(scope="module", params=["both", "failing"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real run: one with everything on it, and one with a planted fault as the command writes it."""
    out = tmp_path_factory.mktemp("page")
    if request.param == "both":
        write_both(out)
    else:
        flip = "faults.flip_bit={rollout=1,rank=0,version=2}"
        arguments = ["run", "tiny-sync", "--backend", "sim", "--set", flip, "--out", str(out)]
        assert CliRunner().invoke(app, arguments).exit_code == 1
    return out / "index.html"


def write_both(out: Path) -> None:
    """A scenario measured and modelled, with a curve, a job and events, which the scenario itself has not."""
    scenario = load("tiny-sync", ["workload.steps=15"])
    runs = []
    for backend in ("inprocess", "sim"):
        record = run(scenario, backend)
        assert record is not None
        lead = record.trainers[0]
        lead.curve = [{"step": step, "reward": step / 15, "loss": 1 / step} for step in range(1, 16)]
        record.job.extend(Span("trainer.0", "train", "train", start - 90, start) for start, _ in lead.inside)
        result = results.make_result(scenario, record)
        result["events"] = [{"update": 7, "event": "lost", "rank": "rollout1.0", "detail": "killed " * 20}]
        said = results.write(out / backend, result, record)
        runs.append(results.Run(result, record, said, backend))
    results.write_page(out, runs, [CheckRow("digests on inprocess and on sim", True)])


@pytest.mark.parametrize(("width", "scheme"), list(product(WIDTHS, SCHEMES)))
def test_the_page_is_fine_on_every_screen(browser: Any, page: Path, width: int, scheme: str) -> None:
    assert problems(browser, page, width, scheme) == []


def test_light_and_dark_differ_and_pictures_follow(browser: Any, page: Path) -> None:
    seen = set()
    for scheme in SCHEMES:
        browser.open(page, scheme=scheme)
        picture = "getComputedStyle(document.querySelector('svg text')).fill"
        seen.add((browser.run("getComputedStyle(document.body).backgroundColor"), browser.run(picture)))
    assert len({background for background, _ in seen}) == 2
    assert len({fill for _, fill in seen}) == 2


def test_the_keyboard_reaches_everything(browser: Any, page: Path) -> None:
    browser.open(page)
    browser.run(OPEN)
    reached = set()
    for _ in range(browser.run(REACHABLE)):
        for kind in ("keyDown", "keyUp"):
            browser.ask("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(browser.run(FOCUSED))
        assert browser.run("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert len(reached) == browser.run(REACHABLE)


def test_on_paper_it_is_light_and_every_update_is_there(browser: Any, page: Path) -> None:
    browser.open(page, width=720, scheme="dark")
    browser.run("document.querySelectorAll('details').forEach(one => one.open = false)")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.ask("Emulation.setEmulatedMedia", media="print", features=dark)
    try:
        assert browser.run("getComputedStyle(document.body).getPropertyValue('--bg')") == "#ffffff"
        assert browser.run("document.querySelector('details tbody tr').getBoundingClientRect().height") > 5
    finally:
        browser.ask("Emulation.setEmulatedMedia", media="screen", features=dark)


def add(text: str) -> Any:
    return lambda html: html.replace("</main>", text + "</main>")


@pytest.mark.parametrize("page", ["failing"], indirect=True)
@pytest.mark.parametrize(
    ("damage", "words", "where"),
    [
        (add("<script>console.error('no')</script>"), "prints error", {}),
        (add("<script>console.warn('no')</script>"), "prints warning", {}),
        (add("<script>missing()</script>"), "throws Uncaught", {}),
        (add('<img alt="x" width="200" height="90" src="http://example.invalid/x.png">'), "asks for http", {}),
        (add('<div style="width:1300px">wide</div>'), "sticks out: DIV", {}),
        (add('<div style="width:400px">wide</div>'), "sticks out: DIV", {"width": 390}),
        (add('<p style="color:#999">pale</p>'), "of P pale", {}),
        (add('<p style="color:#333">dark</p>'), "of P dark", {"scheme": "dark"}),
        (add('<svg role="img" style="width:200px" viewBox="0 0 2 1"></svg>'), "without a name", {}),
        (add('<img alt="x" src="data:,">'), "1 pictures without a size", {}),
        (lambda html: re.sub("<caption>.*?</caption>", "", html), "table without a name", {}),
    ],
)  # fmt: skip
def test_a_wrong_page_is_refused(
    browser: Any, page: Path, tmp_path: Path, damage: Any, words: str, where: dict[str, Any]
) -> None:
    html = re.sub(r"<meta http-equiv=.*\n", "", page.read_text())
    damaged = tmp_path / "index.html"
    damaged.write_text(html)
    assert problems(browser, damaged, **where) == []
    damaged.write_text(damage(html))
    assert any(words in one for one in problems(browser, damaged, **where))


@pytest.mark.parametrize("page", ["failing"], indirect=True)
def test_the_page_forbids_what_it_does_not_need(browser: Any, page: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "index.html"
    damaged.write_text(add("<script>document.title = 'changed'</script>")(page.read_text()))
    assert any("Content Security Policy" in one for one in problems(browser, damaged))
    assert browser.run("document.title") != "changed"
