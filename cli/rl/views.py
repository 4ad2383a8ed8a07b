"""One rank's runtime parameters as what a decoder multiplies with, whichever side named and fused them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, cat

from weightsync.cli.rl.parallel import TensorParallel, shared_rows
from weightsync.reference.heads import HeadCut, HeadShare, head_share
from weightsync.reference.model import ModelShape, prefix


@dataclass(frozen=True, slots=True)
class Attention:
    """Projections of one layer on one rank. H and K: its query and key/value heads, E their width, D hidden.

    Attributes:
        q: (H * E, D).
        k: (K * E, D).
        v: (K * E, D).
        biases: those of q, k and v, or None.
        norms: RMSNorm weights (E,) of queries and keys, or None.
        out: (D, H * E).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    biases: tuple[Tensor, Tensor, Tensor] | None
    norms: tuple[Tensor, Tensor] | None
    out: Tensor


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer on one rank. F: its part of the MLP's width.

    Attributes:
        norms: RMSNorm weights (D,) before attention and before the MLP.
        attention: its projections.
        gate: (F, D).
        up: (F, D).
        down: (D, F).
    """

    norms: tuple[Tensor, Tensor]
    attention: Attention
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model as one tensor-parallel rank holds it; views of runtime parameters, or cheap copies of fused ones.

    Attributes:
        shape: the whole model.
        heads: the rank's part of the heads.
        embedding: (rows, D), the rank's part of the vocabulary, padding included.
        head: likewise; ``embedding`` itself where tied.
        rows: per rank, the rows of the vocabulary that it holds, padding included; consecutive in rank order.
        first_token: the vocabulary row that ``embedding[0]`` is.
        layers: in order.
        norm: the last RMSNorm's weight (D,).
    """

    shape: ModelShape
    heads: HeadShare
    embedding: Tensor
    head: Tensor
    rows: tuple[int, ...]
    first_token: int
    layers: tuple[Layer, ...]
    norm: Tensor

    @property
    def real_rows(self) -> int:
        """Rows of ``head`` that are tokens, not padding; padding stands behind."""
        return max(0, min(len(self.head), self.shape.vocab - self.first_token))


def trainer_view(shape: ModelShape, params: Mapping[str, Tensor], tp: TensorParallel) -> LocalModel:
    """A Megatron rank's parameters, by runtime name, in any dtype; differentiable with respect to them.

    A collective of the group, and so is going back through it. Where the parameters are not cut by heads, or some
    heads are on several ranks, ranks exchange rows or gradients of key and value projections.
    """
    heads = head_share(shape.heads, shape.kv_heads, tp.rank, tp.size)
    per_group, width = shape.heads // shape.kv_heads, shape.head_dim
    blocks = []
    for group in range(*heads.kv):
        first, end = max(heads.q[0], group * per_group), min(heads.q[1], (group + 1) * per_group)
        blocks += [(end - first) * width, width, width]
    by_heads = HeadCut.of(shape, "grouped")
    replicas = shape.kv_heads % tp.size != 0
    equal_parts = replicas and by_heads.even(tp.size)

    def ungrouped(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if equal_parts:  # cut through groups, as Megatron has it with more ranks than groups
            whole = tp.all_rows(fused)
            fused = cat([whole[first:end] for (first, end), _ in by_heads.held(tp.rank, tp.size)])
        parts = fused.split_with_sizes(blocks)
        q, k, v = cat(parts[0::3]), cat(parts[1::3]), cat(parts[2::3])
        if replicas and not equal_parts:
            first, rows = heads.kv[0] * width, shape.kv_heads * width
            k, v = shared_rows(k, first, rows, tp), shared_rows(v, first, rows, tp)
        return q, k, v

    layers = []
    for number in range(shape.layers):
        attention = f"decoder.layers.{number}.self_attention"
        mlp = f"decoder.layers.{number}.mlp"
        q, k, v = ungrouped(params[f"{attention}.linear_qkv.weight"])
        biases = ungrouped(params[f"{attention}.linear_qkv.bias"]) if shape.qkv_bias else None
        norms = None
        if shape.qk_norm:
            norms = params[f"{attention}.q_layernorm.weight"], params[f"{attention}.k_layernorm.weight"]
        gate, up = params[f"{mlp}.linear_fc1.weight"].chunk(2)
        layers.append(
            Layer(
                (
                    params[f"{attention}.linear_qkv.layer_norm_weight"],
                    params[f"{mlp}.linear_fc1.layer_norm_weight"],
                ),
                Attention(q, k, v, biases, norms, params[f"{attention}.linear_proj.weight"]),
                gate,
                up,
                params[f"{mlp}.linear_fc2.weight"],
            )
        )
    embedding = params["embedding.word_embeddings.weight"]
    head = embedding if shape.tied else params["output_layer.weight"]
    rows, first_token = _vocabulary(embedding, tp)
    return LocalModel(
        shape,
        heads,
        embedding,
        head,
        rows,
        first_token,
        tuple(layers),
        params["decoder.final_layernorm.weight"],
    )


def rollout_view(shape: ModelShape, weights: Mapping[str, Tensor], tp: TensorParallel) -> LocalModel:
    """A rollout rank's weights, by runtime name, fused or under the checkpoint's own names. A collective."""
    heads = head_share(shape.heads, shape.kv_heads, tp.rank, tp.size)
    counts = (heads.q, heads.kv, heads.kv)
    sizes = [(end - first) * shape.head_dim for first, end in counts]

    def projections(at: str, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        fused = weights.get(f"{at}.qkv_proj.{kind}")
        if fused is None:
            return (
                weights[f"{at}.q_proj.{kind}"],
                weights[f"{at}.k_proj.{kind}"],
                weights[f"{at}.v_proj.{kind}"],
            )
        q, k, v = fused.split_with_sizes(sizes)
        return q, k, v

    layers = []
    for number in range(shape.layers):
        attention, mlp = f"{prefix(number)}.self_attn", f"{prefix(number)}.mlp"
        q, k, v = projections(attention, "weight")
        biases = projections(attention, "bias") if shape.qkv_bias else None
        norms = None
        if shape.qk_norm:
            norms = weights[f"{attention}.q_norm.weight"], weights[f"{attention}.k_norm.weight"]
        fused = weights.get(f"{mlp}.gate_up_proj.weight")
        gate, up = (
            fused.chunk(2)
            if fused is not None
            else (weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"])
        )
        norm = f"{prefix(number)}.{{}}_layernorm.weight"
        layers.append(
            Layer(
                (weights[norm.format("input")], weights[norm.format("post_attention")]),
                Attention(q, k, v, biases, norms, weights[f"{attention}.o_proj.weight"]),
                gate,
                up,
                weights[f"{mlp}.down_proj.weight"],
            )
        )
    embedding = weights[shape.embedding.name]
    head = embedding if shape.tied else weights[shape.head.name]
    rows, first_token = _vocabulary(embedding, tp)
    return LocalModel(
        shape, heads, embedding, head, rows, first_token, tuple(layers), weights["model.norm.weight"]
    )


def _vocabulary(embedding: Tensor, tp: TensorParallel) -> tuple[tuple[int, ...], int]:
    """Rows of every rank, which a padded vocabulary may leave unequal, and the first row of this one."""
    rows = tuple(int(count) for count in tp.all_gather(torch.tensor(len(embedding))))
    return rows, sum(rows[: tp.rank])
