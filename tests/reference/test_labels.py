"""Positions survive as digits of any dtype; what was computed on is no position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.errors import UnsupportedCapability
from weightsync.reference.labels import Labels, any_bits, digit_bits, whole_numbers
from weightsync.reference.params import ParamMeta
from weightsync.testing.strategies import DTYPES


def carried(labels: Labels, dtype: torch.dtype, change: object) -> list[int]:
    """What is read back of every position after ``change`` was done to the values."""
    codes = torch.zeros(labels.total, dtype=torch.int64)
    for number in range(labels.passes):
        values = labels.values(0, ParamMeta("w", dtype, (labels.total,)), number)
        labels.collect(codes, change(values), number)
    return labels.positions(codes).tolist()


@given(
    dtype=st.sampled_from([*DTYPES, torch.int64, torch.float64]),
    total=st.integers(1, 3000),
    seed=st.integers(0, 9),
)
def test_every_position_comes_back(dtype: torch.dtype, total: int, seed: int) -> None:
    labels = Labels.of(total, [dtype], seed)
    assert carried(labels, dtype, lambda values: values) == list(range(total))
    assert (
        carried(labels, dtype, lambda values: values.view(-1)[torch.arange(total - 1, -1, -1)])
        == list(range(total))[::-1]
    )


@pytest.mark.parametrize("change", ["add", "scale", "negate", "fraction", "nan", "zeros"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_a_computed_value_is_no_position(dtype: torch.dtype, change: str) -> None:
    def compute(values: torch.Tensor) -> torch.Tensor:
        wide = values.to(torch.float64)
        changed = {
            "add": wide + 1,
            "scale": wide * 2,
            "negate": -1 - wide,
            "fraction": wide + 0.5,
            "nan": wide * float("nan"),
            "zeros": wide * 0,
        }[change]
        return changed.to(dtype) if change != "fraction" else changed

    labels = Labels.of(500, [dtype], 0)
    found = carried(labels, dtype, compute)
    assert found.count(-1) >= 499


def test_all_dtypes_on_the_way_hold_a_digit() -> None:
    labels = Labels.of(100, [torch.float32, torch.bfloat16], 0)
    assert labels.bits == 8
    assert [digit_bits(one) for one in (torch.float16, torch.float8_e5m2, torch.int8)] == [11, 3, 7]


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.float8_e8m0fnu])
def test_a_dtype_without_exact_integers_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedCapability, match="hold no exact integers"):
        digit_bits(dtype)


def test_whole_numbers_are_told_from_the_rest() -> None:
    values = torch.tensor([0.0, -0.0, 3.0, -3.0, 0.5, float("inf"), float("nan"), 1e300], dtype=torch.float64)
    assert whole_numbers(values).tolist() == [0, 0, 3, -1, -1, -1, -1, -1]
    assert whole_numbers(torch.tensor([-7, 9], dtype=torch.int8)).tolist() == [-1, 9]


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits_hold_no_nan_and_both_signs(dtype: torch.dtype) -> None:
    drawn = any_bits((4096,), dtype, torch.Generator().manual_seed(0)).to(torch.float64)
    assert not bool(drawn.isnan().any())
    assert bool((drawn < 0).any())
    assert bool((drawn > 0).any())
