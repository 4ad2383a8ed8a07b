"""Fault case 011: a buffer that must stay float32 among bfloat16 weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.buckets import DELTA, Heading, Range, RangeSpec, pack_bucket, unpack
from weightsync.reference.delta import diff
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch, PlanMismatch
from weightsync.reference.layouts import cut, plain
from weightsync.reference.params import ParamMeta, fresh_copy, int_view, same_bits
from weightsync.reference.steps import run
from weightsync.reference.target import Target

WEIGHT = ParamMeta("mlp.gate.weight", torch.bfloat16, (2,))
BIAS = ParamMeta("mlp.gate.e_score_correction_bias", torch.float32, (2,))
TENSORS = (WEIGHT, BIAS)
NUMBERS = {meta.name: number for number, meta in enumerate(TENSORS)}
OLD = torch.tensor([1.0, 0.1], dtype=torch.float32)
NEW = OLD + torch.tensor([2.0**-10, 0.0])


def target_of(bias: Tensor) -> Target:
    maps = {meta.name: cut(plain(meta), meta.name, NUMBERS) for meta in TENSORS}
    return Target(
        TENSORS, maps, {WEIGHT.name: torch.tensor([1.0, 2.0], dtype=torch.bfloat16), BIAS.name: bias}
    )


def test_a_change_below_bfloat16_is_one_position_and_its_float32_bits_arrive() -> None:
    """Fault case 011: each tensor travels in a dtype of its own."""
    patch = diff(BIAS, NEW, OLD)
    assert patch.positions.tolist() == [0]
    assert patch.values.dtype == torch.float32
    spec = RangeSpec(NUMBERS[BIAS.name], Encoding.INT32, 0, patch.nnz)
    ranges = [Range(spec, patch.positions, int_view(patch.values))]
    bucket = pack_bucket(Heading(DELTA, epoch=1, base=1, version=2), ranges, TENSORS)
    (sent,) = unpack(bucket, TENSORS)
    assert sent.bits.view(torch.float32).tolist() == [1.0009765625]
    target = target_of(OLD.clone())
    decoded = run(target.decode(bucket))
    run(target.validate(decoded, version=2, base=1, epoch=1, sequence=0))
    run(target.apply(decoded, undo=True))
    assert same_bits(target.weights[BIAS.name], NEW)


def test_cast_to_the_weights_dtype_the_change_is_lost() -> None:
    """Fault case 011: what the fault does; so the test above would see it."""
    old, new = (fresh_copy(one, dtype=torch.bfloat16) for one in (OLD, NEW))
    assert diff(ParamMeta(BIAS.name, torch.bfloat16, (2,)), new, old).nnz == 0
    assert new.tolist() == [1.0, 0.10009765625]


def test_a_squeezed_buffer_is_refused_on_either_side() -> None:
    """Fault case 011: the plan says float32, so nothing else is taken for it."""
    with pytest.raises(
        PatchMismatch, match=r"came to the diff as torch\.bfloat16 .*, expected torch\.float32"
    ):
        diff(BIAS, fresh_copy(NEW, dtype=torch.bfloat16), fresh_copy(OLD, dtype=torch.bfloat16))
    with pytest.raises(PlanMismatch, match=r"is torch\.bfloat16 \[2\], its map expects torch\.float32 \[2\]"):
        target_of(fresh_copy(OLD, dtype=torch.bfloat16))
