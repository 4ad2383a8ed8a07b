"""Families that mix attention with recurrent layers: Qwen3-Next and Nemotron-H."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.families.attention import Attention
from weightsync.reference.families.basic import BF16, MLP, GatedMLP, Norm, Whole
from weightsync.reference.families.experts import ExpertForm, Experts, Router
from weightsync.reference.families.places import Decoder
from weightsync.reference.families.recurrent import GatedDeltaNet, Mamba
from weightsync.reference.families.sizes import require_groups, require_sizes
from weightsync.reference.modules import Model, Placed
from weightsync.reference.params import ParamMeta

NEMOTRON = Decoder(
    checkpoint="backbone.", rollout="model.", embedding="embeddings.", rollout_embedding="embed_tokens.",
    norm="norm_f.", last_norm="decoder.final_norm.",
)  # fmt: skip
"""Where Nemotron-H's layers are on each side."""


@dataclass(frozen=True)
class Qwen3Next(Model):
    """Qwen3-Next: three layers of linear attention, then one of gated attention; experts and a gated shared one.

    Attributes: as those of ``Qwen3Moe``, and

        shared_intermediate: width of the shared expert.
        linear: the linear attention.
        every: each layer of this number, from 1, has attention (``full_attention_interval``).
    """

    vocab: int
    hidden: int
    expert_intermediate: int
    shared_intermediate: int
    experts: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    linear: GatedDeltaNet
    every: int = 4
    tied: bool = False
    form: ExpertForm = "grouped"
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "expert_intermediate", "shared_intermediate", "experts", "layers")
        require_sizes(self, *sizes, "heads", "kv_heads", "head_dim", "every")
        require_groups(self.heads, self.kv_heads)

    def modules(self) -> tuple[Placed, ...]:
        """Embedding; per layer norm, a mixer, norm, router, experts, the shared one; norm and head."""
        at, norm = Decoder(), Norm(self.hidden, dtype=self.dtype)
        heads = (self.heads, self.kv_heads, self.head_dim)
        attention = Attention(self.hidden, *heads, qk_norm=True, gated=True, dtype=self.dtype)
        router = Router(self.hidden, self.experts, dtype=self.dtype)
        experts = Experts(self.hidden, self.expert_intermediate, self.experts, self.form, self.dtype)
        shared = GatedMLP(self.hidden, self.shared_intermediate, self.dtype)
        gate = Whole((ParamMeta("weight", self.dtype, (1, self.hidden)),))
        found: list[Placed] = []
        for layer in range(self.layers):
            full = (layer + 1) % self.every == 0
            before = "self_attention.linear_qkv." if full else "self_attention.in_proj."
            found += [
                at.layer(layer, norm, "input_layernorm.", f"{before}layer_norm_"),
                at.layer(layer, attention, "self_attn.", "self_attention.")
                if full
                else at.layer(layer, self.linear, "linear_attn.", "self_attention."),
                at.layer(layer, norm, "post_attention_layernorm.", "pre_mlp_layernorm."),
                at.layer(layer, router, "mlp.", "mlp."),
                at.layer(layer, experts, "mlp.experts.", "mlp.experts."),
                at.layer(layer, shared, "mlp.shared_expert.", "mlp.shared_experts."),
                at.layer(layer, gate, "mlp.shared_expert_gate.", "mlp.shared_experts.gate_"),
            ]
        return at.whole(norm, found, self.vocab, self.hidden, tied=self.tied, dtype=self.dtype)


@dataclass(frozen=True)
class NemotronH(Model):
    """Nemotron-H: a norm and one mixer per layer: Mamba, attention, or an MLP without a gate (squared ReLU).

    Attributes: as those of ``ModelShape``, and

        pattern: a letter per layer, as ``hybrid_override_pattern`` has them: M for Mamba, * for attention, - for
            an MLP.
        mamba: the mixer of the Mamba layers.
    """

    vocab: int
    hidden: int
    intermediate: int
    pattern: str
    heads: int
    kv_heads: int
    head_dim: int
    mamba: Mamba
    tied: bool = False
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        require_sizes(self, "vocab", "hidden", "intermediate", "heads", "kv_heads", "head_dim")
        require_groups(self.heads, self.kv_heads)
        if not self.pattern or set(self.pattern) - set("M*-"):
            raise PlanMismatch(
                f"model pattern is {self.pattern!r}, expected a letter per layer: M, * or -; correct it"
            )

    @property
    def layers(self) -> int:  # type: ignore[override]
        """Layers, as many as the pattern has letters."""
        return len(self.pattern)

    def modules(self) -> tuple[Placed, ...]:
        """Embedding; per layer norm and mixer; norm and head."""
        norm = Norm(self.hidden, dtype=self.dtype)
        attention = Attention(self.hidden, self.heads, self.kv_heads, self.head_dim, dtype=self.dtype)
        mixers = {
            "M": (self.mamba, "mixer.", "mixer.in_proj."),
            "*": (attention, "self_attention.", "self_attention.linear_qkv."),
            "-": (MLP(self.hidden, self.intermediate, dtype=self.dtype), "mlp.", "mlp.linear_fc1."),
        }
        found: list[Placed] = []
        for layer, letter in enumerate(self.pattern):
            mixer, trainer, before = mixers[letter]
            found.append(NEMOTRON.layer(layer, norm, "norm.", f"{before}layer_norm_"))
            found.append(NEMOTRON.layer(layer, mixer, "mixer.", trainer))
        return NEMOTRON.whole(norm, found, self.vocab, self.hidden, tied=self.tied, dtype=self.dtype)
