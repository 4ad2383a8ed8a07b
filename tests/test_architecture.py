"""Imports run one way, ``__init__`` files re-export, modules hold no mutable state, files stay small."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "reference": ROOT / "reference",
    "backends": ROOT / "backends",
    "sim": ROOT / "sim",
    "cli": ROOT / "cli",
    "testing": ROOT / "tests" / "testing",
}
CORE = {"torch", "numpy", "safetensors", "xxhash", "zstandard"}
OURS = {
    "reference": {"reference"},
    "backends": {"reference", "backends"},
    "sim": {"reference", "sim"},
    "cli": {"reference", "backends", "sim", "cli", "testing"},
    "testing": {"reference", "backends", "sim", "testing"},
}
THEIRS = {
    "reference": CORE,
    "backends": CORE | {"fsspec", "torch_npu", "triton"},
    "sim": CORE | {"simpy"},
    "cli": CORE | {"jinja2", "matplotlib", "pydantic", "rich", "scipy", "tokenizers", "typer"},
    "testing": CORE | {"blake3", "hypothesis", "pytest"},
}
CONTAINERS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
STATEFUL_CALLS = {
    "list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter", "OrderedDict",
    "count", "Lock", "RLock", "local", "ContextVar", "WeakKeyDictionary", "WeakValueDictionary",
}  # fmt: skip
MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "reverse",
    "setdefault", "sort", "update",
}  # fmt: skip
MOST_LINES = 320


def modules(folder: str) -> list[Path]:
    return sorted(path for path in FOLDERS[folder].rglob("*.py"))


SHIPPED = [(folder, path) for folder in FOLDERS for path in modules(folder)]
OWN = {path for folder in ("tests", "docs") for path in (ROOT / folder).rglob("*.py")}
SOURCES = sorted({path for _, path in SHIPPED} | OWN | {ROOT / "noxfile.py"})


def label(value: object) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


def imported(tree: ast.AST) -> Iterator[str]:
    """Full dotted names of what a file imports; a relative import is left out, it stays in its folder."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            if node.module == "weightsync":
                yield from (f"weightsync.{alias.name}" for alias in node.names)
            else:
                yield node.module


def import_faults(source: str, folder: str) -> list[str]:
    """Imports that ``folder`` may not make."""
    wrong = []
    for name in imported(ast.parse(source)):
        first, *rest = name.split(".")
        if first == "weightsync":
            allowed = bool(rest) and rest[0] in OURS[folder]
        else:
            allowed = first in sys.stdlib_module_names or first in THEIRS[folder]
        if folder == "reference" and name.startswith("torch.distributed"):
            allowed = False
        if not allowed:
            wrong.append(name)
    return wrong


def mutated(tree: ast.AST) -> set[str]:
    """Names whose value a file changes in place, anywhere in it."""
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                names.add(name)
            case ast.AugAssign(target=ast.Name(id=name)):
                names.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)) if method in MUTATORS:
                names.add(name)
    return names


def state_faults(source: str) -> list[str]:
    """Module-level names that hold state, and functions that rebind module names.

    A table named in capitals that its file never changes is a constant.
    """
    tree = ast.parse(source)
    changed = mutated(tree)
    wrong = [f"global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    for node in tree.body:
        match node:
            case ast.Assign(targets=targets, value=value):
                names = [ast.unparse(target) for target in targets]
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                names = [ast.unparse(target)]
            case _:
                continue
        if isinstance(value, CONTAINERS):
            wrong += [name for name in names if name != "__all__" and (not name.isupper() or name in changed)]
        elif isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in STATEFUL_CALLS:
            wrong += names
    return wrong


def init_faults(source: str) -> list[str]:
    """Statements of an ``__init__`` that do more than re-export."""
    wrong = []
    for node in ast.parse(source).body:
        text = ast.unparse(node)
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        exports = isinstance(node, ast.Assign) and text.startswith("__all__ = ")
        rewrite = text.startswith("pytest.register_assert_rewrite(")
        if not (isinstance(node, ast.Import | ast.ImportFrom) or docstring or exports or rewrite):
            wrong.append(text.splitlines()[0])
    return wrong


@pytest.mark.parametrize(("folder", "path"), SHIPPED, ids=label)
def test_imports_run_one_way(folder: str, path: Path) -> None:
    assert import_faults(path.read_text(), folder) == []


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_no_bare_import_of_our_folders(path: Path) -> None:
    bare = {name for name in imported(ast.parse(path.read_text())) if name.split(".")[0] in FOLDERS}
    assert bare == set(), "a bare import loads the file a second time; import weightsync.<folder>"


@pytest.mark.parametrize(("folder", "path"), SHIPPED, ids=label)
def test_no_mutable_state_at_module_level(folder: str, path: Path) -> None:
    assert state_faults(path.read_text()) == [], "pass it in; a constant table is named in capitals"


@pytest.mark.parametrize("path", [path for _, path in SHIPPED if path.name == "__init__.py"], ids=label)
def test_init_files_only_reexport(path: Path) -> None:
    assert init_faults(path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=label)
def test_files_stay_small(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MOST_LINES, "split it: one file, one job"


def test_every_folder_of_modules_is_a_package() -> None:
    lacking = {path.parent for _, path in SHIPPED if not (path.parent / "__init__.py").exists()}
    assert lacking == set()


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("reference", "import simpy"),
        ("reference", "from weightsync.backends.gloo import Gloo"),
        ("reference", "import torch.distributed as dist"),
        ("backends", "from weightsync import sim"),
        ("sim", "def f():\n    from weightsync.backends import inprocess"),
        ("testing", "import weightsync.cli"),
    ],
)
def test_a_wrong_import_is_seen(folder: str, source: str) -> None:
    assert len(import_faults(source, folder)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "cache = {}",
        "seen: list[int] = []",
        "x = collections.deque()",
        "def f():\n    global x",
        "SEEN = set()",
        "TABLE = {}\ndef f():\n    TABLE[1] = 2",
        "NAMES = []\ndef f():\n    NAMES.append(1)",
    ],
)
def test_mutable_state_is_seen(source: str) -> None:
    assert state_faults(source) != []


def test_a_constant_table_is_no_state() -> None:
    assert state_faults("_WIDTHS = {1: 8, 2: 16}\n__all__ = ['f']\ndef f(n):\n    return _WIDTHS[n]") == []


def test_code_in_an_init_file_is_seen() -> None:
    assert init_faults('"""Doc."""\nfrom a import b\n__all__ = ["b"]\nb.start()\n') == ["b.start()"]
