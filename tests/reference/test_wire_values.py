"""Value forms: resolved with the same old bits they give the new ones back, whatever the bits; steps follow order."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import Values
from weightsync.reference.wire.streams import StreamReader, Zstd, write_streams
from weightsync.reference.wire.values import (
    coded,
    read_values,
    resolve,
    signed_magnitude,
    stream_count,
    value_streams,
)
from weightsync.testing.wire_sections import SECTION_DTYPES, made

BYTES = [dtype for dtype in SECTION_DTYPES if dtype.itemsize == 1]


@given(st.sampled_from(SECTION_DTYPES), st.sampled_from(list(Values)), st.integers(0, 1 << 30), st.booleans())
def test_new_bits_come_back(dtype: torch.dtype, form: Values, seed: int, near: bool) -> None:
    one = made(list(range(64)), dtype, seed, near)
    values = coded(form, one.new, one.old, dtype)
    assert values.dtype == one.new.dtype
    assert torch.equal(resolve(form, values, one.old, dtype), one.new)


@pytest.mark.parametrize("dtype", BYTES, ids=str)
@pytest.mark.parametrize("form", list(Values))
def test_every_pair_of_bytes_comes_back(dtype: torch.dtype, form: Values) -> None:
    integer = int_view(torch.empty(0, dtype=dtype)).dtype
    every = torch.arange(256, dtype=torch.int64).to(torch.uint8).view(integer)
    old, new = every.repeat_interleave(256), every.repeat(256)
    values = coded(form, new, old, dtype)
    assert torch.equal(resolve(form, values, old, dtype), new)
    streams = write_streams(value_streams(form, values.numpy(), split=True), Zstd())
    assert streams is not None
    section = torch.cat([torch.from_numpy(one.copy()) for one in streams]).numpy()
    reader = StreamReader(section, stream_count(form, 1, True), Zstd(), "w")
    found = read_values(reader, form, values.numel(), 1, split=True)
    assert torch.equal(torch.from_numpy(found.copy()).view(integer), values)


@pytest.mark.parametrize("dtype", [one for one in SECTION_DTYPES if signed_magnitude(one)], ids=str)
def test_a_step_counts_values_in_their_order(dtype: torch.dtype) -> None:
    small = torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=torch.float64).to(dtype)
    zero, minus_zero, one, minus_one = int_view(small).split(1)

    def step(old: torch.Tensor, new: torch.Tensor) -> int:
        return int(coded(Values.STEP, new, old, dtype).view(torch.int8 if dtype.itemsize == 1 else new.dtype))

    assert step(minus_zero, zero) == 1
    assert step(zero, one) == step(minus_one, minus_zero) > 0
    assert step(zero, zero + 1) == 1
    assert step(minus_zero, minus_zero + 1) == -1
    assert step(one, minus_one) == -step(minus_one, one) < 0


@pytest.mark.parametrize("form", [Values.XOR, Values.STEP])
def test_without_old_bits_there_is_only_raw(form: Values) -> None:
    bits = torch.zeros(1, dtype=torch.int16)
    with pytest.raises(ValueError, match=f"{form.name} needs the bits of the base version"):
        coded(form, bits, None, torch.bfloat16)
    with pytest.raises(ValueError, match=f"{form.name} needs the bits of the base version"):
        resolve(form, bits, None, torch.bfloat16)
