"""DemoTrainer: real AdamW steps on one rank's shards, bit-equal on every rank without a collective."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.cli.model import decoder
from weightsync.cli.model.checkpoint import load_checkpoint
from weightsync.cli.model.data import Batches, token_stream
from weightsync.cli.model.optimizer import AdamW
from weightsync.cli.model.sharded import ShardedModel
from weightsync.reference.deployment import Deployment
from weightsync.reference.dirty import DirtyBits
from weightsync.reference.errors import PlanMismatch

MAX_NORM = 1.0
"""Gradients longer than this, over the whole model, are scaled down to it."""


class DemoTrainer:
    """One trainer rank of a demo. Every rank holds all ranks' shards and takes the same steps on its own.

    The whole model's gradient is computed on joined weights in float32, with one thread, so that equal seeds
    give equal bits on every rank and in every process of one machine. It is then cut to shards, and each
    rank's AdamW steps on its fp32 masters. Memory is about 30 bytes per model parameter in each process.

    The softmax runs over the padded vocabulary, as Megatron's does: padding rows get gradients and change,
    and those changes must never travel.

    Args:
        checkpoint: a Hugging Face folder.
        rank: this rank; whose shards ``params`` gives.
        deployment: who holds what; its model is the checkpoint's.
        lr: AdamW's step size.
        seed: draws the batches.
        batch: windows in a batch.
        tokens: tokens that each window predicts.
        text: trained on; the shipped text when left out.
        dirty: have the optimizers mark what they change.

    Attributes:
        dirty: per rank, the marks; empty without them.
    """

    def __init__(
        self,
        checkpoint: Path,
        rank: int,
        deployment: Deployment,
        *,
        lr: float,
        seed: int,
        batch: int = 4,
        tokens: int = 64,
        text: str | None = None,
        dirty: bool = False,
    ) -> None:
        loaded = load_checkpoint(checkpoint)
        self.config = loaded.config
        self.rank = rank
        if loaded.config.shape != deployment.model:
            raise PlanMismatch(
                f"{checkpoint} holds a model of {loaded.config.shape}, the deployment expects "
                f"{deployment.model}; "
                "build the deployment from this folder's config.json"
            )
        self.model = ShardedModel(deployment, loaded.weights)
        self.steps = 0
        self.dirty = [DirtyBits(params) for params in self.model.params] if dirty else []
        self._optimizers = [
            AdamW(params, lr, dirty=self.dirty[rank] if dirty else None)
            for rank, params in enumerate(self.model.params)
        ]
        stream = token_stream(checkpoint, loaded.config.shape.vocab, text)
        self._batches = Batches(stream, batch, min(tokens, loaded.config.max_positions), seed)

    @property
    def params(self) -> Mapping[str, Parameter]:
        """Runtime name -> this rank's live parameter with real TP attributes; changed in place."""
        return self.params_of(self.rank)

    def params_of(self, rank: int) -> Mapping[str, Parameter]:
        """As ``params``, of another rank."""
        return self.model.params[rank]

    def collect(self) -> None:
        """Nothing to do: every rank draws its batches on its own."""

    def step(self) -> dict[str, float]:
        """Take one optimizer step on every rank's shards; ``loss`` before it, in nats, and ``lr``."""
        self.steps += 1
        with one_thread():
            leaves = {name: full.float().requires_grad_() for name, full in self.model.joined().items()}
            with torch.enable_grad():
                loss = decoder.loss(self.config, leaves, self._batches.at(self.steps))
                loss.backward()  # type: ignore[no-untyped-call]
            grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
            clip(grads)
            for rank, optimizer in enumerate(self._optimizers):
                optimizer.step(self.model.cut(rank, grads))
        return {"loss": float(loss.detach()), "lr": self._optimizers[0].lr}

    def export(self) -> dict[str, Tensor]:
        """Hugging Face name -> whole tensor of the present weights: the oracle for every rollout."""
        return self.model.export()


def clip(grads: Mapping[str, Tensor]) -> float:
    """Scale the gradients in place to a norm of at most ``MAX_NORM``, and return their norm before."""
    return shrink(grads, float(torch.stack([grad.square().sum() for grad in grads.values()]).sum().sqrt()))


def shrink(grads: Mapping[str, Tensor], norm: float) -> float:
    """Scale gradients of the model's ``norm`` in place to at most ``MAX_NORM``, and return ``norm``."""
    if norm > MAX_NORM:
        for grad in grads.values():
            grad.mul_(MAX_NORM / norm)
    return norm


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread inside, so that no sum depends on how many there are. Never around an await."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
