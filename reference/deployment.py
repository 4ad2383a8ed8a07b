"""Deployment: who holds what. One model, one trainer layout, any rollout layouts, and every rank's maps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from weightsync.reference.layouts import Layout, row_maps
from weightsync.reference.megatron import VOCAB_MULTIPLE as TRAINER_MULTIPLE
from weightsync.reference.megatron import trainer_layouts
from weightsync.reference.members import RankId, RolloutRef, rollout_refs, trainer_ranks
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.placement import VOCAB_MULTIPLE as ROLLOUT_MULTIPLE
from weightsync.reference.placement import rollout_aliases, rollout_maps
from weightsync.reference.plan import TransferPlan
from weightsync.reference.rowmap import RowMap, export, local_tensor


class RolloutLayout(NamedTuple):
    """How one rollout cuts the model: tensor-parallel ranks, and fused (vLLM, SGLang) or checkpoint names."""

    tp: int
    fused: bool


@dataclass(frozen=True)
class Deployment:
    """A model on a trainer and its rollouts. Holds no weights.

    Attributes:
        model: sizes of the model.
        tp: the trainer's tensor-parallel ranks.
        layouts: one per rollout.
        bucket_bytes: largest bucket on the wire.
        trainer_multiple: rows per TP rank that the trainer's padded vocabulary is a multiple of.
        rollout_multiple: rows that a fused rollout's padded vocabulary is a multiple of.
    """

    model: ModelShape
    tp: int
    layouts: tuple[RolloutLayout, ...]
    bucket_bytes: int
    trainer_multiple: int = TRAINER_MULTIPLE
    rollout_multiple: int = ROLLOUT_MULTIPLE

    @cached_property
    def tensors(self) -> tuple[ParamMeta, ...]:
        """The checkpoint tensors in wire order."""
        return self.model.tensors()

    @property
    def trainers(self) -> tuple[RankId, ...]:
        """The trainer's ranks, lead first."""
        return trainer_ranks(self.tp)

    @property
    def rollouts(self) -> tuple[RolloutRef, ...]:
        """The rollouts."""
        return rollout_refs([layout.tp for layout in self.layouts])

    @property
    def ranks(self) -> tuple[RankId, ...]:
        """Every rank, the trainer's first."""
        return (*self.trainers, *(rank for rollout in self.rollouts for rank in rollout.ranks))

    @cached_property
    def attributes(self) -> dict[str, TPAttributes]:
        """Runtime name -> what the trainer's live parameters carry."""
        table = trainer_layouts(self.model, self.tp, vocab_multiple=self.trainer_multiple)
        return {name: attributes for name, (_, attributes) in table.items()}

    @cached_property
    def trainer_maps(self) -> tuple[dict[str, RowMap], ...]:
        """Per trainer rank, runtime name -> map, read from the attributes that live parameters carry."""
        table = trainer_layouts(self.model, self.tp, vocab_multiple=self.trainer_multiple)
        layouts = {name: layout for name, (layout, _) in table.items()}
        found = []
        for rank in range(self.tp):
            shapes = {name: self._empty(name, layout, rank) for name, layout in layouts.items()}
            found.append(row_maps(layouts, shapes, rank, self.tp, self.model.numbers()))
        return tuple(found)

    @cached_property
    def plan(self) -> TransferPlan:
        """The transfer plan, equal on every rank."""
        return TransferPlan(
            self.tensors, tuple(tuple(maps.values()) for maps in self.trainer_maps), self.bucket_bytes
        )

    def rollout_maps(self, rank: RankId) -> dict[str, RowMap]:
        """Runtime name -> map of one rollout rank; made once, not to be changed."""
        if rank not in self._maps_made:
            self._maps_made[rank] = self._make_rollout_maps(rank)
        return self._maps_made[rank]

    @cached_property
    def _maps_made(self) -> dict[RankId, dict[str, RowMap]]:
        return {}

    def _make_rollout_maps(self, rank: RankId) -> dict[str, RowMap]:
        tp, fused = self.layouts[rank.rollout]
        return rollout_maps(self.model, rank.rank, tp, fused, vocab_multiple=self.rollout_multiple)

    def aliases(self) -> dict[str, str]:
        """Second name -> first name of storage that a rollout ties."""
        return rollout_aliases(self.model)

    def shards(self, rank: int, checkpoint: Mapping[str, Tensor]) -> dict[str, torch.nn.Parameter]:
        """Live parameters of one trainer rank: its shards of ``checkpoint``, with their attributes, new storage."""
        params = {}
        for name, row_map in self.trainer_maps[rank].items():
            tensor = local_tensor(row_map, self._outputs(row_map, checkpoint))
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            self.attributes[name].stamp(parameter)
            params[name] = parameter
        return params

    def weights(self, rank: RankId, checkpoint: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a rollout rank holds of ``checkpoint``, by runtime name: new storage."""
        maps = self.rollout_maps(rank)
        return {
            name: local_tensor(row_map, self._outputs(row_map, checkpoint)) for name, row_map in maps.items()
        }

    def blank(self, rank: RankId) -> dict[str, Tensor]:
        """A rollout rank's weights before the first update: allocated, zero."""
        return {
            name: torch.zeros(m.local_shape, dtype=m.dtype) for name, m in self.rollout_maps(rank).items()
        }

    def export(self, params: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The dense checkpoint from every trainer rank's tensors: the oracle."""
        return export(self.trainer_maps, params, self.tensors)

    def _outputs(self, row_map: RowMap, checkpoint: Mapping[str, Tensor]) -> list[Tensor]:
        return [checkpoint[self.tensors[number].name] for number in row_map.outputs]

    def _empty(self, name: str, layout: Layout, rank: int) -> Tensor:
        attributes, heads = self.attributes[name], layout.heads
        shape = list(layout.shape)
        if heads is not None and heads.declared(name, attributes, self.tp):
            shape[heads.dim] = heads.length(rank, self.tp)
        elif attributes.sharded:
            shape[attributes.partition_dim] //= self.tp
        return attributes.stamp(torch.empty(shape, dtype=self.model.dtype, device="meta"))
