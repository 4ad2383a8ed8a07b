"""A small Llama/Qwen3 decoder as plain functions over a dict of Hugging Face named tensors.

Shape suffixes: B batch, T tokens, D hidden, H query heads, K key/value heads, E head width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from weightsync.cli.model.config import DecoderConfig

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x`` (..., D) scaled to unit mean square, times ``weight`` (D,)."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotary_frequencies(config: DecoderConfig) -> Tensor:
    """Radians per position of every rotated pair, (E/2,) float32."""
    exponents = torch.arange(0, config.shape.head_dim, 2, dtype=torch.float32) / config.shape.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    turns = scaling.original_positions * frequencies / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return frequencies * (blend + (1.0 - blend) / scaling.factor)


def rotate(x_BTHE: Tensor, frequencies: Tensor, start: int = 0) -> Tensor:
    """Rotary embedding in Hugging Face's half-split order: pair i is dimensions i and i + E/2.

    The first token stands at position ``start``.
    """
    tokens, half = x_BTHE.shape[1], x_BTHE.shape[-1] // 2
    angles = torch.arange(start, start + tokens, dtype=torch.float32)[:, None] * frequencies
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    first, second = x_BTHE[..., :half], x_BTHE[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def attention(
    config: DecoderConfig, weights: Weights, prefix: str, x_BTD: Tensor, frequencies: Tensor
) -> Tensor:
    """Causal grouped-query attention of one layer, (B, T, D); ``prefix`` ends in ``self_attn``."""
    batch, tokens, _ = x_BTD.shape

    def project(name: str, heads: int) -> Tensor:
        bias = weights[f"{prefix}.{name}_proj.bias"] if config.shape.qkv_bias else None
        flat = functional.linear(x_BTD, weights[f"{prefix}.{name}_proj.weight"], bias)
        return flat.view(batch, tokens, heads, config.shape.head_dim)

    q, k, v = (
        project("q", config.shape.heads),
        project("k", config.shape.kv_heads),
        project("v", config.shape.kv_heads),
    )
    if config.shape.qk_norm:
        q = rms_norm(q, weights[f"{prefix}.q_norm.weight"], config.eps)
        k = rms_norm(k, weights[f"{prefix}.k_norm.weight"], config.eps)
    q, k = rotate(q, frequencies), rotate(k, frequencies)
    repeat = config.shape.heads // config.shape.kv_heads
    k, v = k.repeat_interleave(repeat, dim=2), v.repeat_interleave(repeat, dim=2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scores = q @ k.transpose(-1, -2) / math.sqrt(config.shape.head_dim)
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(future, -math.inf).softmax(-1) @ v
    return functional.linear(mixed.transpose(1, 2).flatten(2), weights[f"{prefix}.o_proj.weight"])


def mlp(weights: Weights, prefix: str, x_BTD: Tensor) -> Tensor:
    """The gated MLP (SwiGLU) of one layer, (B, T, D); ``prefix`` ends in ``mlp``."""
    gate = functional.linear(x_BTD, weights[f"{prefix}.gate_proj.weight"])
    up = functional.linear(x_BTD, weights[f"{prefix}.up_proj.weight"])
    return functional.linear(functional.silu(gate) * up, weights[f"{prefix}.down_proj.weight"])


def logits(config: DecoderConfig, weights: Weights, tokens_BT: Tensor) -> Tensor:
    """Scores of the next token, (B, T, V), in the dtype of ``weights``; ``tokens_BT`` is int64."""
    frequencies = rotary_frequencies(config)
    x = functional.embedding(tokens_BT, weights["model.embed_tokens.weight"])
    for layer in range(config.shape.layers):
        prefix = f"model.layers.{layer}"
        normed = rms_norm(x, weights[f"{prefix}.input_layernorm.weight"], config.eps)
        x = x + attention(config, weights, f"{prefix}.self_attn", normed, frequencies)
        normed = rms_norm(x, weights[f"{prefix}.post_attention_layernorm.weight"], config.eps)
        x = x + mlp(weights, f"{prefix}.mlp", normed)
    x = rms_norm(x, weights["model.norm.weight"], config.eps)
    head = "model.embed_tokens.weight" if config.shape.tied else "lm_head.weight"
    return functional.linear(x, weights[head])


def loss(config: DecoderConfig, weights: Weights, tokens_BT: Tensor) -> Tensor:
    """Mean next-token cross entropy in nats, 0-dim; the first T - 1 tokens predict the last T - 1."""
    scores = logits(config, weights, tokens_BT[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
