"""Where a checkpoint element lives on a rollout rank: fused names, TP and EP slices, replicated KV, tied names."""

from __future__ import annotations

from weightsync.reference.layouts import RowMap
from weightsync.reference.modules import Model
from weightsync.reference.parallel import RolloutLayout
from weightsync.reference.tables import Tables

VOCAB_MULTIPLE = 64
"""vLLM and SGLang pad the vocabulary to this many rows, whatever the TP size."""


def rollout_maps(
    model: Model,
    tp_rank: int,
    tp: int,
    fused: bool = True,
    *,
    ep: int = 1,
    vocab_multiple: int = VOCAB_MULTIPLE,
) -> dict[str, RowMap]:
    """Runtime name -> row map of rollout TP rank ``tp_rank`` of ``tp``; a tied head is no entry of its own.

    Args:
        model: the family with its sizes.
        tp_rank: which rank.
        tp: ranks of one rollout.
        fused: True for the names and layouts of vLLM and SGLang (``qkv_proj`` = [q_r; k_r; v_r],
            ``gate_up_proj`` = [gate_r; up_r], padded vocabulary); False for the checkpoint's own. Heads are
            cut as ``heads.head_share`` says.
        ep: ranks that share the routed experts out; see ``RolloutLayout``.
        vocab_multiple: rows that the padded vocabulary is a multiple of, with ``fused``.

    Raises:
        PlanMismatch: more ranks than query heads, or a dimension cannot be cut in ``tp`` parts.
    """
    return Tables(model).rollout(RolloutLayout(tp, fused, ep).at(tp_rank, vocab_multiple))


def rollout_aliases(model: Model, fused: bool = True) -> dict[str, str]:
    """Second name -> the name that is updated; both stand for one storage on the rollout."""
    return model.aliases(fused)
