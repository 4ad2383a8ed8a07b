"""ShardedModel: one checkpoint as every trainer rank's live shards, laid out and attributed as Megatron's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference import shards
from weightsync.reference.deployment import Deployment
from weightsync.reference.params import int_view
from weightsync.reference.rowmap import local_tensor


class ShardedModel:
    """Every rank's live parameters in one process, so that a demo needs no collective to train.

    Attributes:
        deployment: who holds what; its ``plan`` and ``trainer_maps`` are those of ``params``.
        params: per trainer rank, runtime name -> Parameter with real TP attributes; live, changed in place.
    """

    def __init__(self, deployment: Deployment, weights: Mapping[str, Tensor]) -> None:
        self.deployment = deployment
        self.params: tuple[dict[str, Parameter], ...] = tuple(
            deployment.shards(rank, weights) for rank in range(len(deployment.trainers))
        )
        self._float_maps = tuple(
            {name: row_map.moved(name, dtype=torch.float32) for name, row_map in maps.items()}
            for maps in deployment.trainer_maps
        )
        self._padded = {
            deployment.tensors[row_map.outputs[0]].name
            for maps in deployment.trainer_maps
            for row_map in maps.values()
            if bool((row_map.tensor < 0).any())
        }

    def export(self) -> dict[str, Tensor]:
        """Hugging Face name -> whole tensor, new storage: the oracle for what a rollout must hold."""
        return self.deployment.export(self.params)

    def joined(self) -> dict[str, Tensor]:
        """As ``export``, whole rows at a time, with the vocabulary's padding rows kept on the vocabulary."""
        full = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in self.deployment.tensors}
        for maps, params in zip(self.deployment.trainer_maps, self.params, strict=True):
            for name, row_map in maps.items():
                source = int_view(params[name]).reshape(-1, row_map.width)
                columns = slice(row_map.column, row_map.column + row_map.width)
                for output, number in enumerate(row_map.outputs):
                    local, rows = row_map.local_rows(output, owned_only=True)
                    target = int_view(full[self.deployment.tensors[number].name])
                    target.view(-1, row_map.full_widths[output])[rows, columns] = source[local]
        for checkpoint_name in self._padded:
            parts = [
                part for rank in range(len(self.params)) for part in self._speaking(rank, checkpoint_name)
            ]
            full[checkpoint_name] = shards.join(parts, 0)
        return full

    def cut(self, rank: int, joined: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One rank's part of float32 tensors shaped as ``joined`` gives them: gradients; new storage."""
        names = [meta.name for meta in self.deployment.tensors]
        parts = {
            name: local_tensor(row_map, [joined[names[number]] for number in row_map.outputs])
            for name, row_map in self._float_maps[rank].items()
        }
        layout = self.deployment.trainer_layout
        for name, row_map in self._float_maps[rank].items():
            if names[row_map.outputs[0]] in self._padded:
                whole = joined[names[row_map.outputs[0]]]
                parts[name] = shards.split(whole, layout.tp, self.deployment.at(rank).tp_rank, 0)
        return parts

    def _speaking(self, rank: int, checkpoint_name: str) -> list[Tensor]:
        """The rank's part of a vocabulary matrix, where the rank is no replica and the matrix no tied copy."""
        held = self.deployment.tables[rank].items() if self.deployment.at(rank).speaks else ()
        return [
            self.params[rank][name].detach()
            for name, one in held
            if self.deployment.tensors[one.row_map.outputs[0]].name == checkpoint_name
            and "shared" not in one.param.attributes.values
        ]
