"""Packed blocks of state-space and linear-attention layers: each block of rows is cut on its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.families.basic import BF16
from weightsync.reference.layouts import Layout, concat, plain
from weightsync.reference.modules import Module, Param, cut_along, everywhere, megatron
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta


def block_sizes(name: str, sizes: tuple[int, ...], tp: int) -> list[int]:
    """``partition_sizes``: a rank's rows of each block of whole ``sizes``.

    Raises:
        PlanMismatch: ``tp`` does not divide one of them.
    """
    if any(size % tp for size in sizes):
        raise PlanMismatch(
            f"blocks {list(sizes)} of {name!r} do not divide for {tp} ranks; choose a tensor-parallel size that "
            "divides each of them"
        )
    return [size // tp for size in sizes]


@dataclass(frozen=True)
class GatedDeltaNet(Module):
    """Linear attention of Qwen3-Next: an input projection, a short convolution, a decay per value head.

    Checkpoint and vLLM have ``in_proj_qkvz``, per key head [q; k; v; z], and ``in_proj_ba``, per key head [b; a].
    Megatron's ``in_proj`` is [q; k; v; z; beta; alpha], six blocks, with ``partition_sizes``.

    Attributes:
        key_heads: heads of q and k.
        value_heads: heads of v and z; a multiple of ``key_heads``.
        key_dim: width of a key head.
        value_dim: width of a value head.
        kernel: length of the convolution.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """In the order of the checkpoint's module."""
        qk, v = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return (
            ParamMeta("dt_bias", self.dtype, (self.value_heads,)),
            ParamMeta("A_log", self.dtype, (self.value_heads,)),
            ParamMeta("conv1d.weight", self.dtype, (2 * qk + v, 1, self.kernel)),
            ParamMeta("in_proj_qkvz.weight", self.dtype, (2 * qk + 2 * v, self.hidden)),
            ParamMeta("in_proj_ba.weight", self.dtype, (2 * self.value_heads, self.hidden)),
            ParamMeta("norm.weight", self.dtype, (self.value_dim,)),
            ParamMeta("out_proj.weight", self.dtype, (self.hidden, v)),
        )

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """``in_proj``, ``conv1d``, ``dt_bias``, ``A_log``, ``out_norm``, ``out_proj``."""
        tp = at.layout.tp
        dt_bias, a_log, conv, qkvz, ba, norm, out = self.tensors()
        qk, v = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        block_sizes("in_proj", (self.key_heads,), tp)  # whole heads
        sizes = block_sizes("in_proj", (qk, qk, v, v, self.value_heads, self.value_heads), tp)
        yield Param("in_proj.weight", self._packed(qkvz, ba), megatron(0, partition_sizes=sizes))
        yield Param("conv1d.weight", plain(conv), megatron(0, partition_sizes=sizes[:3]))
        yield Param("dt_bias", plain(dt_bias), megatron(0))
        yield Param("A_log", plain(a_log), megatron(0))
        yield everywhere("out_norm.weight", norm, sequence_parallel=tp > 1)
        yield Param("out_proj.weight", plain(out), megatron(1))

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """Under the checkpoint's names; the projections in whole key heads, the convolution by blocks."""
        dt_bias, a_log, conv, qkvz, ba, norm, out = self.tensors()
        qk, v = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        block_sizes("in_proj_qkvz", (self.key_heads,), at.layout.tp)  # whole heads
        conv_sizes = block_sizes(conv.name, (qk, qk, v), at.layout.tp)
        yield Param(conv.name, plain(conv), cut_along(0, partition_sizes=conv_sizes))
        for meta in (dt_bias, a_log, qkvz, ba):
            yield Param(meta.name, plain(meta), cut_along(0))
        yield everywhere(norm.name, norm)
        yield Param(out.name, plain(out), cut_along(1))

    def _packed(self, qkvz: ParamMeta, ba: ParamMeta) -> Layout:
        """Megatron's six blocks, from the checkpoint's rows per key head."""
        both, per_key = concat(qkvz, ba), self.value_heads // self.key_heads
        wide = per_key * self.value_dim
        grouped = torch.arange(qkvz.shape[0]).reshape(self.key_heads, -1)
        blocks = list(torch.split(grouped, [self.key_dim, self.key_dim, wide, wide], dim=1))
        scalars = torch.arange(qkvz.shape[0], both.shape[0]).reshape(self.key_heads, -1)
        blocks += torch.split(scalars, [per_key, per_key], dim=1)
        order = torch.cat([block.reshape(-1) for block in blocks])
        return replace(both, tensor=both.tensor[order], row=both.row[order])


@dataclass(frozen=True)
class Mamba(Module):
    """A Mamba-2 mixer: ``in_proj`` is [z; x; B; C; dt], the convolution [x; B; C], alike on all sides.

    vLLM holds ``A`` = -exp(``A_log``), which is computed; here a rollout holds the bits of ``A_log``. A rank's groups
    are cut as everything else, never replicated: the tensor-parallel size divides them.

    Attributes:
        heads: heads.
        head_dim: width of a head.
        groups: groups of B and C.
        state: width of the state.
        kernel: length of the convolution.
    """

    hidden: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int = 4
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """In the order of the checkpoint's module."""
        inner, packed, conv = self.heads * self.head_dim, sum(self._blocks), sum(self._blocks[1:4])
        heads = tuple(ParamMeta(name, self.dtype, (self.heads,)) for name in ("dt_bias", "A_log", "D"))
        return (
            *heads,
            ParamMeta("conv1d.weight", self.dtype, (conv, 1, self.kernel)),
            ParamMeta("conv1d.bias", self.dtype, (conv,)),
            ParamMeta("in_proj.weight", self.dtype, (packed, self.hidden)),
            ParamMeta("norm.weight", self.dtype, (inner,)),
            ParamMeta("out_proj.weight", self.dtype, (self.hidden, inner)),
        )

    @property
    def _blocks(self) -> tuple[int, ...]:
        inner, state = self.heads * self.head_dim, self.groups * self.state
        return inner, inner, state, state, self.heads

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """Megatron's names are the checkpoint's."""
        for meta, dim, sizes in self._cuts(at.layout.tp):
            yield Param(meta.name, plain(meta), megatron(dim, **sizes))

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """So are vLLM's."""
        for meta, dim, sizes in self._cuts(at.layout.tp):
            yield Param(meta.name, plain(meta), cut_along(dim, **sizes))

    def _cuts(self, tp: int) -> Iterator[tuple[ParamMeta, int, dict[str, Any]]]:
        """Each tensor, the dimension that is cut, and its blocks."""
        block_sizes("in_proj", (self.heads, self.groups), tp)  # whole heads and groups
        sizes = block_sizes("in_proj", self._blocks, tp)
        blocks = {"in_proj.weight": sizes, "conv1d.weight": sizes[1:4], "conv1d.bias": sizes[1:4]}
        for meta in self.tensors():
            packed = {"partition_sizes": blocks[meta.name]} if meta.name in blocks else {}
            yield meta, int(meta.name == "out_proj.weight"), packed
