"""The backend that docs/backends.md builds passes the whole conformance kit, and really uses its files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "backends.md"


def built() -> dict[str, Any]:
    """What the page's first two blocks define: the backend, and its test class."""
    namespace: dict[str, Any] = {"__name__": "__page__"}
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in blocks[:2]:
        exec(compile(block, str(PAGE), "exec", dont_inherit=True), namespace)
    return namespace


TestFiles = built()["TestFiles"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_buckets_really_go_through_files(folder: Path) -> None:
    TestFiles().test_buckets_arrive_in_order_and_bit_for_bit()
    assert list((folder / "buckets").iterdir())
