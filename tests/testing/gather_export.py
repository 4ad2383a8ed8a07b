"""A dense export as reinforcement-learning stacks write it: gather every parameter by its attributes, convert by name.

Written for tests, apart from ``weightsync.reference.layouts``, and knows no tables: what it does is what its
tensor operations do. It takes the parameters of all tensor-parallel ranks and gives checkpoint tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.reference.model import ModelShape


@dataclass(frozen=True)
class GatherExport:
    """Called with one mapping per rank; gives pairs of checkpoint name and tensor, by layer."""

    model: ModelShape

    def __call__(self, ranks: Sequence[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Every checkpoint tensor that the given parameters make."""
        for name in ranks[0]:
            yield from self.convert(name, [rank[name] for rank in ranks])

    def convert(self, name: str, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        """What one parameter becomes."""
        model = self.model
        if name == "embedding.word_embeddings.weight":
            yield "model.embed_tokens.weight", gather(name, shards)[: model.vocab]
        elif name == "output_layer.weight":
            yield "lm_head.weight", gather(name, shards)[: model.vocab]
        elif name == "decoder.final_layernorm.weight":
            yield "model.norm.weight", shards[0]
        else:
            found = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            if found is None:
                raise ValueError(f"unknown parameter {name!r}")
            layer, rest = f"model.layers.{found[1]}", found[2]
            for last, tensor in self._layer(rest, name, shards):
                yield f"{layer}.{last}", tensor

    def _layer(self, rest: str, name: str, shards: Sequence[Tensor]) -> Iterator[tuple[str, Tensor]]:
        kind = rest.rsplit(".", 1)[1]
        plain = {
            "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
            "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
            "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
            "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
            "mlp.linear_fc2.weight": "mlp.down_proj.weight",
        }
        if rest in plain:
            yield plain[rest], gather(name, shards)
        elif rest == "self_attention.linear_proj.weight":
            yield "self_attn.o_proj.weight", gather(name, shards)
        elif rest.startswith("self_attention.linear_qkv."):
            uneven = hasattr(shards[0], "num_query_groups")
            split = self._uneven if uneven else self._grouped
            for which, tensor in zip("qkv", split(name, shards), strict=True):
                yield f"self_attn.{which}_proj.{kind}", tensor
        else:
            gate, up = gather(name, shards).chunk(2)
            yield "mlp.gate_proj.weight", gate
            yield "mlp.up_proj.weight", up

    def _grouped(self, name: str, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Per query group its query heads, its key and its value."""
        model, whole = self.model, gather(name, shards)
        size = model.head_dim
        groups = whole.view(model.kv_heads, -1, size, *whole.shape[1:])
        parts = torch.split(groups, [model.heads // model.kv_heads, 1, 1], dim=1)
        return tuple(one.reshape(-1, *whole.shape[1:]) for one in parts)

    def _uneven(self, name: str, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Heads dealt out as evenly as can be; the first rank that has a key or value head is asked for it."""
        model, each = self.model, self.model.heads // self.model.kv_heads
        heads: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
        dealt = torch.arange(model.heads).tensor_split(len(shards))
        for shard, queries in zip(shards, dealt, strict=True):
            blocks = iter(torch.split(shard, model.head_dim))
            for group in sorted({query // each for query in queries.tolist()}):
                heads[0].extend(next(blocks) for query in queries.tolist() if query // each == group)
                for held in heads[1:]:
                    block = next(blocks)
                    if len(held) == group:
                        held.append(block)
        return tuple(torch.cat(one) for one in heads)


def gather(name: str, shards: Sequence[Tensor]) -> Tensor:
    """One whole parameter, by the attributes that the shards carry; gated first layers are told by name."""
    first = shards[0]
    if not getattr(first, "tensor_model_parallel", False) or len(shards) == 1:
        return first
    if "linear_fc1" in name:
        halves = [shard.chunk(2) for shard in shards]
        return torch.cat([half[part] for part in (0, 1) for half in halves])
    return torch.cat(list(shards), dim=first.partition_dim)  # type: ignore[attr-defined]


def norms(names: Sequence[str]) -> list[str]:
    """The parameters that every rank holds whole."""
    return [name for name in names if "norm" in name]


def padded(names: Sequence[str]) -> list[str]:
    """The parameters with padding, or with heads that several ranks hold."""
    return [name for name in names if "linear_qkv" in name or "word_embeddings" in name or "output" in name]
