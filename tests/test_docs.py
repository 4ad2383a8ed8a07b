"""Every snippet of README and docs runs, and so does every doctest of every module.

In a page, blocks marked ``python`` run in order in one namespace, ``pycon`` blocks are doctests in that
namespace, ``toml`` blocks parse, and lines of ``sh`` blocks that start with ``weightsync`` run, in an empty
folder.
``<!-- python ... -->`` runs too, unseen. ``<!-- not run: why -->`` before a block leaves it out.
"""

from __future__ import annotations

import doctest
import importlib
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = {
    "weightsync.reference": ROOT / "reference",
    "weightsync.backends": ROOT / "backends",
    "weightsync.sim": ROOT / "sim",
    "weightsync.cli": ROOT / "cli",
    "weightsync.testing": ROOT / "tests" / "testing",
}
DEVICE_LIBRARIES = {"torch_npu", "triton"}  # absent on a laptop; only their backend's modules need them
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^>]+ -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$"
    r"|^<!-- python\n(?P<unseen>.*?)^-->$",
    flags=re.MULTILINE | re.DOTALL,
)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


@dataclass(frozen=True)
class Block:
    """A fenced or unseen block: its language, its text, and the line of the page where the text starts."""

    language: str
    text: str
    line: int
    run: bool


def blocks(page: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page):
        part = "text" if match["unseen"] is None else "unseen"
        language = match["language"] if part == "text" else "python"
        line = page.count("\n", 0, match.start(part)) + 1
        found.append(Block(language, match[part], line, match["skip"] is None))
    return found


def module_names() -> list[str]:
    names = []
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            names.append(".".join([package, *(part for part in parts if part != "__init__")]))
    return names


def check_doctest(test: doctest.DocTest) -> None:
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    runner.run(test, out=report.append, clear_globs=False)
    assert runner.failures == 0, "".join(report)


def label(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("name", module_names())
def test_doctests_of_module(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name in DEVICE_LIBRARIES and name.startswith("weightsync.backends."):
            pytest.skip(str(error))
        raise
    for test in doctest.DocTestFinder(exclude_empty=True).find(module):
        check_doctest(test)


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_snippets_of_page(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__snippet__"}
    for block in blocks(page.read_text()):
        where = f"{page.name}, line {block.line}"
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec", dont_inherit=True)
            if block.run:
                exec(code, namespace)
        elif block.language == "pycon" and block.run:
            test = doctest.DocTestParser().get_doctest(
                block.text, namespace, where, str(page), block.line - 1
            )
            check_doctest(test)
        elif block.language == "sh" and block.run:
            for line in block.text.splitlines():
                if line.startswith("weightsync "):
                    run_command(line, where)


def run_command(line: str, where: str) -> None:
    """Run a command of ours, as installed beside this Python."""
    command = [str(Path(sys.executable).with_name("weightsync")), *shlex.split(line, comments=True)[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{where}: {line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_links_of_page_lead_to_files(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_readme_starts_with_two_one_line_commands() -> None:
    """The first runs the demo, the second the tests; each makes what it needs from nothing but python3."""
    demo, tests = [block for block in blocks((ROOT / "README.md").read_text()) if block.language == "sh"][:2]
    for block in (demo, tests):
        assert block.text.count("\n") == 1
        assert block.text.startswith("python3 -m venv .venv && .venv/bin/pip install -q -c constraints.txt ")
    assert "weightsync demo" in demo.text
    assert "nox -s tests" in tests.text


def test_a_block_is_found_with_its_line_and_mark() -> None:
    page = "a\n```python\nx = 1\n```\n<!-- not run: slow -->\n```sh\nb\n```\n<!-- python\ny = 2\n-->\n"
    assert blocks(page) == [
        Block("python", "x = 1\n", 3, True),
        Block("sh", "b\n", 7, False),
        Block("python", "y = 2\n", 10, True),
    ]


def test_a_wrong_doctest_is_seen() -> None:
    test = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", "wrong", 0)
    with pytest.raises(AssertionError, match="Expected"):
        check_doctest(test)
