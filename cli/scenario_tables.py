"""The tables of a scenario file: one class per table, with its keys, their defaults and the values they may have."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from weightsync.cli.model.config import DTYPES
from weightsync.cli.model.families import make_family
from weightsync.reference.baselines import named
from weightsync.reference.batching.minibatch import rechunked
from weightsync.reference.errors import BatchError, WeightSyncError
from weightsync.reference.megatron import VOCAB_MULTIPLE as TRAINER_MULTIPLE
from weightsync.reference.model import ModelShape
from weightsync.reference.parallel import RolloutLayout, TrainerLayout
from weightsync.reference.placement import VOCAB_MULTIPLE as ROLLOUT_MULTIPLE
from weightsync.reference.wire.choosing import AUTO
from weightsync.reference.wire.forms import Form, Positions, Values
from weightsync.reference.wire.policy import FIXED, LINK_BYTES_PER_S, WirePolicy

MIB = 1 << 20
HISTORY_BYTES = 256 * MIB


class Table(BaseModel):
    """Base of all of them: no unknown key, no conversion of types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Shape(Table):
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


class Model(Table):
    """What is trained: a checkpoint folder, or sizes to fill with seeded weights.

    ``shape`` are the sizes of a dense decoder, which all workloads know; ``family`` are the configuration keys of any
    family, under Hugging Face's names, for a synthetic workload.

    Vocabularies are padded to a multiple of ``trainer_vocab_multiple`` times TP rows on the trainer, and of
    ``rollout_vocab_multiple`` rows on a fused rollout.
    """

    checkpoint: str | None = None
    shape: Shape | None = None
    family: dict[str, Any] | None = None
    trainer_vocab_multiple: int = Field(default=TRAINER_MULTIPLE, ge=1)
    rollout_vocab_multiple: int = Field(default=ROLLOUT_MULTIPLE, ge=1)

    @model_validator(mode="after")
    def _one(self) -> Model:
        given = {"checkpoint": self.checkpoint, "shape": self.shape, "family": self.family}
        names = [name for name, value in given.items() if value is not None]
        if len(names) > 1:
            raise ValueError(f"{' and '.join(names)} are both given; give one of them, not both")
        if self.family is not None:
            try:
                make_family(self.family, "model.family")
            except WeightSyncError as error:
                raise ValueError(str(error)) from None
        return self

    @property
    def sizes(self) -> Shape | None:
        """The dense shape to fill with seeded weights, or None when a folder or a family is named."""
        return None if self.checkpoint is not None or self.family is not None else self.shape or Shape()


class TrainerTable(Table):
    """How the trainer's ranks share the model out: see ``reference.parallel.TrainerLayout``.

    ``etp`` left out is ``tp``; ``dp`` left out is the least that has room for the experts; ``stages`` left out are
    equal.
    """

    tp: int = Field(default=2, ge=1)
    pp: int = Field(default=1, ge=1)
    ep: int = Field(default=1, ge=1)
    etp: int | None = Field(default=None, ge=1)
    dp: int | None = Field(default=None, ge=1)
    cp: int = Field(default=1, ge=1)
    stages: tuple[int, ...] | None = None

    @property
    def layout(self) -> TrainerLayout:
        """The same as the reference has it."""
        return TrainerLayout(self.tp, self.pp, self.ep, self.etp, self.dp, self.cp, self.stages)

    @model_validator(mode="after")
    def _fits(self) -> TrainerTable:
        try:
            _ = self.layout
        except WeightSyncError as error:
            raise ValueError(str(error)) from None
        return self


class RolloutTable(Table):
    """How one rollout's ranks cut the model; fused means vLLM's names, ``ep`` shares the experts out."""

    tp: int = Field(default=1, ge=1)
    fused: bool = False
    ep: int = Field(default=1, ge=1)

    @property
    def layout(self) -> RolloutLayout:
        """The same as the reference has it."""
        return RolloutLayout(self.tp, self.fused, self.ep)

    @model_validator(mode="after")
    def _fits(self) -> RolloutTable:
        if self.tp % self.ep:
            raise ValueError(f"ep {self.ep} does not divide tp {self.tp}; each expert is on tp // ep ranks")
        return self


class Rl(Table):
    """Reinforcement learning on a task whose answers can be checked; rollouts sample, the trainer learns.

    ``lr`` of the workload holds for a share ``decay_from`` of the steps, then falls by equal factors to ``lr_last``.
    ``entropy`` weighs the policy's entropy, in nats per token, against the advantages, which keeps it from settling
    on wrong answers early; the weight falls with the step size. ``correction`` ``"tis"`` weighs each token by how much
    likelier it is now than when it was drawn, at most ``learner.TIS_CAP`` times.

    ``num_iters_per_train_update`` cuts a step's samples into so many equal consecutive pieces, each of which is one
    optimizer step; advantages are those of the whole batch.
    """

    task: Literal["reverse", "add"] = "reverse"
    algorithm: Literal["grpo", "reinforce"] = "grpo"
    digits: int = Field(default=3, ge=1, le=8)
    base: int = Field(default=10, ge=2, le=10)
    prompts: int = Field(default=16, ge=1)
    samples: int = Field(default=8, ge=2)
    temperature: float = Field(default=1.0, gt=0.0)
    lr_last: float = Field(default=1e-6, gt=0.0)
    decay_from: float = Field(default=0.5, ge=0.0, le=1.0)
    entropy: float = Field(default=0.0, ge=0.0)
    correction: Literal["none", "tis"] = "none"
    num_iters_per_train_update: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _pieces(self) -> Rl:
        try:
            rechunked(self.prompts * self.samples, self.num_iters_per_train_update)
        except BatchError as error:
            raise ValueError(f"{error}: prompts {self.prompts} times samples {self.samples}") from None
        return self


class Workload(Table):
    """What changes between two updates.

    ``train`` takes real AdamW steps on a text; ``rl`` on samples that the rollouts generate; ``synthetic`` changes
    seeded positions, a ``density`` of all elements, at which ``plan`` estimates the other two as well.
    """

    kind: Literal["train", "rl", "synthetic"] = "train"
    steps: int = Field(default=3, ge=1)
    density: float = Field(default=0.03, ge=0.0, le=1.0)
    lr: float = Field(default=1e-6, gt=0.0)
    seed: int = Field(default=0, ge=0)
    batch: int = Field(default=4, ge=1)
    tokens: int = Field(default=64, ge=1)
    rl: Rl = Rl()

    @model_validator(mode="after")
    def _falling(self) -> Workload:
        if self.kind == "rl" and self.rl.lr_last > self.lr:
            raise ValueError(
                f"rl.lr_last is {self.rl.lr_last:g}, more than lr, which is {self.lr:g}; the step size only falls, so "
                "lower rl.lr_last too"
            )
        return self


class Policy(Table):
    """How an update is pushed, and what happens when it fails.

    ``encoding`` is ``auto``, or the name of one form for every range, as ``docs/wire.md`` lists them; ``auto`` takes
    the form that is written, sent over a link of ``link_bytes_per_s`` and read in the least time.
    """

    push: Literal["sync", "async"] = "sync"
    snapshot: Literal["host", "device", "none"] = "host"
    publish_interval: int = Field(default=1, ge=1)
    receive: Literal["stage", "stream"] = "stage"
    route: Literal["all", "owned"] = "all"
    encoding: str = FIXED
    link_bytes_per_s: float = Field(default=LINK_BYTES_PER_S, gt=0)
    baseline: Literal["whole", "shards", "dirty"] = "whole"
    verify_every: int = Field(default=10, ge=0)
    bucket_bytes: int = Field(default=4 * MIB, ge=1)
    history_bytes: int = Field(default=HISTORY_BYTES, ge=0)
    on_rollout_loss: Literal["fail", "continue"] = "fail"
    update_ms: int = Field(default=60_000, ge=1)
    lease_ms: int = Field(default=10_000, ge=1)

    @model_validator(mode="after")
    def _known_encoding(self) -> Policy:
        if self.link_bytes_per_s != LINK_BYTES_PER_S and self.encoding != AUTO:
            raise ValueError(
                f'policy.link_bytes_per_s does nothing with policy.encoding = "{self.encoding}", which is one form '
                'whatever the link; set encoding = "auto", or leave it out'
            )
        try:
            self.wire()
        except WeightSyncError as error:
            raise ValueError(f"policy.encoding: {error}") from None
        return self

    @property
    def encodes_deltas(self) -> bool:
        """True when ``encoding`` names a form of changed elements other than the default one."""
        return (
            self.encoding not in (AUTO, FIXED) and Form.named(self.encoding).positions is not Positions.DENSE
        )

    def wire(self) -> WirePolicy:
        """How updates are encoded, as far as the baseline knows the old bits."""
        allowed = (Values[name.upper()] for name in named(self.baseline).encodings)
        return WirePolicy(self.encoding, self.link_bytes_per_s).allowing(allowed)


class FlipBit(Table):
    """Flip one bit of one rollout rank's weights after ``version`` was committed there."""

    rollout: int = Field(ge=0)
    rank: int = Field(ge=0)
    version: int = Field(ge=1)


class Kill(Table):
    """Kill the process of one rollout rank, for real, once ``step`` updates are over; needs gloo."""

    rollout: int = Field(ge=0)
    rank: int = Field(default=0, ge=0)
    step: int = Field(ge=1)


class Faults(Table):
    """Faults planted in the run, so that its checks are seen to fail and its recovery to work."""

    flip_bit: FlipBit | None = None
    kill: Kill | None = None
