"""The glossary is sorted, defines words that are in use, and knows every bold word of the tour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GLOSSARY = re.findall(r"^### (.+)\n((?:.+\n?)+)", (DOCS / "glossary.md").read_text(), flags=re.MULTILINE)
WORDS = [word for word, _ in GLOSSARY]
TOUR = (DOCS / "tour.md").read_text()


def undefined(page: str) -> list[str]:
    """Bold words of a page that the glossary lacks, in the singular too."""
    bold = {word.lower() for word in re.findall(r"\*\*(.+?)\*\*", page)}
    return sorted(word for word in bold if not {word, word.removesuffix("s")} & {w.lower() for w in WORDS})


def used_in(text: str, word: str) -> bool:
    """True when ``text`` has the word, in any case, alone or in a name."""
    spelled = "[ _-]?".join(map(re.escape, word.split()))
    return re.search(rf"(?<![a-z]){spelled}", text, flags=re.IGNORECASE) is not None


@pytest.fixture(scope="module")
def everything() -> str:
    pages = [page for page in (ROOT / "README.md", *DOCS.glob("*.md")) if page.name != "glossary.md"]
    modules = [
        path for folder in ("reference", "backends", "sim", "cli") for path in (ROOT / folder).rglob("*.py")
    ]
    return "\n".join(path.read_text() for path in (*pages, *modules))


def test_words_are_sorted_and_defined_once() -> None:
    assert sorted({word.lower() for word in WORDS}) == [word.lower() for word in WORDS]


@pytest.mark.parametrize("word", [word for word in WORDS if word not in ("DP", "EP", "PP")])
def test_a_word_is_in_use(word: str, everything: str) -> None:
    """All but those of parallelisms that are defined to say that nothing here does them."""
    assert used_in(everything, word)


@pytest.mark.parametrize(("word", "text"), GLOSSARY, ids=WORDS)
def test_an_entry_is_a_few_sentences(word: str, text: str) -> None:
    assert 20 < len(text) < 400


def test_bold_words_of_the_tour_are_defined() -> None:
    assert undefined(TOUR) == []


def test_an_undefined_and_an_unused_word_are_seen() -> None:
    assert undefined("two **buckets** and a **gizmo**") == ["gizmo"]
    assert not used_in("unleased", "lease")
    assert used_in("update.undo_log", "undo log")
