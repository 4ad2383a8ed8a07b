"""Merging the sub-batches of a rollout into one batch, before advantages are computed and steps are cut."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weightsync.reference.errors import BatchError
from weightsync.reference.params import same_bits


def merged(batches: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> dict[str, Any]:
    """One batch of several, samples in order.

    Lists are joined; tensors with one row per sample are joined along dimension 0; everything else is a property of
    all of them, and must be equal.

    Args:
        batches: of equal keys.
        sizes: samples in each.

    Returns:
        A new mapping; lists and joined tensors are new, values that all share are the first batch's.

    Raises:
        BatchError: keys or kinds differ, a tensor has another number of rows, dtypes or further sizes differ, or a
            shared value is not the same in all of them.
    """
    if not batches or len(batches) != len(sizes):
        raise BatchError(
            f"{len(batches)} batches with {len(sizes)} sizes; expected one at least, and a size of each"
        )
    first = batches[0]
    for number, batch in enumerate(batches):
        if batch.keys() != first.keys():
            odd = sorted(map(str, batch.keys() ^ first.keys()))
            raise BatchError(
                f"batch {number} and batch 0 differ in keys {odd}; expected the same keys in all of them"
            )
    return {key: _merged(key, [batch[key] for batch in batches], sizes) for key in first}


def _merged(key: str, values: list[Any], sizes: Sequence[int]) -> Any:
    kinds = {_kind(value) for value in values}
    if len(kinds) > 1:
        raise BatchError(
            f"key {key!r} is {' and '.join(sorted(kinds))} in several batches; expected one kind"
        )
    (kind,) = kinds
    if kind == "a list":
        return [item for value in values for item in value]
    if kind == "a tensor":
        return _rows(key, values, sizes)
    for number, value in enumerate(values):
        if not _same(value, values[0]):
            raise BatchError(
                f"key {key!r} is {value!r} in batch {number} and {values[0]!r} in batch 0; expected one value, so make "
                "it a list or a tensor if each sample has its own"
            )
    return values[0]


def _rows(key: str, values: list[Tensor], sizes: Sequence[int]) -> Tensor:
    for number, (value, size) in enumerate(zip(values, sizes, strict=True)):
        if len(value) != size or value.shape[1:] != values[0].shape[1:] or value.dtype != values[0].dtype:
            raise BatchError(
                f"key {key!r} of batch {number} is {value.dtype} of shape {tuple(value.shape)}; expected "
                f"{values[0].dtype} of shape {(size, *values[0].shape[1:])}, one row per sample"
            )
    return torch.cat(values)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor" if value.dim() else "a scalar tensor"
    return "a list" if isinstance(value, list) else "a single value"


def _same(a: Any, b: Any) -> bool:
    """Equal to the bit: NaN is NaN, and -0.0 is not 0.0."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    return bool(a == b)
