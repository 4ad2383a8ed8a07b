"""Fault case 010: float32 weights on the trainer, bfloat16 on the rollout, and a cast missing on one path."""

from __future__ import annotations

import pytest
import torch

from weightsync.reference.delta import diff
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, TPAttributes, fresh_copy, int_view, read

OLD = [1.0, 1.0, 0.0078125]
STEP = [1e-4, 1e-2, 1e-5]
WIRE = torch.bfloat16


def masters() -> tuple[torch.Tensor, torch.Tensor]:
    old = torch.tensor(OLD, dtype=torch.float32)
    return old, old + torch.tensor(STEP, dtype=torch.float32)


def differing(old: torch.Tensor, new: torch.Tensor) -> list[int]:
    return (int_view(old) != int_view(new)).nonzero().reshape(-1).tolist()


def test_one_cast_before_the_diff_leaves_the_only_change_the_rollout_can_hold() -> None:
    """Fault case 010: diffed in float32 all three differ; in the rollout's dtype one does."""
    old, new = masters()
    assert differing(old, new) == [0, 1, 2]
    old_sent, new_sent = (fresh_copy(tensor, dtype=WIRE) for tensor in (old, new))
    assert differing(old_sent, new_sent) == [1]
    assert new_sent[1].item() == 1.0078125


def test_metadata_and_bits_come_from_the_same_cast_copy() -> None:
    """Fault case 010: the announced dtype and the bytes of a value agree."""
    _, new = masters()
    TPAttributes({"partition_dim": 0}).stamp(new)
    sent = fresh_copy(new, dtype=WIRE)
    meta = ParamMeta.of("w", sent)
    assert (meta.dtype, meta.itemsize) == (torch.bfloat16, 2)
    assert int_view(sent).view(torch.uint8).numel() == meta.nbytes == 6
    assert dict(read(sent).values) == {"partition_dim": 0}


def test_a_diff_before_the_cast_is_refused() -> None:
    """Fault case 010: in float32 it would name three elements of a tensor that travels as bfloat16."""
    old, new = masters()
    meta = ParamMeta("w", WIRE, (3,))
    with pytest.raises(
        PatchMismatch, match=r"'w' came to the diff as torch\.float32 .*, expected torch\.bfloat16"
    ):
        diff(meta, new, old)
    patch = diff(meta, fresh_copy(new, dtype=WIRE), fresh_copy(old, dtype=WIRE))
    assert (patch.positions.tolist(), patch.values.tolist()) == ([1], [1.0078125])
    assert patch.values.nbytes == 2
