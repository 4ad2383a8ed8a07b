"""Families of decoders with routed experts: Qwen3-MoE, DeepSeek-V2 and -V3."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightsync.reference.families.attention import Attention
from weightsync.reference.families.basic import BF16, GatedMLP, Norm
from weightsync.reference.families.experts import ExpertForm, Experts, Router
from weightsync.reference.families.mla import LatentAttention
from weightsync.reference.families.places import Decoder
from weightsync.reference.families.sizes import require_groups, require_sizes
from weightsync.reference.modules import Model, Placed


@dataclass(frozen=True)
class Qwen3Moe(Model):
    """Qwen3-MoE: attention as Qwen3's, every MLP replaced by a router and experts.

    Attributes: as those of ``ModelShape``, and

        expert_intermediate: width of one expert.
        experts: experts per layer.
        form: how the trainer holds them.
    """

    vocab: int
    hidden: int
    expert_intermediate: int
    experts: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool = False
    form: ExpertForm = "grouped"
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "expert_intermediate", "experts", "layers", "heads", "kv_heads")
        require_sizes(self, *sizes, "head_dim")
        require_groups(self.heads, self.kv_heads)

    def modules(self) -> tuple[Placed, ...]:
        """Embedding; per layer norm, attention, norm, router, experts; norm and head."""
        at, norm = Decoder(), Norm(self.hidden, dtype=self.dtype)
        heads = (self.heads, self.kv_heads, self.head_dim)
        attention = Attention(self.hidden, *heads, qk_norm=True, dtype=self.dtype)
        router = Router(self.hidden, self.experts, dtype=self.dtype)
        experts = Experts(self.hidden, self.expert_intermediate, self.experts, self.form, self.dtype)
        found: list[Placed] = []
        for layer in range(self.layers):
            found += [
                at.layer(layer, norm, "input_layernorm.", "self_attention.linear_qkv.layer_norm_"),
                at.layer(layer, attention, "self_attn.", "self_attention."),
                at.layer(layer, norm, "post_attention_layernorm.", "pre_mlp_layernorm."),
                at.layer(layer, router, "mlp.", "mlp."),
                at.layer(layer, experts, "mlp.experts.", "mlp.experts."),
            ]
        return at.whole(norm, found, self.vocab, self.hidden, tied=self.tied, dtype=self.dtype)


@dataclass(frozen=True)
class DeepSeek(Model):
    """DeepSeek-V2 or -V3: latent attention, a few dense layers, then shared and routed experts.

    Attributes: as those of ``Qwen3Moe`` and ``LatentAttention``, and

        intermediate: width of a dense layer's MLP.
        dense_layers: how many layers are dense, from the first (``first_k_dense_replace``).
        shared_experts: experts that every token takes; one MLP of that many widths.
        router_bias: the fp32 correction bias of V3, whatever ``dtype`` is.
    """

    vocab: int
    hidden: int
    intermediate: int
    expert_intermediate: int
    experts: int
    layers: int
    heads: int
    kv_rank: int
    nope: int
    rope: int
    value: int
    q_rank: int | None = None
    dense_layers: int = 1
    shared_experts: int = 1
    router_bias: bool = True
    form: ExpertForm = "grouped"
    dtype: torch.dtype = BF16

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "intermediate", "expert_intermediate", "experts", "layers", "heads")
        require_sizes(self, *sizes, "kv_rank", "nope", "rope", "value")
        require_sizes(self, "dense_layers", "shared_experts", least=0)

    def modules(self) -> tuple[Placed, ...]:
        """Embedding; per layer norm, attention, norm, MLP or router and experts; norm and head."""
        at, norm = Decoder(), Norm(self.hidden, dtype=self.dtype)
        widths = (self.heads, self.q_rank, self.kv_rank, self.nope, self.rope, self.value)
        attention = LatentAttention(self.hidden, *widths, self.dtype)
        mlp = GatedMLP(self.hidden, self.intermediate, self.dtype)
        router = Router(self.hidden, self.experts, self.router_bias, self.dtype)
        experts = Experts(self.hidden, self.expert_intermediate, self.experts, self.form, self.dtype)
        shared = GatedMLP(self.hidden, max(1, self.shared_experts) * self.expert_intermediate, self.dtype)
        found: list[Placed] = []
        for layer in range(self.layers):
            found.append(at.layer(layer, norm, "input_layernorm.", "input_layernorm."))
            found.append(at.layer(layer, attention, "self_attn.", "self_attention."))
            after = "post_attention_layernorm."
            if layer < self.dense_layers:
                found.append(at.layer(layer, norm, after, "mlp.linear_fc1.layer_norm_"))
                found.append(at.layer(layer, mlp, "mlp.", "mlp."))
                continue
            found.append(at.layer(layer, norm, after, "pre_mlp_layernorm."))
            found.append(at.layer(layer, router, "mlp.", "mlp."))
            found.append(at.layer(layer, experts, "mlp.experts.", "mlp.experts."))
            if self.shared_experts:
                found.append(at.layer(layer, shared, "mlp.shared_experts.", "mlp.shared_experts."))
        return at.whole(norm, found, self.vocab, self.hidden, tied=False, dtype=self.dtype)
