"""The pictures of the docs are those that ``docs/pictures`` draws today, so that they cannot rot."""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
PICTURES = sorted(FOLDER.glob("*.svg"))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    subprocess.run([sys.executable, str(FOLDER), str(folder)], check=True)
    return folder


def stale(committed: Path, drawn: Path) -> list[str]:
    """Names of the pictures that are not drawn so today, or not committed."""
    names = {path.name for folder in (committed, drawn) for path in folder.glob("*.svg")}
    return sorted(name for name in names if _text(committed / name) != _text(drawn / name))


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


def test_committed_pictures_are_drawn_the_same_today(drawn: Path) -> None:
    assert stale(FOLDER, drawn) == [], "run: python docs/pictures"


def test_a_stale_a_missing_and_an_unknown_picture_are_seen(drawn: Path, tmp_path: Path) -> None:
    for path in drawn.glob("*.svg"):
        (tmp_path / path.name).write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    assert stale(tmp_path, drawn) == []
    (tmp_path / "update.svg").write_text("<svg/>", encoding="utf-8")
    (tmp_path / "clocks.svg").unlink()
    (tmp_path / "unknown.svg").write_text("<svg/>", encoding="utf-8")
    assert stale(tmp_path, drawn) == ["clocks.svg", "unknown.svg", "update.svg"]


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_fits_a_page_and_says_what_it_shows(path: Path) -> None:
    root = ET.fromstring(path.read_text(encoding="utf-8"))
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert int(root.attrib["width"]) <= 720
    assert title is not None
    assert title.text


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.name)
def test_a_picture_is_shown_in_a_page(path: Path) -> None:
    pages = [page.read_text(encoding="utf-8") for page in FOLDER.parent.glob("*.md")]
    assert any(f"](pictures/{path.name})" in page for page in pages)
