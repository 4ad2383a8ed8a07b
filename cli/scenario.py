"""Scenario: one TOML file, checked. An unknown key is an error that lists near names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash
from pydantic import BaseModel, Field, ValidationError, model_validator

from weightsync.cli.model.families import FAMILIES
from weightsync.cli.scenario_tables import (
    HISTORY_BYTES,
    Faults,
    Model,
    Policy,
    RolloutTable,
    Table,
    TrainerTable,
    Workload,
)
from weightsync.reference.errors import WeightSyncError
from weightsync.sim.hardware import ProfileError, load_profile


class ScenarioError(WeightSyncError):
    """A scenario that cannot be run; each line names a key, what stood there and what is needed."""


class Scenario(Table):
    """Everything a run depends on, apart from the backend and the seed given on the command line."""

    name: str = Field(min_length=1)
    description: str = ""
    hardware: str = "laptop"
    values: bool = True
    model: Model = Model()
    trainer: TrainerTable = TrainerTable()
    rollouts: tuple[RolloutTable, ...] = Field(min_length=1)
    workload: Workload = Workload()
    policy: Policy = Policy()
    faults: Faults = Faults()

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        try:
            load_profile(self.hardware)
        except ProfileError as error:
            raise ValueError(f"hardware: {error}") from None
        flip, kill, steps = self.faults.flip_bit, self.faults.kill, self.workload.steps
        if flip is not None:
            self._require_rank("flip_bit", flip.rollout, flip.rank)
            if flip.version > steps:
                raise ValueError(
                    f"faults.flip_bit.version is {flip.version}; expected 1 to {steps}, "
                    "the number of workload.steps"
                )
            if not self.values:
                raise ValueError(
                    "faults.flip_bit needs values = true; without values there is no bit to flip"
                )
        if kill is not None:
            self._require_rank("kill", kill.rollout, kill.rank)
            if kill.step >= steps:
                raise ValueError(
                    f"faults.kill.step is {kill.step}; expected less than {steps}, the number of workload.steps, "
                    "or no update is left to bring the rollout back"
                )
            if self.policy.on_rollout_loss != "continue":
                raise ValueError(
                    'faults.kill needs policy.on_rollout_loss = "continue"; with "fail" the run would end there'
                )
        if self.workload.kind == "rl" and self.policy.baseline == "dirty":
            raise ValueError(
                'policy.baseline = "dirty" needs an optimizer that marks what it writes, which workload.kind = "rl" '
                'has not; take "whole" or "shards"'
            )
        if self.workload.kind == "rl" and not self.values:
            raise ValueError(
                'workload.kind = "rl" needs values = true; rollouts sample from the weights they hold'
            )
        self._check_push()
        if self.workload.kind == "rl" and not self.trainer.layout.pure_tp:
            raise ValueError(
                'workload.kind = "rl" needs a trainer of tensor-parallel ranks only; set pp, ep, dp and cp of trainer '
                "to 1 and leave etp out"
            )
        if self.workload.kind != "synthetic" and self.model.family is not None:
            raise ValueError(
                f'workload.kind = "{self.workload.kind}" trains dense decoders only; give a model.shape, or set '
                'workload.kind = "synthetic" for model.family'
            )
        return self

    def _check_push(self) -> None:
        """Refuse a way to push that could not be kept, rather than leave a key without effect."""
        policy, rl, kind = self.policy, self.workload.rl, self.workload.kind
        if rl.correction != "none" and kind != "rl":
            raise ValueError(
                f'workload.rl.correction needs workload.kind = "rl"; "{kind}" trains on no samples'
            )
        if policy.publish_interval > 1 and kind == "rl" and rl.correction == "none":
            raise ValueError(
                f"policy.publish_interval is {policy.publish_interval}, so samples are of older weights than "
                'those that learn from them; set workload.rl.correction = "tis", or publish every step'
            )
        if policy.publish_interval > 1 and not self.values:
            raise ValueError(
                f"policy.publish_interval is {policy.publish_interval} and needs values = true; what several steps "
                "change together is found in the weights only"
            )
        if policy.snapshot == "none" and not self.values:
            raise ValueError(
                'policy.snapshot = "none" needs values = true; what is only counted has no live weights to send'
            )
        if policy.snapshot == "none" and policy.baseline != "whole":
            raise ValueError(
                f'policy.baseline = "{policy.baseline}" needs snapshots, and policy.snapshot is "none"; set one of them'
            )
        if policy.snapshot == "none" and policy.route == "owned":
            raise ValueError(
                'policy.snapshot = "none" sends everything to everybody; leave policy.route at "all"'
            )
        if policy.snapshot == "none":
            asked = {
                "encoding": policy.encodes_deltas,
                "history_bytes": policy.history_bytes != HISTORY_BYTES,
            }
            for key in (key for key, given in asked.items() if given):
                raise ValueError(
                    f'policy.{key} is for deltas, and with policy.snapshot = "none" every update is full; leave it out'
                )

    def _require_rank(self, fault: str, rollout: int, rank: int) -> None:
        if rollout >= len(self.rollouts):
            raise ValueError(
                f"faults.{fault}.rollout is {rollout}; expected 0 to {len(self.rollouts) - 1}, "
                f"as there are {len(self.rollouts)} rollouts"
            )
        tp = self.rollouts[rollout].tp
        if rank >= tp:
            raise ValueError(
                f"faults.{fault}.rank is {rank}; expected 0 to {tp - 1}, as its rollout has TP {tp}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The scenario as JSON-ready data, defaults written out; absent choices (None) are left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def fingerprint(self) -> str:
        """32 hex digits; equal when two scenarios ask for the same run, whatever they are called."""
        asked = self.model_dump_json(exclude={"name", "description"})
        return xxhash.xxh3_128_hexdigest(asked.encode())


def check(data: Mapping[str, Any], name: str) -> Scenario:
    """Scenario from parsed TOML; errors call it ``name``. Raises ScenarioError listing every problem."""
    try:
        return Scenario.model_validate(_tuples(data))
    except ValidationError as error:
        problems = [_sentence(problem, name) for problem in error.errors()]
        raise ScenarioError("\n".join(problems)) from None


def keys() -> tuple[str, ...]:
    """Every dotted key a scenario may hold; list entries are written ``rollouts.0.tp``."""
    return tuple(_keys(Scenario, ""))


def _keys(model: type[BaseModel], prefix: str) -> Iterable[str]:
    for name, info in model.model_fields.items():
        dotted = f"{prefix}{name}"
        inner = _inner(info.annotation)
        if dotted == "model.family":
            every = {key: None for family in FAMILIES.values() for key in family.keys}
            yield from (f"{dotted}.{key}" for key in every)
        elif inner is None:
            yield dotted
        else:
            step = ".0." if "tuple" in str(info.annotation) else "."
            yield from _keys(inner, dotted + step)


def _inner(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _inner(argument)
        if found is not None:
            return found
    return None


def near(dotted: str) -> str:
    """Up to six keys like ``dotted``, joined: same last word, then similar ones, then its neighbours."""
    generic = ".".join("0" if part.isdigit() else part for part in dotted.split("."))
    last = generic.rsplit(".", 1)[-1]
    every = keys()
    found = [key for key in every if key.rsplit(".", 1)[-1] == last]
    found += difflib.get_close_matches(generic, every, n=3)
    leaves = {key.rsplit(".", 1)[-1]: key for key in every}
    found += [leaves[leaf] for leaf in difflib.get_close_matches(last, leaves, n=3)]
    parent = generic.rpartition(".")[0]
    siblings = [key for key in every if key.rpartition(".")[0] == parent]
    return ", ".join(list(dict.fromkeys(found))[:4] or siblings[:6] or every[:6])


def _tuples(data: Mapping[str, Any]) -> dict[str, Any]:
    """Lists as the tuples that the tables have."""
    found, rollouts, trainer = dict(data), data.get("rollouts"), data.get("trainer")
    if isinstance(rollouts, list):
        found["rollouts"] = tuple(rollouts)
    if isinstance(trainer, dict) and isinstance(trainer.get("stages"), list):
        found["trainer"] = {**trainer, "stages": tuple(trainer["stages"])}
    return found


def _sentence(problem: Any, name: str) -> str:
    dotted = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{name}: {dotted!r} is not a key of a scenario; near names: {near(dotted)}"
    if problem["type"] == "missing":
        return f"{name}: key {dotted!r} is missing; add it"
    if problem["type"] in ("model_type", "tuple_type"):
        kind = "a table" if problem["type"] == "model_type" else "a list of tables"
        return f"{name}: key {dotted!r} is {problem['input']!r}; expected {kind} of keys"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"{name}: {dotted + ': ' if dotted else ''}{message}"
    return f"{name}: key {dotted!r} is {problem['input']!r}; {message[:1].lower()}{message[1:]}"
