"""Multi-head latent attention, as DeepSeek-V2 and -V3 have it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from weightsync.reference.families.basic import BF16
from weightsync.reference.heads import HeadCut
from weightsync.reference.layouts import concat, plain
from weightsync.reference.modules import Module, Param, by_heads, everywhere, megatron
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta


@dataclass(frozen=True)
class LatentAttention(Module):
    """Queries and keys/values through low-rank latents; the down projections are whole on every rank.

    With ``q_rank`` a fused rollout has one ``fused_qkv_a_proj``, [q_a; kv_a]; without, a plain ``q_proj``. Megatron
    fuses the latents' norms into the up projections. vLLM derives further tensors from ``kv_b_proj`` after loading;
    those are computed, and no maps.

    Attributes:
        heads: heads.
        q_rank: width of the queries' latent; None for ``q_proj``.
        kv_rank: width of the keys' and values' latent.
        nope: width of a head's part without a rotary embedding.
        rope: width of its rotary part; one such key is shared by all heads.
        value: width of a value head.
    """

    hidden: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    rope: int
    value: int
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """The queries', the keys' and values', the output's."""
        return (*self._queries, *self._keys, self._out)

    @property
    def _queries(self) -> tuple[ParamMeta, ...]:
        rows = self.heads * (self.nope + self.rope)
        if self.q_rank is None:
            return (self._meta("q_proj", rows, self.hidden),)
        return (
            self._meta("q_a_proj", self.q_rank, self.hidden),
            self._meta("q_a_layernorm", self.q_rank),
            self._meta("q_b_proj", rows, self.q_rank),
        )

    @property
    def _keys(self) -> tuple[ParamMeta, ParamMeta, ParamMeta]:
        return (
            self._meta("kv_a_proj_with_mqa", self.kv_rank + self.rope, self.hidden),
            self._meta("kv_a_layernorm", self.kv_rank),
            self._meta("kv_b_proj", self.heads * (self.nope + self.value), self.kv_rank),
        )

    @property
    def _out(self) -> ParamMeta:
        return self._meta("o_proj", self.hidden, self.heads * self.value)

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """``linear_q_proj``, or ``linear_q_down_proj`` and ``linear_q_up_proj``; likewise kv; ``linear_proj``."""
        tp = at.layout.tp
        *latent, query = self._queries
        kv_down, kv_norm, kv_up = self._keys
        downs = [("q", latent[0], latent[1])] if latent else []
        for kind, down, norm in (*downs, ("kv", kv_down, kv_norm)):
            yield everywhere(
                f"linear_{kind}_down_proj.weight", down, parallel_mode="duplicated", sequence_parallel=tp > 1
            )
            yield everywhere(f"linear_{kind}_up_proj.layer_norm_weight", norm, sequence_parallel=tp > 1)
        query_name = "linear_q_up_proj" if latent else "linear_q_proj"
        for name, meta, width in ((query_name, query, self.rope), ("linear_kv_up_proj", kv_up, self.value)):
            cut = self._cut(self.nope + width)
            layout = replace(plain(meta), heads=cut)
            yield Param(f"{name}.weight", layout, megatron(0, **cut.attributes(tp)))
        cut = self._cut(self.value, dim=1)
        layout = replace(plain(self._out), heads=cut)
        yield Param("linear_proj.weight", layout, megatron(1, **cut.attributes(tp)))

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """The down projections, fused if there are two; the norms; the up projections and ``o_proj`` by heads."""
        *latent, query = self._queries
        kv_down, kv_norm, kv_up = self._keys
        if latent and at.layout.fused:
            fused = replace(concat(latent[0], kv_down), replicated=True)
            yield Param("fused_qkv_a_proj.weight", fused, everywhere("", kv_down).attributes)
            whole = [latent[1], kv_norm]
        else:
            whole = [*latent, kv_down, kv_norm]
        for meta in whole:
            yield everywhere(meta.name, meta)
        yield by_heads(query.name, plain(query), self._cut(self.nope + self.rope))
        yield by_heads(kv_up.name, plain(kv_up), self._cut(self.nope + self.value))
        yield by_heads(self._out.name, plain(self._out), self._cut(self.value, dim=1))

    def _meta(self, name: str, *shape: int) -> ParamMeta:
        return ParamMeta(f"{name}.weight", self.dtype, shape)

    def _cut(self, width: int, dim: int = 0) -> HeadCut:
        return HeadCut(self.heads, self.heads, width, dim, "query")
