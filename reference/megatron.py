"""The trainer's side of a model, under Megatron's names, where nothing but tensor parallelism cuts it."""

from __future__ import annotations

from weightsync.reference.layouts import Layout, RowMap
from weightsync.reference.modules import Model
from weightsync.reference.parallel import TrainerLayout
from weightsync.reference.params import TPAttributes
from weightsync.reference.tables import Tables

VOCAB_MULTIPLE = 128
"""Megatron's ``make_vocab_size_divisible_by``; the vocabulary is padded to this times the TP size."""


def trainer_layouts(
    model: Model, tp: int, *, vocab_multiple: int = VOCAB_MULTIPLE
) -> dict[str, tuple[Layout, TPAttributes]]:
    """Runtime name -> layout and attributes of every parameter, as Megatron with Transformer Engine has them.

    Equal on all TP ranks. Norms have no ``tensor_model_parallel`` attribute and are declared replicated.
    A tied model has no ``output_layer.weight``. Where Megatron itself cannot cut the heads for ``tp`` ranks, they
    are cut as ``heads.head_share`` says, and the parameters carry ``num_attention_heads`` and
    ``num_query_groups`` beside Megatron's attributes.
    """
    held = Tables(model).trainer(TrainerLayout(tp).at(0, vocab_multiple))
    return {name: (one.layout, one.param.attributes) for name, one in held.items()}


def trainer_maps(
    model: Model, tp_rank: int, tp: int, *, vocab_multiple: int = VOCAB_MULTIPLE
) -> dict[str, RowMap]:
    """Runtime name -> row map of TP rank ``tp_rank`` of ``tp``, in the same order on every rank.

    Raises:
        PlanMismatch: a dimension cannot be cut in ``tp`` parts.
    """
    held = Tables(model).trainer(TrainerLayout(tp).at(tp_rank, vocab_multiple))
    return {name: one.row_map for name, one in held.items()}


def trainer_attributes(model: Model, tp: int) -> dict[str, TPAttributes]:
    """Runtime name -> the attributes to stamp on the live parameter of every TP rank."""
    return {name: attributes for name, (_, attributes) in trainer_layouts(model, tp).items()}
