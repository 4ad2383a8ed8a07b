"""Reaching into a rank's memory without the backend's verbs: what checks a verb must not be that verb."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.members import RankId
from weightsync.reference.params import carry, int_view
from weightsync.reference.plan import TransferPlan
from weightsync.reference.source import Source
from weightsync.reference.target import Target

LIVE, SLOTS, WEIGHTS = "live", ("slot0", "slot1"), "weights"
"""Memories of a rank, as ``reference.steps.Touched`` names them."""


class Memory(ABC):
    """Makes each rank's bytes, and reads and writes them past the verbs.

    What holds them, ``make_source`` or ``make_target``'s result, is called a holding.
    """

    @abstractmethod
    def peek(self, holding: Any, memory: str, name: str) -> Tensor:
        """A copy on the host of what a rank's memory holds now, with its TP attributes; no verb may be used.

        Args:
            holding: what ``make_source`` or ``make_target`` gave.
            memory: ``live``, ``slot0`` or ``slot1`` of a trainer rank, ``weights`` of a rollout rank.
            name: runtime name of the tensor.
        """

    @abstractmethod
    def poke(self, holding: Any, memory: str, name: str, tensor: Tensor) -> None:
        """Overwrite a tensor in a rank's memory with the bits and the TP attributes of a host tensor.

        ``memory`` is ``live`` or ``weights``; no verb may be used, and strides stay as they are.
        """

    def make_source(self, plan: TransferPlan, rank: int, params: Mapping[str, Tensor]) -> Any:
        """The bytes of a trainer rank that starts from ``params`` on the host, of any strides."""
        return Source(plan, rank, params)

    def make_target(
        self,
        deployment: Deployment,
        rank: RankId,
        weights: Mapping[str, Tensor],
        route: Literal["all", "owned"] = "all",
    ) -> Any:
        """The bytes of a rollout rank that starts from ``weights`` on the host, of any strides.

        ``route`` is that of the settings: what it is going to be sent.
        """
        maps = deployment.rollout_maps(rank)
        return Target(deployment.tensors, maps, weights, deployment.aliases(rank), route)


class HostMemory(Memory):
    """For ranks that hold a reference ``Source`` or ``Target`` in host memory."""

    def peek(self, holding: Any, memory: str, name: str) -> Tensor:
        """See ``Memory.peek``."""
        if memory == WEIGHTS:
            tensor = holding.weights[name]
        else:
            tensor = holding.params[name] if memory == LIVE else holding.held(SLOTS.index(memory))[name]
        copy = torch.empty(tensor.shape, dtype=tensor.dtype)
        _overwrite(copy, tensor)
        return copy

    def poke(self, holding: Any, memory: str, name: str, tensor: Tensor) -> None:
        """See ``Memory.poke``."""
        _overwrite((holding.weights if memory == WEIGHTS else holding.params)[name], tensor)


def overwrite(live: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """An optimizer step: give live tensors, of any strides, the bits and the attributes of others."""
    for name, tensor in live.items():
        _overwrite(tensor, new[name])


def _overwrite(tensor: Tensor, new: Tensor) -> None:
    bits = int_view(tensor.new_empty(0)).dtype
    tensor.detach().view(bits).copy_(new.detach().view(bits))
    carry(new, tensor)
