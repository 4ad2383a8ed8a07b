"""Weights may be one memory or none in common."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.overlap import check_disjoint
from weightsync.testing.states import examples

SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=4)


@examples(2)
@given(SPANS)
def test_exactly_what_shares_a_part_is_refused(spans: list[tuple[int, int]]) -> None:
    memory = torch.zeros(32, dtype=torch.int16)
    weights = {f"w{n}": memory[start : start + count] for n, (start, count) in enumerate(spans)}
    sets = [(start, count, set(range(start, start + count))) for start, count in spans]
    wrong = any(
        one[:2] != other[:2] and one[2] & other[2] for n, one in enumerate(sets) for other in sets[n + 1 :]
    )
    if wrong:
        with pytest.raises(PlanMismatch, match="bytes but are not the same tensor"):
            check_disjoint(weights)
    else:
        check_disjoint(weights)


def test_views_in_the_gaps_of_one_another_are_left_alone() -> None:
    memory = torch.zeros(6, 4)
    check_disjoint({"even": memory[:, ::2], "odd": memory[:, 1::2], "all columns": torch.zeros(6, 4).t()})


def test_a_transposed_tensor_fills_its_memory() -> None:
    memory = torch.zeros(6, 4)
    with pytest.raises(PlanMismatch, match="'all' and 'row' share 16 bytes"):
        check_disjoint({"all": memory.t(), "row": memory[2]})
