"""Scenario: one TOML file, checked. An unknown key is an error that lists near names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weightsync.cli.model.config import DTYPES
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.megatron import VOCAB_MULTIPLE as TRAINER_MULTIPLE
from weightsync.reference.model import ModelShape
from weightsync.reference.placement import VOCAB_MULTIPLE as ROLLOUT_MULTIPLE

MIB = 1 << 20


class ScenarioError(WeightSyncError):
    """A scenario that cannot be run; each line names a key, what stood there and what is needed."""


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shape(_Table):
    """Sizes of a Llama- or Qwen3-shaped model, under Hugging Face's names."""

    model_type: Literal["llama", "qwen2", "qwen3"] = "qwen3"
    vocab_size: int = Field(default=259, ge=1)
    hidden_size: int = Field(default=128, ge=1)
    intermediate_size: int = Field(default=384, ge=1)
    num_hidden_layers: int = Field(default=4, ge=1)
    num_attention_heads: int = Field(default=8, ge=1)
    num_key_value_heads: int = Field(default=4, ge=1)
    head_dim: int = Field(default=16, ge=1)
    tie_word_embeddings: bool = True
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"

    def model_shape(self) -> ModelShape:
        """The same sizes as the reference has them."""
        return ModelShape(
            vocab=self.vocab_size,
            hidden=self.hidden_size,
            intermediate=self.intermediate_size,
            layers=self.num_hidden_layers,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            tied=self.tie_word_embeddings,
            qk_norm=self.model_type == "qwen3",
            qkv_bias=self.model_type == "qwen2",
            dtype=DTYPES[self.dtype],
        )

    @model_validator(mode="after")
    def _heads(self) -> Shape:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads {self.num_key_value_heads} does not divide num_attention_heads "
                f"{self.num_attention_heads}; every key/value head serves the same number of query heads"
            )
        return self


class Model(_Table):
    """What is trained: a checkpoint folder, or a shape to fill with seeded weights.

    Vocabularies are padded to a multiple of ``trainer_vocab_multiple`` times TP rows on the trainer, and of
    ``rollout_vocab_multiple`` rows on a fused rollout.
    """

    checkpoint: str | None = None
    shape: Shape | None = None
    trainer_vocab_multiple: int = Field(default=TRAINER_MULTIPLE, ge=1)
    rollout_vocab_multiple: int = Field(default=ROLLOUT_MULTIPLE, ge=1)

    @model_validator(mode="after")
    def _one(self) -> Model:
        if self.checkpoint is not None and self.shape is not None:
            raise ValueError("checkpoint and shape are both given; give the folder or the shape, not both")
        return self

    @property
    def sizes(self) -> Shape | None:
        """The shape to fill with seeded weights, or None when a checkpoint folder is named."""
        return None if self.checkpoint is not None else self.shape or Shape()


class TrainerTable(_Table):
    """How the trainer's ranks cut the model."""

    tp: int = Field(default=2, ge=1)


class RolloutTable(_Table):
    """How one rollout's ranks cut the model; fused means qkv_proj and gate_up_proj."""

    tp: int = Field(default=1, ge=1)
    fused: bool = False


class Workload(_Table):
    """What changes between two updates.

    ``train`` takes real AdamW steps; ``synthetic`` changes seeded positions, a ``density`` of all elements.
    """

    kind: Literal["train", "synthetic"] = "train"
    steps: int = Field(default=3, ge=1)
    density: float = Field(default=0.03, ge=0.0, le=1.0)
    lr: float = Field(default=1e-6, gt=0.0)
    seed: int = Field(default=0, ge=0)
    batch: int = Field(default=4, ge=1)
    tokens: int = Field(default=64, ge=1)


class Policy(_Table):
    """How an update is pushed, and what happens when it fails."""

    receive: Literal["stage", "stream"] = "stage"
    verify_every: int = Field(default=1, ge=0)
    bucket_bytes: int = Field(default=4 * MIB, ge=1)
    on_rollout_loss: Literal["fail", "continue"] = "fail"
    update_ms: int = Field(default=60_000, ge=1)
    lease_ms: int = Field(default=10_000, ge=1)


class FlipBit(_Table):
    """Flip one bit of one rollout rank's weights after ``version`` was committed there."""

    rollout: int = Field(ge=0)
    rank: int = Field(ge=0)
    version: int = Field(ge=1)


class Faults(_Table):
    """Faults planted in the run, so that its checks are seen to fail."""

    flip_bit: FlipBit | None = None


class Scenario(_Table):
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
        flip = self.faults.flip_bit
        if flip is not None:
            if flip.rollout >= len(self.rollouts):
                raise ValueError(
                    f"faults.flip_bit.rollout is {flip.rollout}; expected 0 to {len(self.rollouts) - 1}, "
                    f"as there are {len(self.rollouts)} rollouts"
                )
            tp = self.rollouts[flip.rollout].tp
            if flip.rank >= tp:
                raise ValueError(
                    f"faults.flip_bit.rank is {flip.rank}; expected 0 to {tp - 1}, as its rollout has TP {tp}"
                )
            if flip.version > self.workload.steps:
                raise ValueError(
                    f"faults.flip_bit.version is {flip.version}; expected 1 to {self.workload.steps}, "
                    "the number of workload.steps"
                )
            if not self.values:
                raise ValueError(
                    "faults.flip_bit needs values = true; without values there is no bit to flip"
                )
        return self

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
        if inner is None:
            yield dotted
            continue
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
    rollouts = data.get("rollouts")
    return {**data, "rollouts": tuple(rollouts)} if isinstance(rollouts, list) else dict(data)


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
