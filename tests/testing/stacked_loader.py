"""A rollout rank that loads checkpoints as vLLM does: a loader per parameter, shard ids, narrow and copy.

Written for tests, apart from ``weightsync.reference.placement``, and knows no tables: what it does is what its
tensor operations do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view

STACKED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"}
MERGED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


@dataclass(frozen=True)
class Heads:
    """The attention heads of one rank: its query heads, and the key/value heads that they attend to."""

    query: tuple[int, ...]
    kv: tuple[int, ...]

    @classmethod
    def of(cls, model: ModelShape, rank: int, tp: int) -> Heads:
        """Query heads dealt out as evenly as can be."""
        query = torch.arange(model.heads).tensor_split(tp)[rank].tolist()
        return cls(tuple(query), tuple(sorted({head * model.kv_heads // model.heads for head in query})))


class StackedModel:
    """The parameters of one rollout rank, full of poison, and ``load_weights`` for them.

    Args:
        model: sizes.
        rank: tensor-parallel rank.
        tp: ranks of the rollout.
        fused: stack q, k, v and gate, up, and pad the vocabulary.
        vocab_multiple: rows that a padded vocabulary is a multiple of.
        odd_strides: store matrices transposed, and vectors with gaps.
    """

    def __init__(
        self,
        model: ModelShape,
        rank: int,
        tp: int,
        fused: bool,
        *,
        vocab_multiple: int = 64,
        odd_strides: bool = False,
    ) -> None:
        self.model, self.rank, self.tp, self.fused = model, rank, tp, fused
        self.heads = Heads.of(model, rank, tp)
        self._odd = odd_strides
        rows = -(-model.vocab // vocab_multiple) * vocab_multiple if fused else model.vocab
        each = -(-rows // tp)
        self._vocab = range(min(rank * each, rows), min((rank + 1) * each, rows))
        self.params: dict[str, Tensor] = {}
        for meta in model.tensors():
            self._add(meta.name, meta.shape)
        if model.tied:
            self.params[model.head.name] = self.params[model.embedding.name]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load (name, whole checkpoint tensor) pairs in place; the names of the parameters that were loaded."""
        loaded = set()
        for name, tensor in weights:
            runtime, part = self._target(name)
            if name != self.model.head.name or not self.model.tied:
                self._load(self.params[runtime].data, name, part, tensor)
                loaded.add(runtime)
        return loaded

    def _target(self, name: str) -> tuple[str, str]:
        for part, fused in (STACKED | MERGED).items():
            if part in name:
                return (name.replace(part, fused), part) if self.fused else (name, part)
        return name, ""

    def _load(self, param: Tensor, name: str, part: str, tensor: Tensor) -> None:
        size, heads = self.model.head_dim, self.heads
        if part in STACKED:
            held = heads.query if part == "q_proj" else heads.kv
            before = {"q_proj": 0, "k_proj": len(heads.query), "v_proj": len(heads.query) + len(heads.kv)}[
                part
            ]
            offset = before * size if self.fused else 0
            param.narrow(0, offset, len(held) * size).copy_(
                tensor.narrow(0, held[0] * size, len(held) * size)
            )
        elif "o_proj" in name:
            param.copy_(tensor.narrow(1, heads.query[0] * size, len(heads.query) * size))
        elif part in MERGED:
            half = self.model.intermediate // self.tp
            offset = half if self.fused and part == "up_proj" else 0
            param[offset : offset + half] = tensor.narrow(0, self.rank * half, half)
        elif "down_proj" in name:
            param.copy_(tensor.chunk(self.tp, 1)[self.rank])
        elif name in (self.model.embedding.name, self.model.head.name):
            for row, source in enumerate(self._vocab):  # padding is left as it is, or filled with zeros
                param[row] = tensor[source] if source < self.model.vocab else 0
        else:
            param.copy_(tensor)

    def _add(self, name: str, shape: tuple[int, ...]) -> None:
        runtime, part = self._target(name)
        rows, rest = shape[0], shape[1:]
        heads, size = self.heads, self.model.head_dim
        if part in STACKED:
            one = {"q_proj": len(heads.query)}.get(part, len(heads.kv))
            rows = (len(heads.query) + 2 * len(heads.kv) if self.fused else one) * size
        elif part in MERGED:
            rows = rows // self.tp * (2 if self.fused else 1)
        elif name in (self.model.embedding.name, self.model.head.name):
            rows = len(self._vocab)
        elif "o_proj" in name:
            rest = (len(heads.query) * size,)
        elif "down_proj" in name:
            rest = (rest[0] // self.tp,)
        if runtime not in self.params:
            self.params[runtime] = self._poison((rows, *rest))

    def _poison(self, shape: tuple[int, ...]) -> Tensor:
        size = (*shape[::-1],) if len(shape) > 1 else (2 * shape[0],)
        held = torch.empty(size if self._odd else shape, dtype=self.model.dtype)
        int_view(held).fill_(42)
        if not self._odd:
            return held
        return held.t() if len(shape) > 1 else held[::2]


class ExpertModel:
    """Mixture-of-experts parameters as fused kernels want them: ``w13`` (experts, 2 * rows, hidden) with gate and
    up, ``w2`` (experts, rows, hidden) with every down projection transposed; some experts on this rank.
    """

    def __init__(self, experts: Iterable[int], rows: int, hidden: int, dtype: torch.dtype) -> None:
        self.slots = {expert: slot for slot, expert in enumerate(experts)}
        self.rows = rows
        count = len(self.slots)
        self.params = {
            "w13": torch.zeros(count, 2 * rows, hidden, dtype=dtype),
            "w2": torch.zeros(count, rows, hidden, dtype=dtype),
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load ``experts.<number>.<gate_proj | up_proj | down_proj>.weight``."""
        for name, tensor in weights:
            _, number, part, _ = name.split(".")
            slot = self.slots.get(int(number))
            if slot is None:
                continue
            if part == "down_proj":
                self.params["w2"].index_put_((torch.tensor([slot]),), tensor.t()[None])
            else:
                half = 0 if part == "gate_proj" else self.rows
                self.params["w13"].data[slot].narrow(0, half, self.rows).copy_(tensor)


def load_into(params: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    """The plainest loader: a parameter per checkpoint name."""
    for name, tensor in weights:
        params[name].data.copy_(tensor)
