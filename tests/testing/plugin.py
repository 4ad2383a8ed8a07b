"""The shipped pytest plugin: an option that picks backends, and a header that names what is tested."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import pytest

pytest.register_assert_rewrite(
    "weightsync.testing.check_weight_sync",
    "weightsync.testing.conformance",
    "weightsync.testing.faults",
    "weightsync.testing.ranks",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--weightsync-backend NAME``, which may be given more than once."""
    parser.getgroup("weightsync").addoption(
        "--weightsync-backend",
        action="append",
        default=[],
        metavar="NAME",
        help="run the equivalence tests on this backend only; a missing device is then a failure, not a skip",
    )


def pytest_report_header(config: pytest.Config) -> str:
    """Say which version, which torch and which backends a run is about."""
    wanted = ", ".join(config.getoption("--weightsync-backend")) or "all that are here"
    return f"weightsync {_version('weightsync')}, torch {_version('torch')}, backends: {wanted}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"
