"""Fault case 014: positions, lengths and dtypes that do not fit must be refused before the first write."""

from __future__ import annotations

import pytest
import torch

from weightsync.reference.delta import SparsePatch, UndoLog, apply
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta

W = ParamMeta("layers.0.w", torch.float32, (4,))
INT32 = torch.int32


@pytest.mark.parametrize(
    ("positions", "values", "said"),
    [
        (torch.tensor([1, 4], dtype=INT32), torch.tensor([5.0, 6.0]), "names position 4, expected 0 to 3"),
        (torch.tensor([1, -1], dtype=INT32), torch.tensor([5.0, 6.0]), "names position -1, expected 0 to 3"),
        (torch.tensor([0, 1], dtype=INT32), torch.ones(3), r"positions \[2\] and values \[3\]"),
        (torch.tensor([0, 1], dtype=INT32), torch.ones(2, dtype=torch.float64), "torch.float64 values"),
    ],
    ids=["beyond the end", "negative", "lengths", "dtype"],
)
def test_a_patch_that_does_not_fit_names_the_parameter_and_writes_nothing(
    positions: torch.Tensor, values: torch.Tensor, said: str
) -> None:
    """Fault case 014: torch's own writes fail half-way, or wrap a negative position round."""
    target, log = torch.zeros(4), UndoLog()
    with pytest.raises(PatchMismatch, match=f"'layers.0.w'.*{said}"):
        apply(SparsePatch(W, positions, values), target, log)
    assert target.tolist() == [0.0, 0.0, 0.0, 0.0]
    assert log.entries == []


def test_torch_itself_writes_before_it_refuses() -> None:
    """Fault case 014: why the check comes first; the day this changes, the reason changes."""
    target = torch.zeros(4)
    with pytest.raises(IndexError):
        target.index_copy_(0, torch.tensor([1, 4]), torch.tensor([5.0, 6.0]))
    target[torch.tensor([-1])] = torch.tensor([7.0])
    assert target[3] == 7.0
