"""The pytest plugin that the wheel ships, in a pytest run of its own."""

from __future__ import annotations

import subprocess
import sys
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


def test_known_failures_are_read_from_a_file(outer: pytest.Pytester) -> None:
    outer.makepyfile(
        test_theirs="""
        import pytest
        class TestMine:
            @pytest.mark.parametrize("n", [1, 2])
            def test_wrong(self, n): raise ValueError
            def test_right(self): pass
        def test_other(): raise ValueError
        """
    )
    outer.makefile(
        ".txt", known="# theirs\ntest_theirs.py::TestMine::test_wrong  # both\n\ntest_theirs.py::test_other\n"
    )
    result = outer.runpytest_subprocess("--weightsync-xfails", "known.txt", "test_theirs.py")
    result.assert_outcomes(xfailed=3, passed=1)
    result.stdout.fnmatch_lines(["*known failures: known.txt*"])


def test_a_known_failure_that_is_no_test_warns(outer: pytest.Pytester) -> None:
    outer.makefile(".txt", known="test_it.py::test_gone\n")
    result = outer.runpytest_subprocess("--weightsync-xfails", "known.txt")
    result.stdout.fnmatch_lines(["*known.txt lists 'test_it.py::test_gone', which no collected test is*"])
    result.assert_outcomes(passed=1, warnings=1)


def test_a_missing_file_of_known_failures_is_an_error(outer: pytest.Pytester) -> None:
    result = outer.runpytest_subprocess("--weightsync-xfails", "gone.txt")
    result.stderr.fnmatch_lines(["*--weightsync-xfails gone.txt: *No such file*"])


def test_assertions_of_the_kit_are_rewritten(outer: pytest.Pytester) -> None:
    outer.makepyfile(
        """
        from weightsync.testing import conformance_base, faults
        def test_loaders():
            for module in (conformance_base, faults):
                assert type(module.__loader__).__name__ == "AssertionRewritingHook"
        """
    )
    outer.runpytest_subprocess().assert_outcomes(passed=1)


def test_the_kit_imports_without_pytest() -> None:
    code = "import sys, weightsync.testing; assert 'pytest' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
