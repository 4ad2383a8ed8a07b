"""The wheel holds every module and data file and nothing else; the sdist holds what testing it takes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""
IGNORED = shutil.ignore_patterns(
    ".git", ".nox", ".venv*", ".*_cache", ".hypothesis", "build", "dist", "*.egg-info", "__pycache__"
)


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with one sdist and one wheel: what nox built and installed, or a build of a clean copy."""
    if given := os.environ.get("WEIGHTSYNC_DIST"):
        return Path(given)
    if find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed here; nox -s tests builds the wheel itself")
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=IGNORED)
    subprocess.run([sys.executable, "-c", BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


def expected_files() -> set[str]:
    """Every module, type marker and data file that the checkout has, by its name in the wheel."""
    files = set()
    for package, folder in SETUPTOOLS["package-dir"].items():
        patterns = [*SETUPTOOLS["package-data"]["*"], *SETUPTOOLS["package-data"].get(package, []), "*.py"]
        for pattern in patterns:
            for path in (ROOT / folder).glob(pattern):
                files.add(f"{package.replace('.', '/')}/{path.relative_to(ROOT / folder)}")
    return files


def test_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert inside == expected_files()


def test_every_module_belongs_to_a_listed_package() -> None:
    listed = {(ROOT / folder).resolve() for folder in SETUPTOOLS["package-dir"].values()}
    tops = {ROOT / "reference", ROOT / "backends", ROOT / "sim", ROOT / "cli", ROOT / "tests" / "testing"}
    found = {path.parent for top in tops for path in top.rglob("*.py")}
    assert found == listed
    assert set(SETUPTOOLS["packages"]) == set(SETUPTOOLS["package-dir"])


def test_every_package_is_marked_as_typed(wheel: zipfile.ZipFile) -> None:
    markers = {f"{package.replace('.', '/')}/py.typed" for package in SETUPTOOLS["packages"]}
    assert markers <= set(wheel.namelist())


def test_wheel_metadata(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Version"] == PYPROJECT["project"]["version"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "Apache-2.0"
    core = {line.split(">")[0] for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line}
    assert core == {"torch", "numpy", "safetensors", "simpy", "xxhash", "zstandard"}
    assert set(metadata.get_all("Provides-Extra", [])) == {"cli", "fsspec", "npu", "testing"}


def test_wheel_declares_the_command_and_the_pytest_plugin(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    text = wheel.read(name).decode()
    assert "weightsync = weightsync.cli.main:app" in text
    assert "weightsync = weightsync.testing.plugin" in text


def test_sdist_holds_what_testing_it_takes(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    tops = [
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "constraints.txt",
        "noxfile.py",
        "pyproject.toml",
        ".ci/run",
    ]
    tests = [str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("*.py")]
    docs = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    assert {*tops, *tests, *docs} <= inside


def test_installed_version_is_the_checkouts() -> None:
    assert version("weightsync") == PYPROJECT["project"]["version"]
