"""Scenario files: the built-in ones, your own, and ``key=value`` overrides of either."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from weightsync.cli.scenario import Scenario, ScenarioError, check, keys, near
from weightsync.cli.workload import has_experts, model_shape

USED_BY = {"batch": ("train",), "lr": ("train", "rl"), "rl.": ("rl",), "tokens": ("train",)}
"""Keys of ``[workload]`` that not every kind of workload reads; ``density`` serves the plan of each."""


def names() -> tuple[str, ...]:
    """Names of the built-in scenarios, sorted."""
    return tuple(
        sorted(
            entry.name.removesuffix(".toml") for entry in _folder().iterdir() if entry.name.endswith(".toml")
        )
    )


def text(name: str) -> str:
    """TOML text of a built-in scenario, or of the file at the path ``name``."""
    if name in names():
        return (_folder() / f"{name}.toml").read_text(encoding="utf-8")
    path = Path(name)
    if path.suffix == ".toml" or path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            raise ScenarioError(
                f"scenario {name!r} cannot be read: {error.strerror}; expected a TOML file"
            ) from None
    alike = difflib.get_close_matches(name, names()) or names()
    raise ScenarioError(f"scenario {name!r} is not built in and no file; near names: {', '.join(alike)}")


def load(name: str, overrides: Sequence[str] = ()) -> Scenario:
    """The built-in scenario or TOML file ``name`` with each ``key=value`` of ``overrides`` applied, checked.

    Keys are dotted (``policy.receive=stream``, ``rollouts.0.tp=2``); values are TOML, or a bare string.
    Naming one of ``model.checkpoint``, ``model.shape`` and ``model.family`` drops the file's other ones.
    Raises ScenarioError listing every problem.
    """
    try:
        data = tomllib.loads(text(name))
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"scenario {name!r} is not TOML: {error}") from None
    for override in overrides:
        _override(data, override)
    scenario = check(data, name)
    for override in overrides:
        _require_used(scenario, override.partition("=")[0])
    return scenario


def copy(name: str, target: Path) -> Path:
    """Write a built-in scenario's text to ``target`` (a file, or a folder that is there) and return the file.

    Raises ScenarioError when the file exists: nothing is overwritten.
    """
    content = text(name)
    path = target / f"{Path(name).stem}.toml" if target.is_dir() else target
    if path.exists():
        raise ScenarioError(f"{path} exists already; name another file or remove it")
    path.write_text(content, encoding="utf-8")
    return path


def _folder() -> Traversable:
    return resources.files("weightsync.cli") / "scenarios"


def _require_used(scenario: Scenario, dotted: str) -> None:
    """Refuse an override that this run would never read; a file may hold such keys, as defaults of another kind."""
    kinds = next((USED_BY[part] for part in sorted(USED_BY) if dotted.startswith(f"workload.{part}")), None)
    if kinds is not None and scenario.workload.kind not in kinds:
        raise ScenarioError(
            f"--set: {dotted!r} does nothing with workload.kind = {scenario.workload.kind!r}; it belongs to "
            f"{' and '.join(kinds)}, so set workload.kind too or leave it out"
        )
    if dotted.rpartition(".")[2] in ("ep", "etp") and not has_experts(model_shape(scenario)):
        raise ScenarioError(
            f"--set: {dotted!r} shares experts out, and this model has none; leave it out, or take a model.family "
            "with experts"
        )


def _override(data: dict[str, Any], override: str) -> None:
    dotted, equals, raw = override.partition("=")
    if not equals or not dotted:
        raise ScenarioError(
            f"--set {override!r} has no value; expected key=value, such as policy.receive=stream"
        )
    generic = ".".join("0" if part.isdigit() else part for part in dotted.split("."))
    every = keys()
    if not any(key == generic or key.startswith(generic + ".") for key in every):
        raise ScenarioError(f"--set: {dotted!r} is not a key of a scenario; near names: {near(dotted)}")
    sources = ("checkpoint", "shape", "family")
    for chosen in sources:
        if generic.startswith(f"model.{chosen}") and isinstance(data.get("model"), dict):
            for other in sources:
                if other != chosen:
                    data["model"].pop(other, None)
    node: Any = data
    *parents, last = dotted.split(".")
    for part in parents:
        node = _entry(node, part, dotted) if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, (dict, list)):
            raise ScenarioError(
                f"--set: {dotted!r} goes through {part!r}, which holds {node!r}; expected a table there"
            )
    if isinstance(node, list):
        _entry(node, last, dotted)
        node[int(last)] = _value(raw)
    else:
        node[last] = _value(raw)


def _entry(node: list[Any], part: str, dotted: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ScenarioError(
            f"--set: {dotted!r} names entry {part!r}; expected a number from 0 to {len(node) - 1}"
        )
    return node[int(part)]


def _value(raw: str) -> Any:
    try:
        return tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return raw
