"""Gradients of tensor-parallel ranks for the oracles of ``weightsync.reference.grad_norm``.

Whole numbers, so that sums of their squares are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference.grad_norm import RankGrads
from weightsync.reference.params import TPAttributes, fresh_copy, read

SHARD = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
"""Cut along dimension 0."""


def whole_numbers(shape: Sequence[int]) -> st.SearchStrategy[Tensor]:
    """float32 tensors of ``shape`` with whole numbers from -3 to 3."""
    count = math.prod(shape)
    return st.lists(st.integers(-3, 3), min_size=count, max_size=count).map(
        lambda numbers: torch.tensor(numbers, dtype=torch.float32).reshape(tuple(shape))
    )


def entry(grad: Tensor | None, attributes: TPAttributes | None = None) -> tuple[Tensor, Tensor | None]:
    """A parameter that carries ``attributes``, and its gradient."""
    return (attributes or TPAttributes({})).stamp(Parameter(torch.zeros(1))), grad


def forget(ranks: Sequence[RankGrads], *names: str) -> list[RankGrads]:
    """The same gradients, on copies of the parameters that lost the attributes ``names``."""

    def without(param: Tensor) -> Tensor:
        kept = {name: value for name, value in read(param).values.items() if name not in names}
        return TPAttributes(kept).stamp(fresh_copy(param))

    return [
        replace(rank, params={name: (without(param), grad) for name, (param, grad) in rank.params.items()})
        for rank in ranks
    ]
