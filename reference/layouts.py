"""Where an element of a runtime parameter lives in the Hugging Face checkpoint: one mechanism for both sides.

A runtime parameter is seen as rows. A ``Layout`` says which checkpoint row each row of the whole, uncut
parameter is; a cut picks the rows and columns that one rank holds; the result is a ``RowMap``, a table.
Trainer and rollout differ only in their layouts and cuts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.heads import HeadCut
from weightsync.reference.params import ParamMeta, TPAttributes, read, require
from weightsync.reference.rowcut import Held, cut_rows
from weightsync.reference.rowmap import RowMap, export, local_tensor, rows_and_width
from weightsync.reference.shards import Interval, Part, segments

__all__ = [
    "Layout",
    "RowMap",
    "concat",
    "cut",
    "cut_part",
    "export",
    "gate_up",
    "local_tensor",
    "plain",
    "qkv",
    "row_map",
    "row_maps",
    "vocab",
]


@dataclass(frozen=True, eq=False)
class Layout:
    """How one whole runtime parameter is made of checkpoint tensors, before any cut.

    Attributes:
        metas: the checkpoint tensors it feeds; of one dtype, with rows of one width.
        shape: the shape of the whole parameter, seen as F rows of its last dimension.
        tensor: (F,) int32, index into ``metas`` of each row; -1 for a row that never travels.
        row: (F,) int64, the row inside that tensor.
        replicated: declares that every rank holds all of it by design: missing attributes are no error.
        heads: how the dimension that is cut is made of attention heads, where it is.
    """

    metas: tuple[ParamMeta, ...]
    shape: tuple[int, ...]
    tensor: Tensor
    row: Tensor
    replicated: bool = False
    heads: HeadCut | None = None

    def __post_init__(self) -> None:
        first = self.metas[0]
        for meta in self.metas[1:]:
            if (meta.dtype, rows_and_width(meta.shape)[1]) != (first.dtype, rows_and_width(first.shape)[1]):
                raise _unfusable(meta, first, "one dtype and rows of one width")


def plain(meta: ParamMeta, *, replicated: bool = False) -> Layout:
    """The checkpoint tensor itself; ``replicated`` for norms, row-parallel biases, vision towers."""
    row = torch.arange(rows_and_width(meta.shape)[0])
    return Layout((meta,), meta.shape, torch.zeros_like(row, dtype=torch.int32), row, replicated)


def concat(*metas: ParamMeta, dim: int = 0) -> Layout:
    """Checkpoint tensors one after the other along a dimension, such as a rollout's [q; k; v].

    Any dimension but the last of several, which is no whole rows: grouped experts of shape (experts, ffn,
    hidden) fuse their gate and up along dimension 1.

    Raises:
        PlanMismatch: dtypes differ, or shapes in another dimension, or it is no such dimension.
    """
    first = metas[0]
    last = max(len(first.shape) - 1, min(len(first.shape), 1))
    if not 0 <= dim < last:
        raise PlanMismatch(
            f"{first.name!r} {list(first.shape)} is to be fused along dimension {dim}, expected 0 to "
            f"{last - 1}; correct the layout table"
        )
    for meta in metas[1:]:
        others = (meta.dtype, len(meta.shape), meta.shape[:dim], meta.shape[dim + 1 :])
        if others != (first.dtype, len(first.shape), first.shape[:dim], first.shape[dim + 1 :]):
            raise _unfusable(meta, first, f"one dtype and equal shapes but for dimension {dim}")
    counts = [rows_and_width(meta.shape)[0] for meta in metas]
    sides = [meta.shape[:last] for meta in metas]
    tensor = [torch.full(side, number, dtype=torch.int32) for number, side in enumerate(sides)]
    row = [torch.arange(count).reshape(side) for count, side in zip(counts, sides, strict=True)]
    length = sum(meta.shape[dim] for meta in metas)
    return Layout(
        metas=metas,
        shape=(*first.shape[:dim], length, *first.shape[dim + 1 :]),
        tensor=torch.cat(tensor, dim).reshape(-1),
        row=torch.cat(row, dim).reshape(-1),
    )


def gate_up(gate: ParamMeta, up: ParamMeta) -> Layout:
    """[gate; up]. A rank's shard is [gate_r; up_r], which is what ``partition_stride`` 2 cuts."""
    return concat(gate, up)


def qkv(q: ParamMeta, k: ParamMeta, v: ParamMeta, *, heads: int, groups: int, head_dim: int) -> Layout:
    """Megatron's fused attention input: per query group its query heads, then one key and one value head.

    Args:
        q: ``heads`` * ``head_dim`` rows; weights (rows, hidden) and biases (rows,) alike.
        k: ``groups`` * ``head_dim`` rows.
        v: as ``k``.
        heads: query heads.
        groups: query groups, that is key/value heads.
        head_dim: rows of one head.

    Raises:
        PlanMismatch: the heads do not divide in groups, or a tensor has another number of rows.
    """
    if groups < 1 or heads % groups:
        raise PlanMismatch(
            f"{q.name!r} has {heads} query heads in {groups} groups, expected a whole number of heads per "
            "group; correct the head counts"
        )
    for meta, count in ((q, heads), (k, groups), (v, groups)):
        if meta.shape[:1] != (count * head_dim,):
            raise PlanMismatch(
                f"{meta.name!r} has shape {list(meta.shape)}, expected {count} heads of {head_dim} rows; "
                "correct the head counts or the shape"
            )
    stacked = concat(q, k, v)
    parts = torch.split(torch.arange(stacked.shape[0]), [meta.shape[0] for meta in stacked.metas])
    order = torch.cat([part.reshape(groups, -1) for part in parts], dim=1).reshape(-1)
    return replace(stacked, tensor=stacked.tensor[order], row=stacked.row[order])


def vocab(meta: ParamMeta, padded_rows: int) -> Layout:
    """A vocabulary matrix with rows of padding behind the real ones; padding never travels.

    Raises:
        PlanMismatch: ``padded_rows`` is smaller than the vocabulary.
    """
    if padded_rows < meta.shape[0]:
        raise PlanMismatch(
            f"{meta.name!r} is padded to {padded_rows} rows, expected at least its own {meta.shape[0]}; "
            "correct the padded vocabulary size"
        )
    shape = (padded_rows, *meta.shape[1:])
    row = torch.arange(rows_and_width(shape)[0])
    real = row < rows_and_width(meta.shape)[0]
    return Layout((meta,), shape, torch.where(real, 0, -1).to(torch.int32), row.where(real, 0))


def row_map(
    layout: Layout, name: str, attrs: TPAttributes, rank: int, world: int, numbers: Mapping[str, int]
) -> RowMap:
    """The rows that TP ``rank`` of ``world`` holds of runtime parameter ``name``, cut as its attributes say.

    A parameter that is not sharded is held whole by every rank and spoken for by rank 0. One whose attributes
    give head counts is cut by whole heads; key/value heads that several ranks hold have one speaker.

    ``attrs`` are the parameter's own attributes, as ``params.read`` gave them; ``numbers`` is checkpoint
    tensor name -> its number in the plan.

    Raises:
        MissingTPAttributes: several ranks, no attributes, and not declared replicated; or no head counts
            where equal parts are not the cut.
        PlanMismatch: the dimension cannot be cut that way, ``numbers`` lacks a checkpoint tensor, or the
            parameter is declared replicated and marked as sharded.
    """
    if world > 1 and layout.replicated and attrs.sharded:
        raise PlanMismatch(
            f"parameter {name!r} is declared replicated, but its attributes say it is cut along dimension "
            f"{attrs.partition_dim}; correct the layout table or the attributes"
        )
    if world > 1 and not layout.replicated and "tensor_model_parallel" not in attrs.values:
        raise MissingTPAttributes(
            f"parameter {name!r} of full shape {list(layout.shape)} carries no tensor_model_parallel "
            f"attribute, so nobody can tell what each of {world} ranks holds; carry the attributes from "
            "the live parameter, or declare it replicated in the layout table"
        )
    if layout.replicated or not attrs.sharded:
        return cut(layout, name, numbers, owned=rank == 0)
    dim = attrs.partition_dim
    if not 0 <= dim < len(layout.shape):
        raise MissingTPAttributes(
            f"parameter {name!r} of full shape {list(layout.shape)} is tensor-parallel with partition_dim "
            f"{dim}, expected 0 to {len(layout.shape) - 1}; carry the attributes from the live parameter"
        )
    if layout.heads is not None and layout.heads.declared(name, attrs, world):
        return cut(layout, name, numbers, dim=dim, held=layout.heads.held(rank, world))
    if layout.heads is None and {"num_attention_heads", "num_query_groups"} & attrs.values.keys():
        raise PlanMismatch(
            f"parameter {name!r} carries head counts, but its layout knows no heads; correct the layout table "
            "or the attributes"
        )
    try:
        held = segments(
            layout.shape[dim], world, rank, stride=attrs.partition_stride, sizes=attrs.partition_sizes
        )
    except PlanMismatch as error:
        raise PlanMismatch(f"parameter {name!r}: {error}") from error
    return cut(layout, name, numbers, dim=dim, held=[(interval, True) for interval in held])


def row_maps(
    layouts: Mapping[str, Layout],
    params: Mapping[str, Tensor],
    rank: int,
    world: int,
    numbers: Mapping[str, int],
) -> dict[str, RowMap]:
    """Runtime name -> row map, from a trainer rank's live parameters and the attributes that they carry.

    In the order of ``layouts``, which is to be the same on every rank. Reads no weights.

    Raises:
        MissingTPAttributes: a parameter that is not declared replicated does not say how it is cut.
        PlanMismatch: names or shapes of ``params`` and ``layouts`` disagree, or as in ``row_map``.
    """
    for name in (*layouts, *params):
        if name not in params or name not in layouts:
            missing = "no live tensor" if name not in params else "no layout"
            raise PlanMismatch(f"parameter {name!r} has {missing}, expected both; add it or leave it out")
    maps = {}
    for name, layout in layouts.items():
        attributes = read(params[name])
        if world > 1 and not layout.replicated:
            attributes = require(params[name], name, full_shape=layout.shape)
        maps[name] = row_map(layout, name, attributes, rank, world, numbers)
        if tuple(params[name].shape) != maps[name].local_shape:
            raise PlanMismatch(
                f"parameter {name!r} has shape {list(params[name].shape)} on rank {rank}, expected "
                f"{list(maps[name].local_shape)} as part of {list(layout.shape)}; correct the attributes, "
                "the layout table or the tensor-parallel size"
            )
    return maps


def cut(
    layout: Layout,
    name: str,
    numbers: Mapping[str, int],
    *,
    dim: int | None = None,
    held: Sequence[tuple[Interval, bool]] = (),
    owned: bool = True,
) -> RowMap:
    """The map of a rank that holds the intervals ``held`` of dimension ``dim``, or everything without it.

    ``held`` are intervals of the full dimension in local order, each with whether this rank speaks for it;
    ``owned`` says whether it speaks for the parameter at all. Replicas do not. ``numbers``: see ``row_map``.

    Raises:
        PlanMismatch: ``numbers`` lacks a checkpoint tensor.
    """
    everything: list[Held] = [[((0, length), True)] for length in layout.shape]
    if dim is not None:
        everything[dim] = held
    return cut_rows(layout, name, numbers, everything, owned)


def cut_part(
    layout: Layout, name: str, numbers: Mapping[str, int], part: Part, *, owned: bool = True
) -> RowMap:
    """The map of a rank that holds ``part``: uneven or nested cuts, of any dimensions, as ``Part.cut`` makes.

    ``owned`` says whether the rank speaks for what it holds; of several that hold the same, one does.

    Raises:
        PlanMismatch: ``part`` is one of another full shape, or ``numbers`` lacks a checkpoint tensor.
    """
    if part.shape != layout.shape:
        raise PlanMismatch(
            f"parameter {name!r} of full shape {list(layout.shape)} is cut as one of {list(part.shape)}, "
            "expected equal shapes; cut Part.whole of the layout's shape"
        )
    held = [[(interval, True) for interval in intervals] for intervals in part.held]
    return cut_rows(layout, name, numbers, held, owned)


def _unfusable(meta: ParamMeta, first: ParamMeta, expected: str) -> PlanMismatch:
    return PlanMismatch(
        f"{meta.name!r} {meta.dtype} {list(meta.shape)} cannot be fused with {first.name!r} {first.dtype} "
        f"{list(first.shape)}, expected {expected}; correct the layout table"
    )
