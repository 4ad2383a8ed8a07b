"""Attention with query groups, and that of a vision tower."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.families.basic import BF16
from weightsync.reference.heads import HeadCut, HeadOrder
from weightsync.reference.layouts import Layout, concat, plain, qkv
from weightsync.reference.modules import Module, Param, by_heads, everywhere, megatron
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta, TPAttributes


@dataclass(frozen=True)
class Attention(Module):
    """Query, key, value and output projections; heads are cut as ``reference.heads`` says.

    Attributes:
        hidden: width of the residual stream.
        heads: query heads.
        kv_heads: key/value heads; divides ``heads``.
        head_dim: width of one head.
        qk_norm: RMSNorm on each query and key head (Qwen3).
        qkv_bias: biases on q, k and v (Qwen2).
        gated: an output gate beside each query head (Qwen3-Next). The checkpoint's and vLLM's q rows are per head
            [query; gate], Megatron's per group [queries; gates; key; value].
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = False
    qkv_bias: bool = False
    gated: bool = False
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """q, k and v, their biases, the norms, o."""
        norms = ("q_norm", "k_norm") if self.qk_norm else ()
        return (
            *self.projections("weight"),
            *(self.projections("bias") if self.qkv_bias else ()),
            *(ParamMeta(f"{name}.weight", self.dtype, (self.head_dim,)) for name in norms),
            self.out,
        )

    def projections(self, kind: str) -> tuple[ParamMeta, ParamMeta, ParamMeta]:
        """q, k and v; ``kind`` is "weight" or "bias"."""
        inputs = (self.hidden,) if kind == "weight" else ()
        q, k, v = (
            ParamMeta(f"{which}_proj.{kind}", self.dtype, (count * self.head_dim, *inputs))
            for which, count in zip("qkv", (self.rows, self.kv_heads, self.kv_heads), strict=True)
        )
        return q, k, v

    @property
    def out(self) -> ParamMeta:
        """The output projection."""
        return ParamMeta("o_proj.weight", self.dtype, (self.hidden, self.heads * self.head_dim))

    @property
    def rows(self) -> int:
        """Heads of q, gates included."""
        return self.heads * (1 + self.gated)

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """``linear_qkv``, the norms on heads, ``linear_proj``."""
        tp = at.layout.tp
        self._check(tp, self._cut("grouped", rows=self.rows).even(tp))
        for kind in ("weight", "bias") if self.qkv_bias else ("weight",):
            yield Param(f"linear_qkv.{kind}", self._fused(kind), self._qkv_attributes(tp))
        for which in "qk" if self.qk_norm else "":
            meta = ParamMeta(f"{which}_norm.weight", self.dtype, (self.head_dim,))
            yield everywhere(f"{which}_layernorm.weight", meta, sequence_parallel=tp > 1)
        cut = self._cut("query", dim=1)
        yield Param(
            "linear_proj.weight", replace(plain(self.out), heads=cut), megatron(1, **cut.attributes(tp))
        )

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """``qkv_proj``, or q, k and v on their own; the norms; ``o_proj``."""
        tp = at.layout.tp
        self._check(tp, self.heads % tp == 0 and (self.kv_heads % tp == 0 or tp % self.kv_heads == 0))
        orders: tuple[HeadOrder, ...] = ("query", "kv", "kv")
        for kind in ("weight", "bias") if self.qkv_bias else ("weight",):
            parts = self.projections(kind)
            if at.layout.fused:
                yield by_heads(f"qkv_proj.{kind}", concat(*parts), self._cut("stacked", rows=self.rows))
            else:
                for meta, order in zip(parts, orders, strict=True):
                    yield by_heads(meta.name, plain(meta), self._cut(order, rows=self.rows))
        for which in "qk" if self.qk_norm else "":
            name = f"{which}_norm.weight"
            yield everywhere(name, ParamMeta(name, self.dtype, (self.head_dim,)))
        yield by_heads(self.out.name, plain(self.out), self._cut("query", dim=1))

    def _cut(self, order: HeadOrder, dim: int = 0, rows: int | None = None) -> HeadCut:
        return HeadCut(rows or self.heads, self.kv_heads, self.head_dim, dim, order)

    def _qkv_attributes(self, tp: int) -> TPAttributes:
        counts = self._cut("grouped", rows=self.rows).attributes(tp)
        if counts:  # uneven groups have no common split to tell
            return megatron(0, is_qkv=True, **counts)
        group = [self.heads // self.kv_heads * self.head_dim] * (1 + self.gated)
        return megatron(0, is_qkv=True, qkv_split_shapes=[*group, self.head_dim, self.head_dim])

    def _fused(self, kind: str) -> Layout:
        """Megatron's rows: per group its queries, its gates, its key, its value."""
        q, k, v = self.projections(kind)
        layout = qkv(q, k, v, heads=self.rows, groups=self.kv_heads, head_dim=self.head_dim)
        layout = replace(layout, heads=self._cut("grouped", rows=self.rows))
        if not self.gated:
            return layout
        per_group = self.heads // self.kv_heads
        order = torch.arange(layout.shape[0]).reshape(self.kv_heads, -1, self.head_dim)
        queries = order[:, : 2 * per_group].reshape(self.kv_heads, per_group, 2, self.head_dim)
        turned = queries.transpose(1, 2).reshape(self.kv_heads, 2 * per_group, self.head_dim)
        rows = torch.cat([turned, order[:, 2 * per_group :]], dim=1).reshape(-1)
        return replace(layout, tensor=layout.tensor[rows], row=layout.row[rows])

    def _check(self, tp: int, even: bool) -> None:
        if self.gated and not (even and self.heads % tp == 0):
            raise PlanMismatch(
                f"attention with an output gate has {self.heads} query and {self.kv_heads} key/value heads, "
                f"which {tp} ranks cannot cut evenly; choose a tensor-parallel size that divides both"
            )


@dataclass(frozen=True)
class VisionAttention(Module):
    """A vision tower's attention: one fused ``qkv`` with biases, [q; k; v] in the checkpoint.

    Megatron's ``linear_qkv`` is per head [q; k; v]; a rollout's part is [q_r; k_r; v_r].
    """

    hidden: int
    heads: int
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """Weight and bias of ``qkv`` and ``proj``."""
        return (
            ParamMeta("qkv.weight", self.dtype, (3 * self.hidden, self.hidden)),
            ParamMeta("qkv.bias", self.dtype, (3 * self.hidden,)),
            ParamMeta("proj.weight", self.dtype, (self.hidden, self.hidden)),
            ParamMeta("proj.bias", self.dtype, (self.hidden,)),
        )

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """``linear_qkv`` and ``linear_proj``."""
        weight, bias, proj, proj_bias = self.tensors()
        counts = self._cut("grouped").attributes(at.layout.tp)
        head = self.hidden // self.heads
        split: dict[str, Any] = {} if counts else {"qkv_split_shapes": [head, head, head]}
        for meta in (weight, bias):
            rows = torch.arange(3 * self.hidden).reshape(3, self.heads, -1).transpose(0, 1).reshape(-1)
            layout = replace(plain(meta), row=rows, heads=self._cut("grouped"))
            yield Param(f"linear_{meta.name}", layout, megatron(0, is_qkv=True, **split, **counts))
        cut = self._cut("query", dim=1)
        yield Param(
            "linear_proj.weight",
            replace(plain(proj), heads=cut),
            megatron(1, **cut.attributes(at.layout.tp)),
        )
        yield everywhere("linear_proj.bias", proj_bias, allreduce=True, sequence_parallel=at.layout.tp > 1)

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """``qkv`` and ``proj``."""
        weight, bias, proj, proj_bias = self.tensors()
        yield by_heads(weight.name, plain(weight), self._cut("stacked"))
        yield by_heads(bias.name, plain(bias), self._cut("stacked"))
        yield by_heads(proj.name, plain(proj), self._cut("query", dim=1))
        yield everywhere(proj_bias.name, proj_bias)

    def _cut(self, order: HeadOrder, dim: int = 0) -> HeadCut:
        return HeadCut(self.heads, self.heads, self.hidden // self.heads, dim, order)
