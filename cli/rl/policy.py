"""The decoder on one tensor-parallel rank: what a learner differentiates and what a rollout samples from.

Shape suffixes: B batch, T tokens, D hidden, H query heads, K key/value heads, E head width, V vocabulary rows of
this rank. Heads and V are this rank's own; every (B, T, D) is the same on all ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.model.decoder import rms_norm, rotary_frequencies, rotate
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.views import Attention, Layer, LocalModel
from weightsync.reference.heads import query_to_kv


@dataclass
class Cache:
    """Keys and values of the tokens so far, per layer (B, K, T, E); grows with each call of ``logits``."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens it holds."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer with the new ones behind; kept."""
        if layer == len(self.layers):
            self.layers.append((k, v))
        else:
            old_k, old_v = self.layers[layer]
            self.layers[layer] = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        return self.layers[layer]


class Policy:
    """A decoder over one rank's weights.

    Args:
        config: the whole model's configuration.
        model: this rank's weights in float32; borrowed, differentiable if they are.
        tp: this rank's group.
    """

    def __init__(self, config: DecoderConfig, model: LocalModel, tp: TensorParallel) -> None:
        self.config = config
        self.model = model
        self.tp = tp
        self._frequencies = rotary_frequencies(config)

    def logits(self, tokens_BT: Tensor, cache: Cache | None = None, last: int | None = None) -> Tensor:
        """This rank's scores of the next token, (B, T, V); minus infinity where a rank has padding, or no row.

        V is the same on all ranks. With a ``cache``, ``tokens_BT`` are those behind what it holds. With ``last``,
        scores behind the last so many tokens only, which takes less memory.
        """
        model, start = self.model, cache.tokens if cache is not None else 0
        x = self._embed(tokens_BT)
        for number, layer in enumerate(model.layers):
            normed = self.tp.enter(rms_norm(x, layer.norms[0], self.config.eps))
            x = x + self.tp.leave(self._attend(number, layer.attention, normed, cache, start))
            normed = self.tp.enter(rms_norm(x, layer.norms[1], self.config.eps))
            x = x + self.tp.leave(_mlp(layer, normed))
        x = x if last is None else x[:, x.shape[1] - last :]
        x = self.tp.enter(rms_norm(x, model.norm, self.config.eps))
        scores = functional.linear(x, model.head[: model.real_rows])
        return functional.pad(scores, (0, max(model.rows) - model.real_rows), value=-math.inf)

    def whole(self, scores_BTV: Tensor) -> Tensor:
        """Scores of the whole vocabulary, without padding, (B, T, vocab), from every rank's; not differentiable."""
        parts = self.tp.all_gather(scores_BTV)
        held = [part[..., :rows] for part, rows in zip(parts, self.model.rows, strict=True)]
        return torch.cat(held, dim=-1)[..., : self.config.shape.vocab]

    def logprobs(self, scores_BTV: Tensor, targets_BT: Tensor) -> Tensor:
        """Log-probabilities in nats, (B, T), the same on all ranks, of ``targets_BT`` under this rank's scores."""
        shifted = self._shifted(scores_BTV)
        normaliser = self.tp.leave(shifted.exp().sum(-1)).log()
        local = targets_BT - self.model.first_token
        mine = (local >= 0) & (local < self.model.real_rows)
        picked = shifted.gather(-1, local.where(mine, 0).unsqueeze(-1)).squeeze(-1)
        return self.tp.leave(picked.where(mine, 0.0)) - normaliser

    def entropy(self, scores_BTV: Tensor) -> Tensor:
        """Entropy in nats, (B, T), the same on all ranks, of the next token under this rank's scores."""
        shifted = self._shifted(scores_BTV)
        weights = shifted.exp()
        possible = shifted.masked_fill(shifted == -math.inf, 0.0)
        total = self.tp.leave(weights.sum(-1))
        return total.log() - self.tp.leave((weights * possible).sum(-1)) / total

    def _shifted(self, scores_BTV: Tensor) -> Tensor:
        """Scores below the highest of any rank, so that no exponential overflows."""
        return scores_BTV - self.tp.max(scores_BTV.amax(-1)).unsqueeze(-1)

    def _embed(self, tokens_BT: Tensor) -> Tensor:
        local = tokens_BT - self.model.first_token
        mine = (local >= 0) & (local < self.model.real_rows)
        table = self.model.embedding if len(self.model.embedding) else self.model.norm[None]
        rows = functional.embedding(local.where(mine, 0), table)
        return self.tp.leave(rows * mine.unsqueeze(-1))

    def _attend(
        self, number: int, weights: Attention, x_BTD: Tensor, cache: Cache | None, start: int
    ) -> Tensor:
        """This rank's heads of causal grouped-query attention: a part of the sum over ranks, (B, T, D)."""
        batch, tokens, _ = x_BTD.shape
        width = self.config.shape.head_dim
        q_bias, k_bias, v_bias = weights.biases or (None, None, None)

        def heads(weight: Tensor, bias: Tensor | None) -> Tensor:
            return functional.linear(x_BTD, weight, bias).view(batch, tokens, -1, width)

        q, k, v = heads(weights.q, q_bias), heads(weights.k, k_bias), heads(weights.v, v_bias)
        if weights.norms is not None:
            q_norm, k_norm = map(self.tp.enter, weights.norms)
            q, k = rms_norm(q, q_norm, self.config.eps), rms_norm(k, k_norm, self.config.eps)
        q, k = rotate(q, self._frequencies, start), rotate(k, self._frequencies, start)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            k, v = cache.extended(number, k, v)
        serving = torch.tensor(query_to_kv(self.model.heads))
        k, v = k.index_select(1, serving), v.index_select(1, serving)
        future = torch.ones(tokens, k.shape[2], dtype=torch.bool).triu(1 + start)
        scores = (q @ k.transpose(-1, -2) / math.sqrt(width)).masked_fill(future, -math.inf)
        return functional.linear((scores.softmax(-1) @ v).transpose(1, 2).flatten(2), weights.out)


def _mlp(layer: Layer, x_BTD: Tensor) -> Tensor:
    gate, up = functional.linear(x_BTD, layer.gate), functional.linear(x_BTD, layer.up)
    return functional.linear(functional.silu(gate) * up, layer.down)
