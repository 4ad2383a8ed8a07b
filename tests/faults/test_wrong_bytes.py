"""The fuzzer finds what moves bytes wrongly, too, in a bounded number of runs."""

from __future__ import annotations

import pytest

from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.testing.fuzz import Protocol, fuzz
from weightsync.testing.wrong_backends import (
    CopiesThroughFloats,
    ForgetsToRollBack,
    KeepsTheLiveTensor,
    KeepsTheUndoLog,
    OffByOne,
    ProvesWhileItWrites,
    SumsBits,
    UndoesHalf,
)

SEEDS = 60

WRONG = (
    CopiesThroughFloats, ForgetsToRollBack, KeepsTheLiveTensor, KeepsTheUndoLog, OffByOne, ProvesWhileItWrites,
    SumsBits, UndoesHalf,
)  # fmt: skip
"""The others need damaged bytes, which no fault of a rank makes: the conformance kit finds them."""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_fuzz_finds_it(wrong: type[Source] | type[Target]) -> None:
    finding = fuzz(wrong, seeds=SEEDS)
    assert finding is not None, f"no plan of {SEEDS} makes {wrong.__name__} break a promise"
    assert finding.case.run(Protocol()).violations == []  # the right one keeps it under this plan
