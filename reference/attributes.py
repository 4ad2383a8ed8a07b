"""Every tensor-parallel attribute that Megatron and Transformer Engine put on a parameter, in one table.

Facts only: what each attribute means, who sets it, who reads it, and what a reader takes a missing one for.
``weightsync.reference.params`` reads, carries and compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class Attribute:
    """One attribute.

    Attributes:
        name: letter for letter as upstream spells it.
        default: what its readers take a tensor without it for. Nobody here stores a default on a tensor, but
            ``params.backfill``.
        meaning: what a value says about the tensor.
        set_by: who puts it on the live parameter.
        read_by: who acts on it, and so goes wrong silently when a copy lost it.
        cut: True when it tells how the tensor is cut; a gathered tensor must not carry it.
        backfilled: True for a member of Megatron's own table of defaults, which its helper stores on tensors.
        reference: True for a process group. It is carried as the same object, since a group has no copy.
    """

    name: str
    default: Any
    meaning: str
    set_by: str
    read_by: str
    cut: bool = False
    backfilled: bool = False
    reference: bool = False


ATTRIBUTES = (
    Attribute(
        "tensor_model_parallel",
        False,
        "this tensor is one shard, another one on every TP rank",
        "column and row linears, vocabulary embedding; Transformer Engine",
        "gradient norm, zero count, fp32 masters, resharding, every gather",
        cut=True,
        backfilled=True,
    ),
    Attribute(
        "partition_dim",
        -1,
        "the dimension that is cut",
        "as tensor_model_parallel",
        "every gather, resharding, distributed checkpoints",
        cut=True,
        backfilled=True,
    ),
    Attribute(
        "partition_stride",
        1,
        "interleaved blocks of a rank along partition_dim; 2 for a gated first linear",
        "as tensor_model_parallel",
        "every gather, resharding",
        cut=True,
        backfilled=True,
    ),
    Attribute(
        "partition_sizes",
        None,
        "local sizes of packed blocks that are each cut on their own",
        "Mamba and gated delta mixers",
        "resharding, every gather",
        cut=True,
    ),
    Attribute(
        "parallel_mode",
        None,
        "'column', 'row' or 'duplicated'; duplicated is never gathered, whatever the flag says",
        "Transformer Engine's linears",
        "every gather",
        cut=True,
    ),
    Attribute(
        "allreduce",
        True,
        "False for an expert parameter: its ranks are those of the expert topology",
        "column and row linears, grouped experts",
        "gradient norm, gradient buckets, resharding, optimizer groups",
    ),
    Attribute(
        "sequence_parallel",
        False,
        "replicated, with gradients that are parts of a sum over the TP ranks",
        "norms, biases of row linears, duplicated linears",
        "reduction of gradients outside tensor parallelism (SUM)",
    ),
    Attribute(
        "average_gradients_across_tp_domain",
        False,
        "replicated, with gradients to be averaged over the TP ranks",
        "duplicated helper linears, wrapped Hugging Face modules",
        "reduction of gradients outside tensor parallelism (AVG)",
    ),
    Attribute(
        "shared",
        False,
        "the second copy of a tied embedding, on the last pipeline stage",
        "language module, embedding",
        "gradient norm and zero count, which leave it out",
    ),
    Attribute(
        "shared_embedding",
        False,
        "either copy of a tied embedding",
        "language module",
        "gradient buckets, reduction over first and last stage",
    ),
    Attribute(
        "grad_norm_group",
        None,
        "name of a group of parameters that is clipped by a norm of its own",
        "heads that predict further tokens",
        "gradient norm, fp32 masters",
    ),
    Attribute(
        "expert_tp",
        False,
        "an expert parameter cut over the expert TP group",
        "optimizers that orthogonalise",
        "the same optimizers",
        backfilled=True,
    ),
    Attribute(
        "is_qkv",
        False,
        "a fused query-key-value weight",
        "optimizers that orthogonalise, attention",
        "the same optimizers",
        backfilled=True,
    ),
    Attribute(
        "qkv_split_shapes",
        None,
        "rows of query, key and value of one group",
        "attention",
        "optimizers that orthogonalise",
        backfilled=True,
    ),
    Attribute(
        "is_embedding_or_output_parameter",
        False,
        "embedding or output matrix, with a learning rate or precision of its own",
        "language module",
        "optimizer groups",
    ),
    Attribute(
        "is_embedding_parameter",
        False,
        "embedding matrix alone",
        "language module",
        "optimizer groups",
    ),
    Attribute(
        "is_gtp_weight_remat",
        False,
        "a TP shard cut once more, along dimension 0, over a GTP group that gathers it before use",
        "GTP's wrapper of linears",
        "optimizers, checkpoints, every gather",
        cut=True,
    ),
    Attribute(
        "pad_length",
        0,
        "rows that pad the TP shard so that the GTP group divides it",
        "GTP's wrapper of linears",
        "checkpoints, every gather",
        cut=True,
    ),
    Attribute(
        "group",
        None,
        "the GTP group itself",
        "GTP's wrapper of linears",
        "every gather",
        cut=True,
        reference=True,
    ),
    Attribute(
        "gtp_replica_group",
        None,
        "the ranks that hold the same GTP shard",
        "GTP's wrapper of linears",
        "checkpoints, optimizers",
        cut=True,
        reference=True,
    ),
    Attribute(
        "num_attention_heads",
        None,
        "ours: query heads of the whole model, for heads that TP does not divide",
        "weightsync.reference.megatron",
        "weightsync.reference.heads",
        cut=True,
    ),
    Attribute(
        "num_query_groups",
        None,
        "ours: key/value heads of the whole model, for heads that TP does not divide",
        "weightsync.reference.megatron",
        "weightsync.reference.heads",
        cut=True,
    ),
)
"""All attributes that a copy carries, in the order in which they are reported."""

TP_ATTRIBUTES = tuple(attribute.name for attribute in ATTRIBUTES)
"""Their names."""

BY_NAME: Mapping[str, Attribute] = MappingProxyType({attribute.name: attribute for attribute in ATTRIBUTES})
"""Name -> attribute."""

HANDLES: Mapping[str, str] = MappingProxyType(
    {
        "main_param": "the fp32 master: a copy would keep it alive, and writing through it would train the model",
        "main_param_sharded": "says how main_param is held, so it means nothing without it",
        "main_grad": "the live gradient buffer: a copy would keep it alive and could be added to",
        "decoupled_grad": "the gradient of this step, stale after it",
        "grad_added_to_main_grad": "whether this step's gradient is in main_grad already",
        "zero_out_wgrad": "how this step's gradient is made for two users of one weight",
        "skip_backward_post_hook": "whether a hook of the live parameter runs",
    }
)
"""Attributes of the live parameter alone -> why no copy may carry them."""
