"""Every check of this project, as nox sessions.

By default: lint, types, tests, examples, dist. On request (``nox -s NAME``): matrix, faults, sweeps,
fuzz, real, minimums, nightly, bench. Whatever runs our code runs the installed wheel, which is built
from the sdist, so that a file missing from either is noticed.
"""

from __future__ import annotations

import functools
import re
import shutil
import tempfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.download_python = "never"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "examples", "dist"]

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
WORKERS = ("-n", "2", "--dist", "loadfile")
"""The laptop suite runs in two processes; what starts processes of its own asks for ``-n 0``."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Two workers and many ranks share the cores already."""
MEGATRON = "megatron-core==0.16.1"
CONSTRAINTS = ("-c", str(ROOT / "constraints.txt"))


def group(name: str) -> tuple[str, ...]:
    """Requirements of one dependency group."""
    return nox.project.dependency_groups(PYPROJECT, name)


def copy_tree(session: nox.Session, target: Path) -> None:
    """Copy what git would commit, so that nothing built here before is seen."""
    listed = session.run_install(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", external=True, silent=True
    )
    for name in filter(None, str(listed or "").split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


@functools.cache
def folder_of_this_run() -> tempfile.TemporaryDirectory[str]:
    """One temporary folder per nox run, for what its sessions share; it goes when nox ends."""
    return tempfile.TemporaryDirectory(prefix="weightsync-")


def build(session: nox.Session) -> Path:
    """Folder with the sdist and the wheel made from it; built once per nox run."""
    dist = Path(folder_of_this_run().name) / "dist"
    if not dist.exists():
        source = dist.with_name("source")
        copy_tree(session, source)
        session.install(*group("dist"))
        session.run_install("python", "-m", "build", "--outdir", str(dist), str(source), silent=True)
    return dist


def install_wheel(session: nox.Session, *requirements: str, pins: tuple[str, ...] = CONSTRAINTS) -> None:
    """Install the wheel with the extras cli and testing, and further requirements."""
    dist = build(session)
    wheel = next(dist.glob("*.whl"), None)
    if wheel is None:  # nox -R: what the environment has stays
        return
    session.install(*pins, f"weightsync[cli,testing] @ {wheel.as_uri()}", *requirements)
    session.install("--force-reinstall", "--no-deps", str(wheel))
    session.env["WEIGHTSYNC_DIST"] = str(dist)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and its formatting."""
    session.install(*group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check types with mypy on the installed wheel, since mypy does not follow the editable hook."""
    install_wheel(session, *group("types"))
    packages = [name for name in PYPROJECT["tool"]["setuptools"]["packages"] if name.count(".") == 1]
    session.run("mypy", *(argument for name in packages for argument in ("-p", name)))


@nox.session
def tests(session: nox.Session) -> None:
    """Run the laptop suite on the Python that runs nox; further arguments go to pytest."""
    install_wheel(session, *group("tests"))
    session.run("pytest", *WORKERS, *session.posargs, env=ONE_THREAD)


@nox.session
def examples(session: nox.Session) -> None:
    """README's first command in a fresh copy, then every snippet of README and docs in what it installed."""
    copy = Path(session.create_tmp()).resolve() / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    copy_tree(session, copy)
    command = re.findall(r"^```sh\n(.+)\n```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)[0]
    with session.chdir(copy):
        session.run("bash", "-euo", "pipefail", "-c", command, external=True)
        python = str(copy / ".venv" / "bin" / "python")
        session.run(python, "-m", "pip", "install", "-q", *CONSTRAINTS, *group("tests"), external=True)
        session.run(python, "-m", "pytest", "-q", "tests/test_docs.py", external=True)


@nox.session
def dist(session: nox.Session) -> None:
    """Build sdist and wheel and check their metadata; the suite checks what is in them."""
    folder = build(session)
    session.install(*group("dist"))
    session.run("twine", "check", "--strict", *map(str, sorted(folder.iterdir())))


@nox.session(python=nox.project.python_versions(PYPROJECT))
def matrix(session: nox.Session) -> None:
    """Run the laptop suite on every supported Python that is installed."""
    install_wheel(session, *group("tests"))
    session.run("pytest", *WORKERS, *session.posargs, env=ONE_THREAD)


@nox.session(python=False)
def faults(session: nox.Session) -> None:
    """Kill, stall and fail at every await, in the environment of ``tests``; arguments go to pytest."""
    session.notify("tests", ["-q", "-n", "0", "tests/faults", *session.posargs])


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run 10,000 seeded plans of faults over every option under test; arguments go to ``weightsync fuzz``."""
    install_wheel(session)
    arguments = session.posargs or ["--seeds", "10000", "--workers", "2"]
    session.run("weightsync", "fuzz", *arguments, env=ONE_THREAD)


@nox.session(python=False)
def sweeps(session: nox.Session) -> None:
    """Faults at every await under further options and of background pushes; arguments go to pytest."""
    session.notify("tests", ["-q", "-n", "0", "tests/faults/sweeps", *session.posargs])


@nox.session
def real(session: nox.Session) -> None:
    """Hold the reference against Megatron-Core and Transformers themselves; arguments go to pytest."""
    requirements = ROOT / "tests" / "real" / "requirements.txt"
    install_wheel(session, *group("tests"), "-r", str(requirements))
    session.install("--no-deps", MEGATRON)  # what it names besides is for GPUs
    session.run("pytest", "-q", "-n", "0", "tests/real", *session.posargs, env=ONE_THREAD)


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the laptop suite on the oldest release that the metadata allows of every dependency."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    floors = [*PYPROJECT["project"]["dependencies"], *extras["cli"], *extras["testing"]]
    pins = [requirement.replace(">=", "==") for requirement in floors]
    install_wheel(session, *pins, pins=())
    session.run("pytest", *session.posargs)


@nox.session(python=False)
def nightly(session: nox.Session) -> None:
    """Run the laptop suite with 2,000 random examples per property, in the environment of ``tests``."""
    session.notify("tests", ["--hypothesis-profile=nightly", *session.posargs])


@nox.session
def bench(session: nox.Session) -> None:
    """Run every row of tests/bench, print a table and write bench.json; arguments choose files by name."""
    install_wheel(session)
    session.run("python", "tests/bench", *session.posargs)
