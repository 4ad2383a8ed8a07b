"""The verbs' page and the verbs agree: names, signatures, phases; the protocol asks for nothing else."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from weightsync.reference.rank import PHASES, Verbs
from weightsync.reference.verbs import CommonVerbs, RolloutVerbs, TrainerVerbs

ROOT = Path(__file__).parents[2]
TRAINER, ROLLOUT = (CommonVerbs, TrainerVerbs), (CommonVerbs, RolloutVerbs)
SIDES = {
    "fanout.py": (CommonVerbs,), "trainer.py": TRAINER, "membership.py": TRAINER, "transmit.py": TRAINER,
    "rollout.py": ROLLOUT, "receiver.py": ROLLOUT,
}  # fmt: skip
INSIDE = {"verb", "perform"}  # how the verbs are made, not verbs


def methods(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"}


CONTRACT = {
    name: verb for kind in (CommonVerbs, TrainerVerbs, RolloutVerbs) for name, verb in methods(kind).items()
}


def test_every_verb_is_on_the_page_once_and_every_line_of_the_page_is_a_verb() -> None:
    assert set(CONTRACT) == set(methods(Verbs)) - INSIDE
    assert sum(len(methods(kind)) for kind in (CommonVerbs, TrainerVerbs, RolloutVerbs)) == len(CONTRACT)


@pytest.mark.parametrize("name", CONTRACT)
def test_signatures_agree(name: str) -> None:
    implemented = methods(Verbs)[name]
    assert inspect.signature(implemented) == inspect.signature(CONTRACT[name])  # type: ignore[arg-type]
    assert inspect.iscoroutinefunction(implemented) == inspect.iscoroutinefunction(CONTRACT[name])


@pytest.mark.parametrize("name", CONTRACT)
def test_the_page_names_the_phase(name: str) -> None:
    text = inspect.getdoc(CONTRACT[name]) or ""
    if inspect.iscoroutinefunction(CONTRACT[name]):
        assert text.startswith(f"[{PHASES[{'source_digest': 'digest'}.get(name, name)]}] ")


@pytest.mark.parametrize("file", SIDES)
def test_the_protocol_asks_for_nothing_else(file: str) -> None:
    asked = {
        node.attr
        for node in ast.walk(ast.parse((ROOT / "reference" / file).read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "verbs"
    }
    offered = {name for kind in SIDES[file] for name in (*methods(kind), *kind.__annotations__)}
    assert asked
    assert asked - offered == set()
