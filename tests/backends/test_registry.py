"""The registry imports on demand, lists what there is, and says why a backend is not here."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from weightsync.backends.gloo import GlooWorld
from weightsync.backends.inprocess import InprocessWorld
from weightsync.backends.registry import GROUP, Registry
from weightsync.reference.errors import BackendUnavailable


def entry(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, GROUP)


def test_our_backends_are_loaded_by_name() -> None:
    registry = Registry()
    assert registry.load("inprocess") is InprocessWorld
    assert registry.load("gloo") is GlooWorld
    assert registry.why_not("gloo") is None


def test_an_unknown_name_lists_what_there_is() -> None:
    registry = Registry([entry("theirs", "theirs.module:World")])
    with pytest.raises(BackendUnavailable, match="'glo' is unknown; expected one of inprocess, gloo, theirs"):
        registry.load("glo")
    with pytest.raises(BackendUnavailable, match="unknown"):
        registry.why_not("glo")


def test_an_entry_point_adds_a_backend() -> None:
    registry = Registry([entry("ordered", "collections:OrderedDict")])
    assert registry.load("ordered")(one=1) == {"one": 1}
    assert registry.names() == ("inprocess", "gloo", "ordered")


def test_an_entry_point_does_not_replace_a_backend_of_ours() -> None:
    assert Registry([entry("gloo", "collections:OrderedDict")]).load("gloo") is GlooWorld


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "nowhere.at_all:World",
            "nowhere.at_all could not be imported: ModuleNotFoundError: No module named 'nowhere'",
        ),
        ("collections:Missing", "collections could not be imported: AttributeError"),
    ],
)
def test_a_failed_import_says_module_and_error(value: str, words: str) -> None:
    registry = Registry([entry("broken", value)])
    with pytest.raises(BackendUnavailable, match="take another of inprocess, gloo, broken") as raised:
        registry.load("broken")
    assert words in str(raised.value)


def test_a_failed_import_is_remembered_and_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "driverless.py"
    module.write_text("raise OSError('libdriver.so: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry([entry("device", "driverless:World")])
    failure = registry.why_not("device")
    assert str(failure) == (
        "driverless could not be imported: OSError: libdriver.so: cannot open shared object file"
    )
    module.write_text("World = dict\n")
    with pytest.raises(BackendUnavailable, match=r"libdriver\.so"):
        registry.load("device")
    assert registry.why_not("device") is failure


def test_looking_at_names_imports_nothing() -> None:
    assert "broken" in Registry([entry("broken", "nowhere.at_all:World")]).names()
