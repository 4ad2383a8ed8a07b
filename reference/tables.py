"""From a model's modules to the row maps of one rank; equal tables are made once and shared."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import Layout, row_map
from weightsync.reference.modules import Model, Module, Param, Placed
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta, TPAttributes, read, require
from weightsync.reference.rowmap import RowMap

_CUT = ("tensor_model_parallel", "partition_dim", "partition_stride", "partition_sizes")
_HEADS = ("num_attention_heads", "num_query_groups")


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """One parameter of one rank.

    Attributes:
        param: its layout and attributes, with names inside its module.
        prefix: what stands in front of the names of its checkpoint tensors.
        row_map: its map.
    """

    param: Param
    prefix: str
    row_map: RowMap

    @property
    def layout(self) -> Layout:
        """Its layout, with the checkpoint's names."""
        metas = self.param.layout.metas
        renamed = tuple(ParamMeta(self.prefix + meta.name, meta.dtype, meta.shape) for meta in metas)
        return replace(self.param.layout, metas=renamed)


class Tables:
    """The parameters of every rank of one side of a model, rank by rank; tables are kept and shared.

    Args:
        model: the family with its sizes.
    """

    def __init__(self, model: Model) -> None:
        self._modules = model.modules()
        self._layers = model.layers
        self._numbers = model.numbers()
        self._made: dict[tuple[object, ...], tuple[Param, RowMap]] = {}

    def trainer(self, at: TrainerRank) -> dict[str, Held]:
        """Runtime name -> what a trainer rank holds, in the order of the modules.

        Raises:
            PlanMismatch: the model cannot be cut or shared out like that.
        """
        before = sum(at.layout.layers(self._layers)[: at.stage])
        layers = range(before, before + at.layout.layers(self._layers)[at.stage])
        firsts = {placed.checkpoint: placed for placed in self._modules if placed.copy is None}

        def held(placed: Placed) -> int | None:
            """The layer's number on this stage, or 0; None where this stage does not hold it."""
            if placed.stage == "first":
                return 0 if at.stage == 0 else None
            if placed.stage == "last":
                return 0 if at.stage == at.layout.pp - 1 else None
            return placed.stage - before if placed.stage in layers else None

        places = [
            (placed, layer)
            for placed in self._modules
            if (layer := held(placed)) is not None
            and (placed.copy is None or held(firsts[placed.copy]) is None)
        ]
        params: dict[int, list[Param]] = {}
        found: dict[str, Held] = {}
        for placed, layer in places:
            prefix = placed.trainer.replace("{layer}", str(layer))
            for param in _once(params, placed.module, lambda module: module.trainer(at)):
                if param.expert:
                    cut = (at.etp_rank, at.layout.expert_tp, at.expert_speaks)
                else:
                    cut = (at.tp_rank, at.layout.tp, at.speaks and placed.copy is None)
                self._add(found, placed, prefix, param, *cut)
        return found

    def rollout(self, at: RolloutRank) -> dict[str, RowMap]:
        """Runtime name -> map of a rollout rank, in the order of the modules.

        Raises:
            PlanMismatch: the model cannot be cut like that.
        """
        params: dict[int, list[Param]] = {}
        found: dict[str, Held] = {}
        for placed in self._modules:
            if placed.copy is not None:
                continue
            prefix = placed.rollout if at.layout.fused else placed.checkpoint
            for param in _once(params, placed.module, lambda module: module.rollout(at)):
                cut = (at.etp_rank, at.expert_tp) if param.expert else (at.tp_rank, at.layout.tp)
                self._add(found, placed, prefix, param, *cut, True)
        return {name: one.row_map for name, one in found.items()}

    def _add(
        self, found: dict[str, Held], placed: Placed, prefix: str, param: Param, rank: int, world: int, speaks: bool
    ) -> None:  # fmt: skip
        name = prefix + param.name
        if name in found:
            raise PlanMismatch(
                f"two modules name a parameter {name!r}, expected one; give them other prefixes in the model's table"
            )
        layout = param.layout
        rows = (id(layout.tensor), id(layout.row), layout.shape, layout.heads, layout.replicated)
        key = (*rows, id(param.attributes), rank, world, speaks)
        if key not in self._made:
            numbers = {meta.name: number for number, meta in enumerate(layout.metas)}
            made = row_map(layout, name, param.attributes, rank, world, numbers)
            if not speaks:
                made = replace(made, owned=torch.zeros_like(made.owned))
            self._made[key] = param, made  # the parameter too, so that no other object takes its id
        outputs = tuple(self._numbers[placed.source + meta.name] for meta in layout.metas)
        moved = self._made[key][1].moved(name, outputs, layout.metas[0].dtype)
        found[name] = Held(param, placed.source, moved)


def live_maps(table: Mapping[str, Held], params: Mapping[str, Tensor], at: TrainerRank) -> dict[str, RowMap]:
    """Runtime name -> map of a trainer rank's live parameters, which say themselves how they are cut.

    Reads no weights. What they carry is compared with what the model's table says; nothing is guessed.

    Raises:
        MissingTPAttributes: a parameter that several ranks cut does not say how.
        PlanMismatch: names, shapes or cuts of table and parameters disagree.
    """
    for name in (*table, *params):
        if name not in params or name not in table:
            missing = "no live tensor" if name not in params else "no module that declares it"
            raise PlanMismatch(
                f"parameter {name!r} has {missing}; declare it in a module of the model's table "
                "(weightsync.reference.modules.Module), or leave it out"
            )
    for name, held in table.items():
        tensor, param = params[name], held.param
        attributes = read(tensor)
        if (at.layout.expert_tp if param.expert else at.layout.tp) > 1:
            if not param.layout.replicated:
                attributes = require(tensor, name, full_shape=param.layout.shape)
            found, expected = _cut_of(attributes), _cut_of(param.attributes)
            if found != expected:
                raise PlanMismatch(
                    f"parameter {name!r} says it is cut by {found}, the model's table says {expected}; "
                    "correct the attributes or the table"
                )
        if tuple(tensor.shape) != held.row_map.local_shape:
            raise PlanMismatch(
                f"parameter {name!r} has shape {list(tensor.shape)} on trainer rank {at.rank}, expected "
                f"{list(held.row_map.local_shape)} as part of {list(param.layout.shape)}; correct the parallel "
                "sizes or the model's table"
            )
    return {name: held.row_map for name, held in table.items()}


def _cut_of(attributes: TPAttributes) -> dict[str, object]:
    """What decides a cut; empty where there is none."""
    if not attributes.sharded:
        return {}
    told = {name: getattr(attributes, name) for name in _CUT[1:]}
    return told | {name: attributes.values[name] for name in _HEADS if name in attributes.values}


def _once(
    known: dict[int, list[Param]], module: Module, ask: Callable[[Module], Iterable[Param]]
) -> list[Param]:
    if id(module) not in known:
        known[id(module)] = list(ask(module))
    return known[id(module)]
