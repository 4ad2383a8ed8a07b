"""The fast comparison equals the plain one, whatever the dtype, strides, density, block or number of threads."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference import detect
from weightsync.reference.detect import Detector, changed_plain
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import int_view
from weightsync.testing.strategies import DTYPES, tensors

ALL_DTYPES = (*DTYPES, torch.float64, torch.int64, torch.bool, torch.complex64)
SHARES = (0.0, 0.0005, 0.004, 0.02, 0.07, 0.3, 1.0)


def random_pair(size: int, dtype: torch.dtype, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Random bits, NaN and signed zeros among them, and the same with a share of the elements changed."""
    stream = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=stream)
    if dtype == torch.bool:
        raw &= 1
    old, new = raw.view(dtype), raw.clone().view(dtype)
    int_view(new)[torch.rand(size, generator=stream) < share] ^= 1
    return new, old


def expect_plain(found: detect.Differing, new: Tensor, old: Tensor) -> None:
    at = changed_plain(new, old)
    assert found.positions.dtype == torch.int32
    assert torch.equal(found.positions.to(torch.int64), at)
    assert torch.equal(found.new, int_view(new)[at])
    assert found.old is not None
    assert torch.equal(found.old, int_view(old)[at])


@given(
    dtype=st.sampled_from(ALL_DTYPES),
    size=st.integers(0, 700),
    share=st.sampled_from(SHARES),
    seed=st.integers(0, 1 << 16),
    block=st.sampled_from([8, 64, 128, 1 << 20]),
    refined=st.sampled_from([1, 5, 1 << 15]),
    threads=st.integers(1, 3),
)
def test_any_density_block_and_number_of_threads_equals_the_plain_way(
    dtype: torch.dtype, size: int, share: float, seed: int, block: int, refined: int, threads: int
) -> None:
    new, old = random_pair(size, dtype, share, seed)
    with pytest.MonkeyPatch.context() as patched, Detector(threads) as detector:
        patched.setattr(detect, "BLOCK_ELEMENTS", block)
        patched.setattr(detect, "_REFINED", refined)
        patched.setattr(detect, "_SHARED_WORDS", 4)
        expect_plain(detector.find(new, old), new, old)
        assert detector.find(new, old, old_bits=False).old is None


@given(shape=st.lists(st.integers(1, 5), max_size=4).map(tuple), data=st.data())
def test_any_strides_equal_the_plain_way_in_bounded_copies(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    new = data.draw(tensors(dtype=dtype, shape=shape, strided=True))
    old = data.draw(tensors(dtype=dtype, shape=shape, strided=True))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(detect, "_STRIDED_ELEMENTS", data.draw(st.integers(1, 8)))
        expect_plain(Detector().find(new, old), new, old)


@pytest.mark.parametrize("share", SHARES)
def test_densities_that_differ_from_block_to_block(share: float) -> None:
    size = (1 << 21) + 12_345
    new, old = random_pair(size, torch.bfloat16, share, 0)
    new[: size // 2] = old[: size // 2]
    expect_plain(Detector().find(new, old), new, old)


def test_threads_are_made_once_and_end_with_close() -> None:
    new, old = random_pair(1 << 21, torch.int16, 0.01, 0)

    def threads() -> set[str]:
        return {one.name for one in threading.enumerate() if one.name.startswith("weightsync-detect")}

    with Detector(2) as detector:
        assert not threads()
        for _ in range(3):
            expect_plain(detector.find(new, old), new, old)
            assert len(threads()) == 1
    assert not threads()
    detector.close()


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="0 threads"):
        Detector(0)
    with pytest.raises(PatchMismatch, match="one dtype and shape"):
        Detector().find(torch.zeros(2), torch.zeros(3))
