from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel

from weightsync.cli import scenario, scenario_files, scenario_tables

PAGE = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text(encoding="utf-8")


def minimal(**tables: object) -> dict[str, object]:
    return {"name": "mine", "rollouts": [{"tp": 1}], **tables}


def test_every_built_in_scenario_is_valid_and_named_after_its_file() -> None:
    assert {"demo", "tiny-fault", "tiny-sync"} <= set(scenario_files.names())
    for name in scenario_files.names():
        loaded = scenario_files.load(name)
        assert loaded.name == name
        assert loaded.description


def test_tiny_fault_is_the_shape_that_the_fault_suite_asks_for() -> None:
    loaded = scenario_files.load("tiny-fault")
    assert loaded.trainer.tp == 2
    assert [(rollout.tp, rollout.fused) for rollout in loaded.rollouts] == [(1, False), (2, True)]
    assert loaded.workload.steps == 3
    assert loaded.workload.kind == "synthetic"


def test_an_unknown_key_lists_near_names() -> None:
    with pytest.raises(scenario.ScenarioError, match=r"'policy\.recieve' is not a key.*policy\.receive"):
        scenario.check(minimal(policy={"recieve": "stage"}), "mine.toml")


def test_every_problem_is_listed_not_only_the_first() -> None:
    with pytest.raises(scenario.ScenarioError) as error:
        scenario.check({"name": "mine", "trainer": {"tp": "2"}, "workload": {"stesp": 3}}, "mine.toml")
    text = str(error.value)
    assert "'trainer.tp' is '2'; input should be a valid integer" in text
    assert "'rollouts' is missing" in text
    assert "workload.steps" in text
    assert all(line.startswith("mine.toml: ") for line in text.splitlines())


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("policy.recieve=stream", "near names: policy.receive"),
        ("receive=stream", "near names: policy.receive"),
        ("rollouts.0.tpp=2", "rollouts.0.tp"),
        ("rollouts.5.tp=2", "expected a number from 0 to 1"),
        ("policy.receive", "expected key=value"),
        ("policy.receive=streem", "input should be 'stage' or 'stream'"),
        ("policy=3", "expected a table of keys"),
        ("workload.steps=many", "valid integer"),
        ("name.first=x", "is not a key"),
        ("workload={kind = 'rl', lr = 1e-7}", "rl.lr_last is 1e-06, more than lr, which is 1e-07"),
        ("model.shape.num_key_value_heads=3", "does not divide num_attention_heads"),
        ("faults.flip_bit={rollout = 2, rank = 0, version = 1}", "faults.flip_bit.rollout is 2"),
        ("faults.flip_bit={rollout = 1, rank = 2, version = 1}", "faults.flip_bit.rank is 2"),
        ("faults.flip_bit={rollout = 0, rank = 0, version = 9}", "faults.flip_bit.version is 9"),
        ("faults.kill={rollout = 2, step = 1}", "faults.kill.rollout is 2"),
        ("faults.kill={rollout = 1, step = 5}", "faults.kill.step is 5; expected less than 5"),
        ("faults.kill={rollout = 1, step = 2}", 'needs policy.on_rollout_loss = "continue"'),
        ("hardware=labtop", "hardware: unknown hardware profile 'labtop'; did you mean 'laptop'?"),
        ("workload.rl.digits=2", "'workload.rl.digits' does nothing with workload.kind = 'train'"),
    ],
)
def test_a_wrong_override_says_what_is_wrong(override: str, words: str) -> None:
    with pytest.raises(scenario.ScenarioError) as error:
        scenario_files.load("demo", [override])
    assert words in str(error.value)


@pytest.mark.parametrize(
    "key", ["workload.lr=1e-5", "workload.batch=2", "workload.tokens=8", "workload.rl.base=2"]
)
def test_an_override_that_this_workload_never_reads_is_refused(key: str) -> None:
    with pytest.raises(scenario.ScenarioError, match=r"does nothing with workload\.kind = 'synthetic'"):
        scenario_files.load("tiny-sync", [key])
    scenario_files.load("demo", ["workload.kind=synthetic"])  # its file's lr stays, for the other kind


def test_overrides_reach_every_kind_of_key() -> None:
    loaded = scenario_files.load(
        "demo",
        [
            "policy.receive=stream",
            "rollouts.1.tp=4",
            "workload.lr=1e-5",
            "values=true",
            "faults.flip_bit={rollout = 1, rank = 3, version = 2}",
        ],
    )
    assert loaded.policy.receive == "stream"
    assert [rollout.tp for rollout in loaded.rollouts] == [1, 4]
    assert loaded.workload.lr == 1e-5
    assert loaded.faults.flip_bit == scenario_tables.FlipBit(rollout=1, rank=3, version=2)


def test_naming_a_checkpoint_drops_the_shape() -> None:
    loaded = scenario_files.load("demo", ["model.checkpoint=/some/folder"])
    assert loaded.model.checkpoint == "/some/folder"
    assert loaded.model.sizes is None
    assert scenario_files.load("demo").model.sizes is not None


def test_a_checkpoint_and_a_shape_together_are_refused() -> None:
    with pytest.raises(scenario.ScenarioError, match="not both"):
        scenario.check(minimal(model={"checkpoint": "x", "shape": {}}), "mine.toml")


def test_the_fingerprint_follows_what_is_run_and_not_what_it_is_called() -> None:
    base = scenario.check(minimal(), "mine")
    assert scenario.check({**minimal(), "name": "other"}, "mine").fingerprint() == base.fingerprint()
    assert scenario.check(minimal(workload={"seed": 1}), "mine").fingerprint() != base.fingerprint()


def test_written_out_it_reads_back_equal() -> None:
    for name in scenario_files.names():
        loaded = scenario_files.load(name)
        assert scenario.check(loaded.to_dict(), name) == loaded


def test_copy_writes_a_file_that_loads_and_never_overwrites(tmp_path: Path) -> None:
    path = scenario_files.copy("tiny-sync", tmp_path)
    assert path == tmp_path / "tiny-sync.toml"
    assert scenario_files.load(str(path)) == scenario_files.load("tiny-sync")
    with pytest.raises(scenario.ScenarioError, match="exists already"):
        scenario_files.copy("tiny-sync", tmp_path)


def test_unknown_names_and_broken_files_are_said(tmp_path: Path) -> None:
    with pytest.raises(scenario.ScenarioError, match="near names: tiny-fault"):
        scenario_files.load("tiny-falt")
    with pytest.raises(scenario.ScenarioError, match="cannot be read"):
        scenario_files.load(str(tmp_path / "absent.toml"))
    broken = tmp_path / "broken.toml"
    broken.write_text("name = ")
    with pytest.raises(scenario.ScenarioError, match="is not TOML"):
        scenario_files.load(str(broken))


def test_keys_cover_every_leaf_of_the_built_ins() -> None:
    known = set(scenario.keys())

    def leaves(data: object, prefix: str) -> set[str]:
        if isinstance(data, dict):
            return set().union(
                *(leaves(value, f"{prefix}.{key}" if prefix else key) for key, value in data.items())
            )
        if isinstance(data, list):
            return set().union(*(leaves(value, f"{prefix}.0") for value in data))
        return {prefix}

    for name in scenario_files.names():
        assert leaves(scenario_files.load(name).to_dict(), "") <= known


FREE = "model.family."
"""Keys of a Hugging Face configuration, which is documented elsewhere and has no defaults of ours."""


def default_cell(key: str) -> object:
    """The default of a key as the page writes it: a TOML value, ``required`` or ``none``."""
    table: type[BaseModel] | None = scenario.Scenario
    for name in (part for part in key.split(".") if part != "0"):
        info = table.model_fields[name]
        table = scenario._inner(info.annotation)
    if info.is_required():
        return "required"
    return "none" if info.default is None else info.default


def real_defaults() -> dict[str, object]:
    return {key: default_cell(key) for key in set(scenario.keys()) if not key.startswith(FREE)}


def page_defaults(page: str) -> dict[str, object]:
    """Key -> its default, from every table of the page with the columns key, default and meaning."""
    found: dict[str, object] = {}
    for table in re.findall(r"^\| key \| default \|.*\n\|.*\n((?:\|.+\n)+)", page, flags=re.MULTILINE):
        for line in table.splitlines():
            keys, default, meaning = (cell.strip() for cell in line.split("|")[1:4])
            assert meaning
            cell = default.strip("`")
            value = tomllib.loads(f"it = {cell}")["it"] if default.startswith("`") else cell
            found |= dict.fromkeys(re.findall(r"`(.+?)`", keys), value)
    return found


def test_the_page_on_scenarios_names_every_key_with_its_default() -> None:
    assert page_defaults(PAGE) == real_defaults()


def test_a_missing_key_and_a_wrong_default_are_seen() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `policy.lease_ms`"))
    assert page_defaults(PAGE.replace(row + "\n", "")) != real_defaults()
    assert page_defaults(PAGE.replace(row, row.replace("`10000`", "`30000`"))) != real_defaults()
