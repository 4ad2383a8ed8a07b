"""Fault case 012: a change detector that misses bits, here in the high byte and in the sign of zero."""

from __future__ import annotations

import torch

from weightsync.reference.delta import apply, diff
from weightsync.reference.detect import changed, changed_plain
from weightsync.reference.digest import tensor_digest
from weightsync.reference.params import ParamMeta, int_view, same_bits

OLD = torch.tensor([1.0, 1.0, 0.0, 3.0], dtype=torch.bfloat16)
NEW = torch.tensor([4.0, -1.0, -0.0, 3.0], dtype=torch.bfloat16)


def test_the_faulty_detectors_miss_what_they_are_said_to_miss() -> None:
    """Fault case 012: the low byte alone finds nothing; a float comparison loses the sign of zero."""
    low = int_view(OLD) & 0xFF != int_view(NEW) & 0xFF
    assert low.nonzero().reshape(-1).tolist() == []
    assert (OLD != NEW).nonzero().reshape(-1).tolist() == [0, 1]


def test_all_bits_are_compared_and_arrive() -> None:
    """Fault case 012: three of four elements differ, and the receiver ends with the trainer's bits."""
    assert changed(NEW, OLD).tolist() == changed_plain(NEW, OLD).tolist() == [0, 1, 2]
    receiver = OLD.clone()
    apply(diff(ParamMeta.of("w", OLD), NEW, OLD), receiver)
    assert same_bits(receiver, NEW)


def test_the_digest_sees_the_sign_of_zero() -> None:
    """Fault case 012: a detector that missed a bit would be found by the digest."""
    meta = ParamMeta("w", torch.bfloat16, (4,))
    almost = NEW.clone()
    almost[2] = 0.0
    assert tensor_digest(meta, almost) != tensor_digest(meta, NEW)
