"""Modules that almost every family has: vocabularies, norms, MLPs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import gate_up, plain, vocab
from weightsync.reference.modules import Module, Param, cut_along, everywhere, megatron
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta

BF16 = torch.bfloat16


def padded_vocab(vocab: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` rows that holds ``vocab`` rows."""
    if vocab < 1 or multiple < 1:
        raise PlanMismatch(
            f"vocabulary {vocab} padded to a multiple of {multiple}, expected 1 or more for both"
        )
    return -(-vocab // multiple) * multiple


@dataclass(frozen=True)
class Vocabulary(Module):
    """A matrix with a row per token: embedding, head, or the copy of a tied embedding on the last stage.

    Attributes:
        rows: tokens.
        hidden: width.
        role: what it is, which decides Megatron's attributes.
        tied: whether embedding and head are one matrix.
    """

    rows: int
    hidden: int
    role: Literal["embedding", "head", "copy"]
    tied: bool = False
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta]:
        """One."""
        return (ParamMeta("weight", self.dtype, (self.rows, self.hidden)),)

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """Padded to a multiple of ``vocab_multiple`` times TP rows."""
        roles = {"is_embedding_or_output_parameter": True}
        if self.role == "embedding":
            roles["is_embedding_parameter"] = True
        if self.role == "copy":
            roles["shared"] = True
        if self.tied and at.layout.pp > 1:
            roles["shared_embedding"] = True
        padded = padded_vocab(self.rows, at.vocab_multiple * at.layout.tp)
        yield Param("weight", vocab(self.tensors()[0], padded), megatron(0, **roles))

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """Padded to a multiple of ``vocab_multiple`` rows with ``fused``."""
        padded = padded_vocab(self.rows, at.vocab_multiple) if at.layout.fused else self.rows
        yield Param("weight", vocab(self.tensors()[0], padded), cut_along(0))


@dataclass(frozen=True)
class Norm(Module):
    """A norm's weight, and ``bias`` where it has one: whole on every rank."""

    hidden: int
    bias: bool = False
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """One or two."""
        names = ("weight", "bias") if self.bias else ("weight",)
        return tuple(ParamMeta(name, self.dtype, (self.hidden,)) for name in names)

    def trainer(self, at: TrainerRank) -> Iterable[Param]:
        """Whole; its gradients are partial per TP rank."""
        return (everywhere(meta.name, meta, sequence_parallel=at.layout.tp > 1) for meta in self.tensors())

    def rollout(self, at: RolloutRank) -> Iterable[Param]:
        """Whole."""
        return (everywhere(meta.name, meta) for meta in self.tensors())


@dataclass(frozen=True)
class Whole(Module):
    """Any tensors that every rank of both sides holds whole, under the checkpoint's names, such as a vision tower's.

    Attributes:
        metas: the tensors, with relative names.
    """

    metas: tuple[ParamMeta, ...]

    def tensors(self) -> tuple[ParamMeta, ...]:
        """As given."""
        return self.metas

    def trainer(self, at: TrainerRank) -> Iterable[Param]:
        """As given."""
        return (everywhere(meta.name, meta) for meta in self.metas)

    def rollout(self, at: RolloutRank) -> Iterable[Param]:
        """As given."""
        return (everywhere(meta.name, meta) for meta in self.metas)


@dataclass(frozen=True)
class GatedMLP(Module):
    """Gate, up and down, as SwiGLU has them. Megatron's fc1 is [gate; up], cut with ``partition_stride`` 2."""

    hidden: int
    intermediate: int
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ParamMeta, ParamMeta]:
        """Gate, up and down."""
        return (
            ParamMeta("gate_proj.weight", self.dtype, (self.intermediate, self.hidden)),
            ParamMeta("up_proj.weight", self.dtype, (self.intermediate, self.hidden)),
            ParamMeta("down_proj.weight", self.dtype, (self.hidden, self.intermediate)),
        )

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """fc1 and fc2."""
        gate, up, down = self.tensors()
        yield Param("linear_fc1.weight", gate_up(gate, up), megatron(0, stride=2))
        yield Param("linear_fc2.weight", plain(down), megatron(1))

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """``gate_up_proj`` and ``down_proj``."""
        gate, up, down = self.tensors()
        if at.layout.fused:
            yield Param("gate_up_proj.weight", gate_up(gate, up), cut_along(0, stride=2))
        else:
            yield Param(gate.name, plain(gate), cut_along(0))
            yield Param(up.name, plain(up), cut_along(0))
        yield Param(down.name, plain(down), cut_along(1))


@dataclass(frozen=True)
class MLP(Module):
    """Up and down without a gate, as relu2 and GELU have them; fc1 has stride 1, whatever its name says.

    Attributes:
        up: name of the first projection in checkpoint and rollout; Megatron's is ``linear_fc1``.
        down: name of the second.
        bias: biases on both; that of ``down`` is whole on every rank.
        out: width of what comes out, where it is not ``hidden``.
    """

    hidden: int
    intermediate: int
    up: str = "up_proj"
    down: str = "down_proj"
    bias: bool = False
    dtype: torch.dtype = BF16
    out: int | None = None

    def tensors(self) -> tuple[ParamMeta, ...]:
        """Weight and bias of each."""
        out = self.hidden if self.out is None else self.out
        sizes = ((self.up, self.intermediate, self.hidden), (self.down, out, self.intermediate))
        found = []
        for name, rows, columns in sizes:
            found.append(ParamMeta(f"{name}.weight", self.dtype, (rows, columns)))
            found += [ParamMeta(f"{name}.bias", self.dtype, (rows,))] if self.bias else []
        return tuple(found)

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """fc1 and fc2."""
        for meta in self.tensors():
            module, _, kind = meta.name.rpartition(".")
            name = f"linear_fc{1 if module == self.up else 2}.{kind}"
            if module == self.up:
                yield Param(name, plain(meta), megatron(0))
            elif kind == "weight":
                yield Param(name, plain(meta), megatron(1))
            else:
                yield everywhere(name, meta, allreduce=True, sequence_parallel=at.layout.tp > 1)

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """Under the checkpoint's names."""
        for meta in self.tensors():
            module, _, kind = meta.name.rpartition(".")
            if module == self.down and kind == "bias":
                yield everywhere(meta.name, meta)
            else:
                yield Param(meta.name, plain(meta), cut_along(0 if module == self.up else 1))
