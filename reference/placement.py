"""Where a checkpoint element lives on a rollout rank: fused names, TP slices, replicated KV, tied names."""

from __future__ import annotations

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import RowMap, concat, cut, gate_up, plain, row_map, vocab
from weightsync.reference.model import ModelShape, padded_vocab, prefix
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.shards import Interval

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
            ``gate_up_proj`` = [gate_r; up_r], padded vocabulary); False for the checkpoint's own.
        vocab_multiple: rows that the padded vocabulary is a multiple of, with ``fused``.

    Raises:
        PlanMismatch: the heads or the MLP cannot be cut in ``tp`` parts.
    """
    rank = _Rank(model, tp_rank, tp, padded_vocab(model.vocab, vocab_multiple) if fused else model.vocab)
    rank.vocabulary(model.embedding)
    for layer in range(model.layers):
        gate, up, down = model.mlp(layer)
        for meta in (*model.norms(layer), *model.head_norms(layer)):
            rank.replicated(meta)
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            rank.attention(f"{prefix(layer)}.self_attn.qkv_proj.{kind}", model.attention(layer, kind), fused)
        rank.row_parallel(model.attention_out(layer))
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


def head_cut(heads: int, head_dim: int, rank: int, world: int) -> tuple[Interval, bool]:
    """The rows of whole heads that ``rank`` of ``world`` holds, and whether it speaks for them.

    With fewer heads than ranks each head is held by ``world // heads`` neighbours, and the first one speaks.

    Raises:
        PlanMismatch: neither count divides the other.
    """
    if heads % world and world % heads:
        raise PlanMismatch(
            f"{heads} heads cannot be cut for {world} rollout ranks, expected one count to divide the other; "
            "choose another tensor-parallel size"
        )
    each, replicas = max(heads // world, 1), max(world // heads, 1)
    first = rank // replicas * each
    return (first * head_dim, (first + each) * head_dim), rank % replicas == 0


class _Rank:
    """The maps of one rollout rank while they are collected."""

    def __init__(self, model: ModelShape, rank: int, tp: int, padded: int) -> None:
        if model.heads % tp:
            raise PlanMismatch(
                f"{model.heads} query heads cannot be cut for {tp} rollout ranks, expected a divisor; "
                "choose another tensor-parallel size"
            )
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
        counts = (self._model.heads, self._model.kv_heads, self._model.kv_heads)
        held = [head_cut(heads, self._model.head_dim, self._rank, self._tp) for heads in counts]
        if not fused:
            for meta, one in zip(parts, held, strict=True):
                self.maps[meta.name] = cut(plain(meta), meta.name, self._numbers, dim=0, held=[one])
            return
        starts = (0, parts[0].shape[0], parts[0].shape[0] + parts[1].shape[0])
        shifted = [
            ((begin + start, end + start), speaks)
            for start, ((begin, end), speaks) in zip(starts, held, strict=True)
        ]
        self.maps[name] = cut(concat(*parts), name, self._numbers, dim=0, held=shifted)


def _cut(dim: int, stride: int = 1) -> TPAttributes:
    return TPAttributes({"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride})
