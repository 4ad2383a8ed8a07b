"""Deployment: who holds what. One model, one trainer layout, any rollout layouts, and every rank's maps of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from weightsync.reference.megatron import VOCAB_MULTIPLE as TRAINER_MULTIPLE
from weightsync.reference.members import RankId, RolloutRef, rollout_refs, trainer_ranks
from weightsync.reference.modules import Model
from weightsync.reference.parallel import RolloutLayout, TrainerLayout, TrainerRank
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.placement import VOCAB_MULTIPLE as ROLLOUT_MULTIPLE
from weightsync.reference.plan import TransferPlan
from weightsync.reference.routes import Route, owned_routes
from weightsync.reference.rowmap import RowMap, export, local_tensor
from weightsync.reference.tables import Held, Tables, live_maps
from weightsync.reference.wire.policy import PLAIN_WIRE, WirePolicy

__all__ = ["Deployment", "RolloutLayout"]


@dataclass(frozen=True)
class Deployment:
    """A model on a trainer and its rollouts. Holds no weights.

    Attributes:
        model: the family with its sizes.
        trainer: the trainer's layout; a number stands for that many tensor-parallel ranks and nothing else.
        layouts: one per rollout.
        bucket_bytes: largest bucket on the wire.
        trainer_multiple: rows per TP rank that the trainer's padded vocabulary is a multiple of.
        rollout_multiple: rows that a fused rollout's padded vocabulary is a multiple of.
        wire: how ranges are encoded.
    """

    model: Model
    trainer: TrainerLayout | int
    layouts: tuple[RolloutLayout, ...]
    bucket_bytes: int
    trainer_multiple: int = TRAINER_MULTIPLE
    rollout_multiple: int = ROLLOUT_MULTIPLE
    wire: WirePolicy = PLAIN_WIRE

    @cached_property
    def trainer_layout(self) -> TrainerLayout:
        """The trainer's layout."""
        return TrainerLayout(self.trainer) if isinstance(self.trainer, int) else self.trainer

    @property
    def tp(self) -> int:
        """The trainer's tensor-parallel ranks; ``trainers`` are all of its ranks."""
        return self.trainer_layout.tp

    @cached_property
    def tensors(self) -> tuple[ParamMeta, ...]:
        """The checkpoint tensors in wire order."""
        return self.model.tensors()

    @cached_property
    def trainers(self) -> tuple[RankId, ...]:
        """The trainer's ranks, lead first."""
        return trainer_ranks(self.trainer_layout.world)

    @property
    def rollouts(self) -> tuple[RolloutRef, ...]:
        """The rollouts."""
        return rollout_refs([layout.tp for layout in self.layouts])

    @property
    def ranks(self) -> tuple[RankId, ...]:
        """Every rank, the trainer's first."""
        return (*self.trainers, *(rank for rollout in self.rollouts for rank in rollout.ranks))

    @cached_property
    def tables(self) -> tuple[dict[str, Held], ...]:
        """Per trainer rank, runtime name -> what it holds there."""
        return tuple(self._tables.trainer(self.at(rank)) for rank in range(self.trainer_layout.world))

    @cached_property
    def attributes(self) -> tuple[dict[str, TPAttributes], ...]:
        """Per trainer rank, runtime name -> what its live parameters carry."""
        return tuple({name: held.param.attributes for name, held in table.items()} for table in self.tables)

    @cached_property
    def trainer_maps(self) -> tuple[dict[str, RowMap], ...]:
        """Per trainer rank, runtime name -> map."""
        return tuple({name: held.row_map for name, held in table.items()} for table in self.tables)

    def at(self, rank: int) -> TrainerRank:
        """The place of a trainer rank."""
        return self.trainer_layout.at(rank, self.trainer_multiple)

    def live_maps(self, rank: int, params: Mapping[str, Tensor]) -> dict[str, RowMap]:
        """``trainer_maps`` of one rank, once its live parameters themselves say that they are cut so.

        Raises: as ``tables.live_maps``.
        """
        return live_maps(self.tables[rank], params, self.at(rank))

    @cached_property
    def plan(self) -> TransferPlan:
        """The transfer plan, equal on every rank."""
        return TransferPlan(
            self.tensors,
            tuple(tuple(maps.values()) for maps in self.trainer_maps),
            self.bucket_bytes,
            wire=self.wire,
        )

    @cached_property
    def owned_routes(self) -> tuple[Route, ...]:
        """The routes on which each rollout rank is sent only what it holds."""
        ranks = (rank for rollout in self.rollouts for rank in rollout.ranks)
        return owned_routes(self.plan, {rank: tuple(self.rollout_maps(rank).values()) for rank in ranks})

    def routes(self, route: str) -> tuple[Route, ...] | None:
        """``owned_routes`` for ``"owned"``; None, everything to everybody, for ``"all"``."""
        return self.owned_routes if route == "owned" else None

    def rollout_maps(self, rank: RankId) -> dict[str, RowMap]:
        """Runtime name -> map of one rollout rank; made once, not to be changed."""
        if rank not in self._maps_made:
            self._maps_made[rank] = self._make_rollout_maps(rank)
        return self._maps_made[rank]

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.model)

    @cached_property
    def _maps_made(self) -> dict[RankId, dict[str, RowMap]]:
        return {}

    def _make_rollout_maps(self, rank: RankId) -> dict[str, RowMap]:
        layout = self.layouts[rank.rollout]
        return self._tables.rollout(layout.at(rank.rank, self.rollout_multiple))

    def aliases(self, rank: RankId | None = None) -> dict[str, str]:
        """Second name -> first name of storage that a rollout rank ties; without a rank, under fused names."""
        return self.model.aliases(rank is None or self.layouts[rank.rollout].fused)

    def shards(self, rank: int, checkpoint: Mapping[str, Tensor]) -> dict[str, torch.nn.Parameter]:
        """Live parameters of one trainer rank: its shards of ``checkpoint``, with their attributes, new storage."""
        params = {}
        for name, row_map in self.trainer_maps[rank].items():
            tensor = local_tensor(row_map, self._outputs(row_map, checkpoint))
            parameter = torch.nn.Parameter(tensor, requires_grad=False)
            self.attributes[rank][name].stamp(parameter)
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
