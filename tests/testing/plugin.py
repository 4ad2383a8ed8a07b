"""The shipped pytest plugin: which backends are tested, which failures are known, and a header that says so."""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest


class UnmatchedFailure(pytest.PytestWarning):
    """An id in the file of known failures that names no collected test."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--weightsync-backend NAME`` and ``--weightsync-xfails FILE``; both may be given more than once."""
    group = parser.getgroup("weightsync")
    group.addoption(
        "--weightsync-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="run the equivalence tests on this backend only; a missing device is then a failure, not a skip",
    )
    group.addoption(
        "--weightsync-xfails",
        action="append",
        default=[],
        metavar="FILE",
        help="file of test ids that are known to fail, one a line; an id also stands for everything below it; "
        "what follows a # is ignored",
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Say which version, which torch and which backends a run is about, and which failures are known."""
    wanted = ", ".join(config.getoption("--weightsync-backend")) or "all that are here"
    header = f"weightsync {_version('weightsync')}, torch {_version('torch')}, backends: {wanted}"
    files = ", ".join(config.getoption("--weightsync-xfails"))
    return f"{header}, known failures: {files}" if files else header


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the known failures; warn of ids that match nothing, so that the list cannot rot."""
    for file in config.getoption("--weightsync-xfails"):
        for known in _ids(Path(file)):
            found = [item for item in items if _matches(item.nodeid, known)]
            for item in found:
                item.add_marker(pytest.mark.xfail(reason=f"listed in {file}"))
            if not found:
                warnings.warn(
                    f"{file} lists {known!r}, which no collected test is", UnmatchedFailure, stacklevel=1
                )


def _ids(file: Path) -> list[str]:
    try:
        lines = file.read_text().splitlines()
    except OSError as error:
        raise pytest.UsageError(f"--weightsync-xfails {file}: {error}") from error
    return [known for known in (line.split("#")[0].strip() for line in lines) if known]


def _matches(nodeid: str, known: str) -> bool:
    return nodeid == known or nodeid.startswith((f"{known}::", f"{known}["))


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
