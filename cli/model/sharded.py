"""ShardedModel: one checkpoint as every trainer rank's live shards, laid out and attributed as Megatron's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

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
            deployment.shards(rank, weights) for rank in range(deployment.tp)
        )
        self._float_maps = tuple(
            {name: replace(row_map, dtype=torch.float32) for name, row_map in maps.items()}
            for maps in deployment.trainer_maps
        )
        self._padded = {
            deployment.tensors[row_map.outputs[0]].name: name
            for maps in deployment.trainer_maps
            for name, row_map in maps.items()
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
        for checkpoint_name, name in self._padded.items():
            full[checkpoint_name] = shards.join([params[name].detach() for params in self.params], 0)
        return full

    def cut(self, rank: int, joined: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One rank's part of float32 tensors shaped as ``joined`` gives them: gradients; new storage."""
        names = [meta.name for meta in self.deployment.tensors]
        parts = {
            name: local_tensor(row_map, [joined[names[number]] for number in row_map.outputs])
            for name, row_map in self._float_maps[rank].items()
        }
        for checkpoint_name, name in self._padded.items():
            parts[name] = shards.split(joined[checkpoint_name], self.deployment.tp, rank, 0)
        return parts
