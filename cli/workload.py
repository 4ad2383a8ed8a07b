"""From a scenario to what changes the weights: the checkpoint folder, a trainer rank, the first weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor
from torch.nn import Parameter

from weightsync.cli.model.checkpoint import load_weights, make_checkpoint
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.model.families import make_family, read_model
from weightsync.cli.model.synthetic import SyntheticTrainer, SyntheticWorkload
from weightsync.cli.model.trainer import DemoTrainer
from weightsync.cli.scenario import Scenario, ScenarioError
from weightsync.reference.deployment import Deployment
from weightsync.reference.families import Experts
from weightsync.reference.modules import Model


class WorkloadTrainer(Protocol):
    """What a run needs of a trainer rank: DemoTrainer, SyntheticTrainer and RlTrainer are such."""

    @property
    def params(self) -> Mapping[str, Parameter]:
        """Runtime name -> this rank's live parameter with real TP attributes; ``step`` changes it."""

    def collect(self) -> None:
        """Get what the next step learns from; may block, waiting for others."""

    def step(self) -> dict[str, float]:
        """Change the weights once, on all ranks at a time; what it says of itself, such as ``loss``, equal on all."""

    def export(self) -> dict[str, Tensor] | None:
        """Hugging Face name -> whole tensor of the present weights: the oracle for every rollout.

        All ranks call it at a time; only the lead needs what comes back.
        """


class WholeTrainer(Protocol):
    """All trainer ranks in one process; as WorkloadTrainer, for all of them at once."""

    def params_of(self, rank: int) -> Mapping[str, Parameter]:
        """Runtime name -> live parameter of one trainer rank."""

    def collect(self) -> None:
        """Get what the next step learns from."""

    def step(self) -> dict[str, float]:
        """Change the weights of all ranks once; what it says of itself."""

    def export(self) -> dict[str, Tensor] | None:
        """Hugging Face name -> whole tensor of the present weights."""


def model_shape(scenario: Scenario) -> Model:
    """The scenario's model with its sizes, without reading a weight."""
    sizes, family = scenario.model.sizes, scenario.model.family
    if sizes is not None:
        return sizes.model_shape()
    if family is not None:
        return make_family(family, "model.family")
    return read_model(Path(scenario.model.checkpoint or "") / "config.json")


def has_experts(model: Model) -> bool:
    """True when a part of the model is routed experts, which ``ep`` and ``etp`` share out."""
    return any(isinstance(placed.module, Experts) for placed in model.modules())


def deployment(scenario: Scenario) -> Deployment:
    """Who holds what in the scenario, with its plan; equal in every process."""
    return Deployment(
        model_shape(scenario),
        scenario.trainer.layout,
        tuple(rollout.layout for rollout in scenario.rollouts),
        scenario.policy.bucket_bytes,
        scenario.model.trainer_vocab_multiple,
        scenario.model.rollout_vocab_multiple,
        wire=scenario.policy.wire(),
    )


def prepare(scenario: Scenario, scratch: Path) -> Path | None:
    """The checkpoint folder to train from; made under ``scratch`` when the scenario only gives a shape.

    None for a synthetic workload without a checkpoint. To be called once, before any rank starts.
    """
    sizes = scenario.model.sizes
    if scenario.model.checkpoint is not None:
        return Path(scenario.model.checkpoint)
    if sizes is None or scenario.workload.kind == "synthetic":
        return None
    config = DecoderConfig(sizes.model_type, sizes.model_shape())
    return make_checkpoint(scratch / "checkpoint", config, scenario.workload.seed)


def make_trainer(scenario: Scenario, rank: int, folder: Path | None) -> DemoTrainer | SyntheticTrainer:
    """Trainer rank ``rank`` of a ``train`` or ``synthetic`` workload, which holds every rank's shards.

    ``folder`` is what ``prepare`` returned. The trainers of an ``rl`` workload need groups: see ``cli.rl``.
    """
    work, layout = scenario.workload, deployment(scenario)
    dirty = scenario.policy.baseline == "dirty"
    if work.kind == "rl":
        raise ScenarioError(
            'workload.kind is "rl", whose trainers are LocalJob and RlTrainer; make one of them'
        )
    if work.kind == "train" and folder is not None:
        return DemoTrainer(
            folder,
            rank,
            layout,
            lr=work.lr,
            seed=work.seed,
            batch=work.batch,
            tokens=work.tokens,
            dirty=dirty,
        )
    return SyntheticTrainer(
        layout,
        rank,
        density=work.density,
        seed=work.seed,
        weights=None if folder is None else load_weights(folder, layout.model),
        dirty=dirty,
    )


def first_weights(scenario: Scenario, folder: Path | None) -> dict[str, Tensor]:
    """Hugging Face name -> whole tensor before the first step, on every side; new storage at each call."""
    if folder is not None:
        return load_weights(folder, model_shape(scenario))
    return SyntheticWorkload(model_shape(scenario).tensors(), 0.0, scenario.workload.seed).initial()
