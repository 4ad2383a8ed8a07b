"""ModelShape: the sizes of a dense decoder, Llama, Qwen2 or Qwen3, and its table of modules."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.reference.families.attention import Attention
from weightsync.reference.families.basic import GatedMLP, Norm, padded_vocab
from weightsync.reference.families.places import Decoder
from weightsync.reference.families.sizes import require_groups, require_sizes
from weightsync.reference.modules import Model, Placed
from weightsync.reference.params import ParamMeta

__all__ = ["ModelShape", "padded_vocab", "prefix"]


@dataclass(frozen=True)
class ModelShape(Model):
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
        require_sizes(self, "vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim")
        require_groups(self.heads, self.kv_heads)

    def modules(self) -> tuple[Placed, ...]:
        """Embedding; per layer norm, attention, norm, MLP; norm and head."""
        at, norm = Decoder(), Norm(self.hidden, dtype=self.dtype)
        attention, mlp = self.attention(), GatedMLP(self.hidden, self.intermediate, self.dtype)
        layers = [
            placed for layer in range(self.layers) for placed in at.dense_layer(layer, norm, attention, mlp)
        ]
        return at.whole(norm, layers, self.vocab, self.hidden, tied=self.tied, dtype=self.dtype)

    def attention(self) -> Attention:
        """The attention of every layer."""
        return Attention(
            self.hidden, self.heads, self.kv_heads, self.head_dim, self.qk_norm, self.qkv_bias,
            dtype=self.dtype,
        )  # fmt: skip

    @property
    def embedding(self) -> ParamMeta:
        """The token embedding."""
        return ParamMeta("model.embed_tokens.weight", self.dtype, (self.vocab, self.hidden))

    @property
    def head(self) -> ParamMeta:
        """The output head; part of the checkpoint only when it is not tied."""
        return ParamMeta("lm_head.weight", self.dtype, (self.vocab, self.hidden))


def prefix(layer: int) -> str:
    """What the checkpoint names of one layer start with."""
    return f"model.layers.{layer}"
