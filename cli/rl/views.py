"""One rank's runtime parameters as what a decoder multiplies with, whichever side named and fused them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, cat

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.heads import HeadShare, head_share
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
        first_token: the vocabulary row that ``embedding[0]`` is.
        layers: in order.
        norm: the last RMSNorm's weight (D,).
    """

    shape: ModelShape
    heads: HeadShare
    embedding: Tensor
    head: Tensor
    first_token: int
    layers: tuple[Layer, ...]
    norm: Tensor

    @property
    def real_rows(self) -> int:
        """Rows of ``head`` that are tokens, not padding; padding stands behind."""
        return max(0, min(len(self.head), self.shape.vocab - self.first_token))


def trainer_view(shape: ModelShape, params: Mapping[str, Tensor], rank: int, tp: int) -> LocalModel:
    """A Megatron rank's parameters, by runtime name, in any dtype; differentiable with respect to them.

    Raises PlanMismatch where a rank holds parts of heads, as Megatron cuts with more ranks than key/value heads.
    """
    heads = head_share(shape.heads, shape.kv_heads, rank, tp)
    per_group = shape.heads // shape.kv_heads
    blocks = []
    for group in range(*heads.kv):
        first, end = max(heads.q[0], group * per_group), min(heads.q[1], (group + 1) * per_group)
        blocks += [(end - first) * shape.head_dim, shape.head_dim, shape.head_dim]

    def ungrouped(fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if len(fused) != sum(blocks):
            raise PlanMismatch(
                f"trainer rank {rank} of {tp} holds {len(fused)} rows of linear_qkv, expected the {sum(blocks)} of its "
                f"whole heads; with {shape.kv_heads} key/value heads choose a tensor-parallel size that is no larger"
            )
        parts = fused.split(blocks)
        return cat(parts[0::3]), cat(parts[1::3]), cat(parts[2::3])

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
    return LocalModel(
        shape,
        heads,
        embedding,
        head,
        rank * len(embedding),
        tuple(layers),
        params["decoder.final_layernorm.weight"],
    )


def rollout_view(shape: ModelShape, weights: Mapping[str, Tensor], rank: int, tp: int) -> LocalModel:
    """A rollout rank's weights, by runtime name, fused or under the checkpoint's own names."""
    heads = head_share(shape.heads, shape.kv_heads, rank, tp)
    counts = (heads.q, heads.kv, heads.kv)
    rows = [(end - first) * shape.head_dim for first, end in counts]

    def projections(at: str, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        fused = weights.get(f"{at}.qkv_proj.{kind}")
        if fused is None:
            return (
                weights[f"{at}.q_proj.{kind}"],
                weights[f"{at}.k_proj.{kind}"],
                weights[f"{at}.v_proj.{kind}"],
            )
        q, k, v = fused.split(rows)
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
    return LocalModel(
        shape, heads, embedding, head, rank * len(embedding), tuple(layers), weights["model.norm.weight"]
    )
