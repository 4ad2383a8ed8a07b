"""Where a checkpoint element lives on a rollout rank: fused names, TP slices, replicated KV, tied names."""

from __future__ import annotations

from weightsync.reference.heads import HeadCut, HeadOrder
from weightsync.reference.layouts import Layout, RowMap, concat, cut, gate_up, plain, row_map, vocab
from weightsync.reference.model import ModelShape, padded_vocab, prefix
from weightsync.reference.params import ParamMeta, TPAttributes

VOCAB_MULTIPLE = 64
"""vLLM and SGLang pad the vocabulary to this many rows, whatever the TP size."""


def rollout_maps(
    model: ModelShape, tp_rank: int, tp: int, fused: bool = True, *, vocab_multiple: int = VOCAB_MULTIPLE
) -> dict[str, RowMap]:
    """Runtime name -> row map of rollout TP rank ``tp_rank`` of ``tp``; a tied head is no entry of its own.

    Args:
        model: the checkpoint's shape.
        tp_rank: which rank.
        tp: ranks of one rollout.
        fused: True for the names and layouts of vLLM and SGLang (``qkv_proj`` = [q_r; k_r; v_r],
            ``gate_up_proj`` = [gate_r; up_r], padded vocabulary); False for the checkpoint's own. Heads are
            cut as ``heads.head_share`` says.
        vocab_multiple: rows that the padded vocabulary is a multiple of, with ``fused``.

    Raises:
        PlanMismatch: more ranks than query heads, or the MLP cannot be cut in ``tp`` parts.
    """
    rank = _Rank(model, tp_rank, tp, padded_vocab(model.vocab, vocab_multiple) if fused else model.vocab)
    rank.vocabulary(model.embedding)
    for layer in range(model.layers):
        gate, up, down = model.mlp(layer)
        for meta in (*model.norms(layer), *model.head_norms(layer)):
            rank.replicated(meta)
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            rank.attention(f"{prefix(layer)}.self_attn.qkv_proj.{kind}", model.attention(layer, kind), fused)
        rank.attention_out(model.attention_out(layer))
        if fused:
            rank.merged(f"{prefix(layer)}.mlp.gate_up_proj.weight", gate, up)
        else:
            rank.column_parallel(gate)
            rank.column_parallel(up)
        rank.row_parallel(down)
    rank.replicated(model.final_norm)
    if not model.tied:
        rank.vocabulary(model.head)
    return rank.maps


def rollout_aliases(model: ModelShape) -> dict[str, str]:
    """Second name -> the name that is updated; both stand for one storage on the rollout."""
    return {model.head.name: model.embedding.name} if model.tied else {}


class _Rank:
    """The maps of one rollout rank while they are collected."""

    def __init__(self, model: ModelShape, rank: int, tp: int, padded: int) -> None:
        self.maps: dict[str, RowMap] = {}
        self._model, self._rank, self._tp, self._padded = model, rank, tp, padded
        self._numbers = model.numbers()

    def vocabulary(self, meta: ParamMeta) -> None:
        self.maps[meta.name] = row_map(
            vocab(meta, self._padded), meta.name, _cut(0), self._rank, self._tp, self._numbers
        )

    def replicated(self, meta: ParamMeta) -> None:
        self.maps[meta.name] = cut(plain(meta), meta.name, self._numbers, owned=self._rank == 0)

    def column_parallel(self, meta: ParamMeta) -> None:
        self.maps[meta.name] = row_map(plain(meta), meta.name, _cut(0), self._rank, self._tp, self._numbers)

    def row_parallel(self, meta: ParamMeta) -> None:
        self.maps[meta.name] = row_map(plain(meta), meta.name, _cut(1), self._rank, self._tp, self._numbers)

    def merged(self, name: str, gate: ParamMeta, up: ParamMeta) -> None:
        self.maps[name] = row_map(gate_up(gate, up), name, _cut(0, 2), self._rank, self._tp, self._numbers)

    def attention(self, name: str, parts: tuple[ParamMeta, ParamMeta, ParamMeta], fused: bool) -> None:
        """q, k and v, each cut by its own heads: stacked under ``name``, or under their own names."""
        if fused:
            self._by_heads(name, concat(*parts), "stacked")
            return
        orders: tuple[HeadOrder, ...] = ("query", "kv", "kv")
        for meta, order in zip(parts, orders, strict=True):
            self._by_heads(meta.name, plain(meta), order)

    def attention_out(self, meta: ParamMeta) -> None:
        """The columns of the query heads that the rank holds."""
        self._by_heads(meta.name, plain(meta), "query", dim=1)

    def _by_heads(self, name: str, layout: Layout, order: HeadOrder, dim: int = 0) -> None:
        held = HeadCut.of(self._model, order, dim).held(self._rank, self._tp)
        self.maps[name] = cut(layout, name, self._numbers, dim=dim, held=held)


def _cut(dim: int, stride: int = 1) -> TPAttributes:
    return TPAttributes({"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride})
