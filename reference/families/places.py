"""Where families put their modules: the prefixes that most decoders have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from weightsync.reference.families.basic import BF16, Vocabulary
from weightsync.reference.modules import Module, Placed


@dataclass(frozen=True)
class Decoder:
    """The prefixes of one decoder on both sides; the defaults are those of a language model on its own.

    Attributes:
        checkpoint: in front of ``layers`` in the checkpoint.
        head: the checkpoint's name of the output head, which is not inside of ``checkpoint``.
        trainer: in front of Megatron's names.
        rollout: on a rollout, what stands in place of ``checkpoint``.
        rollout_head: in front of the head's name on a rollout.
        embedding: name of the embedding inside of ``checkpoint``.
        rollout_embedding: its name inside of ``rollout``.
        norm: name of the last norm inside of ``checkpoint``.
        last_norm: Megatron's name of it.
    """

    checkpoint: str = "model."
    head: str = "lm_head."
    trainer: str = ""
    rollout: str = "model."
    rollout_head: str = "lm_head."
    embedding: str = "embed_tokens."
    rollout_embedding: str = "embed_tokens."
    norm: str = "norm."
    last_norm: str = "decoder.final_layernorm."

    def layer(self, layer: int, module: Module, checkpoint: str, trainer: str) -> Placed:
        """A module of a decoder layer; prefixes are inside of the layer."""
        inside = f"layers.{layer}.{checkpoint}"
        return Placed(
            module, layer, self.checkpoint + inside,
            f"{self.trainer}decoder.layers.{{layer}}.{trainer}", self.rollout + inside,
        )  # fmt: skip

    def whole(
        self, norm: Module, layers: Iterable[Placed], rows: int, hidden: int, *, tied: bool,
        dtype: torch.dtype = BF16,
    ) -> tuple[Placed, ...]:  # fmt: skip
        """A decoder: the embedding, ``layers``, the last norm and the head."""
        embedding = self.embed(rows, hidden, tied=tied, dtype=dtype)
        return (embedding, *layers, *self.end(norm, rows, hidden, tied=tied, dtype=dtype))

    def dense_layer(self, layer: int, norm: Module, attention: Module, mlp: Module) -> tuple[Placed, ...]:
        """Norm, attention, norm and MLP, each norm fused into the linear layer behind it on the trainer."""
        return (
            self.layer(layer, norm, "input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
            self.layer(layer, attention, "self_attn.", "self_attention."),
            self.layer(layer, norm, "post_attention_layernorm.", "mlp.linear_fc1.layer_norm_"),
            self.layer(layer, mlp, "mlp.", "mlp."),
        )

    def embed(self, rows: int, hidden: int, *, tied: bool, dtype: torch.dtype = BF16) -> Placed:
        """The token embedding."""
        return Placed(
            Vocabulary(rows, hidden, "embedding", tied, dtype), "first", self.checkpoint + self.embedding,
            f"{self.trainer}embedding.word_embeddings.", self.rollout + self.rollout_embedding,
        )  # fmt: skip

    def end(
        self, norm: Module, rows: int, hidden: int, *, tied: bool, dtype: torch.dtype = BF16
    ) -> tuple[Placed, Placed]:
        """The last norm, and the head: one of its own, or a tied copy of the embedding."""
        last = Placed(
            norm, "last", self.checkpoint + self.norm, self.trainer + self.last_norm, self.rollout + self.norm
        )
        head = Vocabulary(rows, hidden, "copy" if tied else "head", tied, dtype)
        return last, Placed(
            head, "last", self.head, f"{self.trainer}output_layer.", self.rollout_head,
            self.checkpoint + self.embedding if tied else None,
        )  # fmt: skip
