"""ShardedModel: one checkpoint as the shards of every trainer rank, laid out and attributed as Megatron's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference import megatron, shards
from weightsync.reference.layouts import RowMap, export, local_tensor
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, TPAttributes, int_view


class ShardedModel:
    """Every rank's live parameters in one process, so that a demo needs no collective to train.

    Attributes:
        shape: sizes of the model.
        world: trainer TP size.
        metas: checkpoint tensors in wire order; a plan numbers them so.
        maps: per rank, runtime name -> row map, names in one order on all ranks.
        params: per rank, runtime name -> Parameter with real TP attributes; live, changed in place.
    """

    def __init__(self, shape: ModelShape, weights: Mapping[str, Tensor], world: int) -> None:
        self.shape, self.world = shape, world
        self.metas: tuple[ParamMeta, ...] = shape.tensors()
        layouts = megatron.trainer_layouts(shape, world)
        self.maps: tuple[dict[str, RowMap], ...] = tuple(
            megatron.trainer_maps(shape, rank, world) for rank in range(world)
        )
        self.params: tuple[dict[str, Parameter], ...] = tuple(
            {
                name: _live(local, layouts[name][1])
                for name, local in local_weights(maps, weights, self.metas).items()
            }
            for maps in self.maps
        )
        self._float_maps = tuple(
            {name: replace(row_map, dtype=torch.float32) for name, row_map in maps.items()}
            for maps in self.maps
        )
        self._padded = {
            layout.metas[0].name: name
            for name, (layout, _) in layouts.items()
            if len(layout.metas) == 1 and layout.shape != layout.metas[0].shape
        }

    def plan_inputs(self) -> tuple[tuple[ParamMeta, ...], tuple[tuple[RowMap, ...], ...]]:
        """What a TransferPlan is built from: checkpoint tensors, and per rank its row maps in one order."""
        return self.metas, tuple(tuple(maps.values()) for maps in self.maps)

    def export(self) -> dict[str, Tensor]:
        """Hugging Face name -> whole tensor, new storage: the oracle for what a rollout must hold."""
        return export(self.maps, self.params, self.metas)

    def joined(self) -> dict[str, Tensor]:
        """As ``export``, whole rows at a time, with the vocabulary's padding rows kept on the vocabulary."""
        full = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in self.metas}
        for maps, params in zip(self.maps, self.params, strict=True):
            for name, row_map in maps.items():
                source = int_view(params[name]).reshape(-1, row_map.width)
                columns = slice(row_map.column, row_map.column + row_map.width)
                for output, number in enumerate(row_map.outputs):
                    local, rows = row_map.local_rows(output, owned_only=True)
                    target = int_view(full[self.metas[number].name])
                    target.view(-1, row_map.full_widths[output])[rows, columns] = source[local]
        for checkpoint_name, name in self._padded.items():
            full[checkpoint_name] = shards.join([params[name].detach() for params in self.params], 0)
        return full

    def cut(self, rank: int, joined: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One rank's part of float32 tensors shaped as ``joined`` gives them: gradients; new storage."""
        parts = local_weights(self._float_maps[rank], joined, self.metas)
        for checkpoint_name, name in self._padded.items():
            parts[name] = shards.split(joined[checkpoint_name], self.world, rank, 0)
        return parts


def _live(local: Tensor, attributes: TPAttributes) -> Parameter:
    parameter = Parameter(local, requires_grad=local.is_floating_point())
    attributes.stamp(parameter)
    return parameter


def local_weights(
    maps: Mapping[str, RowMap], weights: Mapping[str, Tensor], metas: Sequence[ParamMeta]
) -> dict[str, Tensor]:
    """Runtime name -> one rank's tensor, built from whole checkpoint tensors; for trainer and rollout."""
    return {
        name: local_tensor(row_map, [weights[metas[number].name] for number in row_map.outputs])
        for name, row_map in maps.items()
    }
