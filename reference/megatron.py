"""The trainer's side: Megatron's runtime parameters of a ModelShape, their attributes, and their row maps."""

from __future__ import annotations

from dataclasses import replace

from weightsync.reference.heads import HeadCut
from weightsync.reference.layouts import Layout, RowMap, gate_up, plain, qkv, row_map, vocab
from weightsync.reference.model import ModelShape, padded_vocab
from weightsync.reference.params import TPAttributes

VOCAB_MULTIPLE = 128
"""Megatron's ``make_vocab_size_divisible_by``; the vocabulary is padded to this times the TP size."""


def trainer_layouts(
    model: ModelShape, tp: int, *, vocab_multiple: int = VOCAB_MULTIPLE
) -> dict[str, tuple[Layout, TPAttributes]]:
    """Runtime name -> layout and attributes of every parameter, as Megatron with Transformer Engine has them.

    Equal on all TP ranks. Norms have no ``tensor_model_parallel`` attribute and are declared replicated.
    A tied model has no ``output_layer.weight``. Where Megatron itself cannot cut the heads for ``tp`` ranks, they
    are cut as ``heads.head_share`` says, and the parameters carry ``num_attention_heads`` and
    ``num_query_groups`` beside Megatron's attributes.
    """
    padded = padded_vocab(model.vocab, vocab_multiple * tp)
    norm = TPAttributes({"sequence_parallel": tp > 1})
    table = {
        "embedding.word_embeddings.weight": (
            vocab(model.embedding, padded),
            _cut(0, is_embedding_or_output_parameter=True, is_embedding_parameter=True),
        )
    }
    for layer in range(model.layers):
        start = f"decoder.layers.{layer}"
        attention, mlp = f"{start}.self_attention", f"{start}.mlp"
        before_attention, before_mlp = (plain(meta, replicated=True) for meta in model.norms(layer))
        gate, up, down = model.mlp(layer)
        table[f"{attention}.linear_qkv.layer_norm_weight"] = (before_attention, norm)
        for kind in ("weight", "bias") if model.qkv_bias else ("weight",):
            table[f"{attention}.linear_qkv.{kind}"] = _attention(model, layer, kind, tp)
        for which, meta in zip("qk", model.head_norms(layer), strict=False):
            table[f"{attention}.{which}_layernorm.weight"] = (plain(meta, replicated=True), norm)
        table[f"{attention}.linear_proj.weight"] = _attention_out(model, layer, tp)
        table[f"{mlp}.linear_fc1.layer_norm_weight"] = (before_mlp, norm)
        table[f"{mlp}.linear_fc1.weight"] = (gate_up(gate, up), _cut(0, partition_stride=2))
        table[f"{mlp}.linear_fc2.weight"] = (plain(down), _cut(1))
    table["decoder.final_layernorm.weight"] = (plain(model.final_norm, replicated=True), norm)
    if not model.tied:
        table["output_layer.weight"] = (
            vocab(model.head, padded),
            _cut(0, is_embedding_or_output_parameter=True),
        )
    return table


def trainer_maps(
    model: ModelShape, tp_rank: int, tp: int, *, vocab_multiple: int = VOCAB_MULTIPLE
) -> dict[str, RowMap]:
    """Runtime name -> row map of TP rank ``tp_rank`` of ``tp``, in the same order on every rank.

    Raises:
        PlanMismatch: a dimension cannot be cut in ``tp`` parts.
    """
    table = trainer_layouts(model, tp, vocab_multiple=vocab_multiple)
    numbers = model.numbers()
    return {
        name: row_map(layout, name, attributes, tp_rank, tp, numbers)
        for name, (layout, attributes) in table.items()
    }


def trainer_attributes(model: ModelShape, tp: int) -> dict[str, TPAttributes]:
    """Runtime name -> the attributes to stamp on the live parameter of every TP rank."""
    return {name: attributes for name, (_, attributes) in trainer_layouts(model, tp).items()}


def _attention(model: ModelShape, layer: int, kind: str, tp: int) -> tuple[Layout, TPAttributes]:
    """Per key/value head of a rank: the rank's query heads of that group, the key, the value."""
    q, k, v = model.attention(layer, kind)
    cut = HeadCut.of(model, "grouped")
    layout = qkv(q, k, v, heads=model.heads, groups=model.kv_heads, head_dim=model.head_dim)
    layout, counts = replace(layout, heads=cut), cut.attributes(tp)
    if counts:  # uneven groups have no common split to tell
        return layout, _cut(0, is_qkv=True, **counts)
    query_rows = model.heads // model.kv_heads * model.head_dim
    return layout, _cut(0, is_qkv=True, qkv_split_shapes=[query_rows, model.head_dim, model.head_dim])


def _attention_out(model: ModelShape, layer: int, tp: int) -> tuple[Layout, TPAttributes]:
    """The columns of a rank are those of its query heads."""
    cut = HeadCut.of(model, "query", dim=1)
    return replace(plain(model.attention_out(layer)), heads=cut), _cut(1, **cut.attributes(tp))


def _cut(dim: int, *, partition_stride: int = 1, **others: object) -> TPAttributes:
    """What Megatron stamps on a column-parallel (dim 0) or row-parallel (dim 1) parameter."""
    return TPAttributes(
        {
            "tensor_model_parallel": True,
            "partition_dim": dim,
            "partition_stride": partition_stride,
            "parallel_mode": "row" if dim else "column",
            "allreduce": True,
            **others,
        }
    )
