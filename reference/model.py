"""ModelShape: the sizes of a dense decoder, and the checkpoint tensors they imply, in wire order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-, Qwen2- or Qwen3-shaped decoder: sizes only, no weights.

    Attributes:
        vocab: rows of the embedding in the checkpoint, without padding.
        hidden: width of the residual stream.
        intermediate: width of the gated MLP.
        layers: decoder layers.
        heads: query heads.
        kv_heads: key/value heads; divides ``heads``.
        head_dim: width of one head.
        tied: the head is the embedding, and the checkpoint holds no ``lm_head.weight``.
        qk_norm: RMSNorm on each query and key head (Qwen3).
        qkv_bias: biases on q, k and v (Qwen2).
        dtype: dtype of every tensor in the checkpoint and on the wire.
    """

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise PlanMismatch(f"model {name} is {getattr(self, name)}, expected 1 or more; correct it")
        if self.heads % self.kv_heads:
            raise PlanMismatch(
                f"model has {self.heads} query heads and {self.kv_heads} key/value heads, expected a whole "
                "number of query heads per key/value head; correct the head counts"
            )

    def meta(self, name: str, *shape: int) -> ParamMeta:
        """One tensor of this model."""
        return ParamMeta(name, self.dtype, shape)

    def attention(self, layer: int, kind: str = "weight") -> tuple[ParamMeta, ParamMeta, ParamMeta]:
        """The q, k and v projections of one layer; ``kind`` is "weight" or "bias"."""
        inputs = (self.hidden,) if kind == "weight" else ()
        rows = (self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * self.head_dim)
        q, k, v = (
            self.meta(f"{prefix(layer)}.self_attn.{which}_proj.{kind}", count, *inputs)
            for which, count in zip("qkv", rows, strict=True)
        )
        return q, k, v

    def attention_out(self, layer: int) -> ParamMeta:
        """The output projection of one layer's attention."""
        return self.meta(f"{prefix(layer)}.self_attn.o_proj.weight", self.hidden, self.heads * self.head_dim)

    def head_norms(self, layer: int) -> tuple[ParamMeta, ...]:
        """The norms on query and key heads: two with ``qk_norm``, none without."""
        which = ("q_norm", "k_norm") if self.qk_norm else ()
        return tuple(self.meta(f"{prefix(layer)}.self_attn.{one}.weight", self.head_dim) for one in which)

    def mlp(self, layer: int) -> tuple[ParamMeta, ParamMeta, ParamMeta]:
        """The gate, up and down projections of one layer."""
        start = f"{prefix(layer)}.mlp"
        return (
            self.meta(f"{start}.gate_proj.weight", self.intermediate, self.hidden),
            self.meta(f"{start}.up_proj.weight", self.intermediate, self.hidden),
            self.meta(f"{start}.down_proj.weight", self.hidden, self.intermediate),
        )

    def norms(self, layer: int) -> tuple[ParamMeta, ParamMeta]:
        """The norms before attention and before the MLP of one layer."""
        return (
            self.meta(f"{prefix(layer)}.input_layernorm.weight", self.hidden),
            self.meta(f"{prefix(layer)}.post_attention_layernorm.weight", self.hidden),
        )

    @property
    def embedding(self) -> ParamMeta:
        """The token embedding."""
        return self.meta("model.embed_tokens.weight", self.vocab, self.hidden)

    @property
    def final_norm(self) -> ParamMeta:
        """The norm before the head."""
        return self.meta("model.norm.weight", self.hidden)

    @property
    def head(self) -> ParamMeta:
        """The output head; part of the checkpoint only when it is not tied."""
        return self.meta("lm_head.weight", self.vocab, self.hidden)

    def tensors(self) -> tuple[ParamMeta, ...]:
        """Every checkpoint tensor in wire order; a tied head is absent, since it is sent once."""
        listed = [self.embedding]
        for layer in range(self.layers):
            before_attention, before_mlp = self.norms(layer)
            listed += [before_attention, *self.attention(layer)]
            listed += self.attention(layer, "bias") if self.qkv_bias else ()
            listed += [*self.head_norms(layer), self.attention_out(layer), before_mlp, *self.mlp(layer)]
        listed += [self.final_norm] if self.tied else [self.final_norm, self.head]
        return tuple(listed)

    def numbers(self) -> dict[str, int]:
        """Checkpoint tensor name -> its place in ``tensors()``."""
        return {meta.name: number for number, meta in enumerate(self.tensors())}


def prefix(layer: int) -> str:
    """What the checkpoint names of one layer start with."""
    return f"model.layers.{layer}"


def padded_vocab(vocab: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` rows that holds ``vocab`` rows."""
    if vocab < 1 or multiple < 1:
        raise PlanMismatch(
            f"vocabulary {vocab} padded to a multiple of {multiple}, expected 1 or more for both"
        )
    return -(-vocab // multiple) * multiple
