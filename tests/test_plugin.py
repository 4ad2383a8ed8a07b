"""The pytest plugin that the wheel ships, in a pytest run of its own."""

from __future__ import annotations

from importlib.metadata import version

import pytest

pytest_plugins = ["pytester"]


@pytest.fixture
def outer(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile("def test_it(pytestconfig): print(pytestconfig.getoption('--weightsync-backend'))")
    return pytester


def test_header_names_versions_and_backends(outer: pytest.Pytester) -> None:
    result = outer.runpytest_subprocess("--weightsync-backend", "gloo")
    ours, torch = version("weightsync"), version("torch")
    result.stdout.fnmatch_lines([f"weightsync {ours}, torch {torch}, backends: gloo"])


def test_option_may_be_given_more_than_once(outer: pytest.Pytester) -> None:
    result = outer.runpytest_subprocess("-s", "--weightsync-backend=gloo", "--weightsync-backend=sim")
    result.stdout.fnmatch_lines(["*['gloo', 'sim']*"])
    result.assert_outcomes(passed=1)


def test_loading_the_plugin_does_not_load_torch(outer: pytest.Pytester) -> None:
    outer.makepyfile("import sys\ndef test_loaded(): assert 'torch' not in sys.modules")
    outer.runpytest_subprocess().assert_outcomes(passed=1)
