"""Staging: the same bits with and without pinned buffers, which live until the stream has passed."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.errors import BatchError
from weightsync.reference.params import same_bits
from weightsync.reference.staging import HostStream, Staged, Staging
from weightsync.testing.streams import LateStream

Sample = dict[str, Tensor | None]


@st.composite
def sample_lists(draw: st.DrawFn) -> list[Sample]:
    """Samples with pixels, ragged sounds and gaps; bits of any kind."""
    found: list[Sample] = []
    for number in range(draw(st.integers(1, 5))):
        sample: Sample = {}
        if draw(st.booleans()):
            sample["pixels"] = torch.randn(draw(st.integers(0, 3)), 4)
        if draw(st.booleans()):
            sample["sound"] = torch.full((1, draw(st.integers(0, 5)), 2), float("nan")) * number
        if draw(st.booleans()):
            sample["grid"] = None if draw(st.booleans()) else torch.tensor([[1, number]])
        found.append(sample)
    return found


def equal(a: Staged, b: Staged) -> bool:
    same = a.tensors.keys() == b.tensors.keys() and (a.rows, a.sizes) == (b.rows, b.sizes)
    return same and all(same_bits(tensor, b.tensors[key]) for key, tensor in a.tensors.items())


@given(st.lists(sample_lists(), min_size=1, max_size=3))
def test_pinned_copies_are_the_plain_ones_bit_for_bit_however_late_they_happen(
    batches: list[list[Sample]],
) -> None:
    stream = LateStream()
    pinned = Staging(stream, count().__next__, pin=True)
    plain = Staging(HostStream(), count().__next__)
    pairs = []
    for samples in batches:
        pairs.append((pinned.stage(samples), plain.stage(samples)))
        for sample in samples:  # what was staged may be changed
            for value in sample.values():
                if value is not None:
                    value.zero_()
    assert pinned.held == pinned.copies
    pinned.close()
    assert pinned.held == 0
    assert all(equal(late, now) for late, now in pairs)
    assert pinned.copied_bytes == pinned.pinned_bytes == plain.copied_bytes
    assert (pinned.copies, plain.pinned_bytes, plain.held) == (plain.copies, 0, 0)


def test_what_each_sample_has_can_be_told() -> None:
    found = Staging(HostStream(), count().__next__).stage(
        [{"a": torch.ones(2, 3)}, {"a": None}, {"a": torch.ones(1, 5), "b": None}]
    )
    assert found.tensors.keys() == {"a"}
    assert found.tensors["a"].shape == (3, 5)
    assert found.tensors["a"].sum(1).tolist() == [3, 3, 5]
    assert found.rows == {"a": (2, 0, 1), "b": (0, 0, 0)}
    assert found.sizes == {"a": ((3,), None, (5,)), "b": (None, None, None)}


def test_buffers_are_dropped_once_their_copies_are_over_and_not_before() -> None:
    stream = LateStream()
    staging = Staging(stream, count().__next__, pin=True)
    staging.stage([{"a": torch.ones(4), "b": torch.ones(2)}])
    stream.run(1)
    staging.release()
    assert staging.held == 2
    stream.run()
    staging.release()
    assert staging.held == 0


class ForgetsBuffers(Staging):
    """The fault: buffers go when ``stage`` returns."""

    def stage(self, samples: object) -> Staged:
        found = super().stage(samples)  # type: ignore[arg-type]
        self._held = []
        return found


def test_a_buffer_that_is_dropped_early_is_seen() -> None:
    stream = LateStream()
    found = ForgetsBuffers(stream, count().__next__, pin=True).stage([{"a": torch.ones(4)}])
    stream.run()
    assert not same_bits(found.tensors["a"], torch.ones(4))


def test_without_a_device_nothing_is_pinned_and_copies_are_new_objects() -> None:
    staging, source = Staging(HostStream(), count().__next__, pin=True), torch.ones(3)
    found = staging.stage([{"a": source}]).tensors["a"]
    assert (staging.pinned_bytes, staging.copies, staging.elapsed_ns) == (0, 1, 1)
    source.zero_()
    assert found.tolist() == [1, 1, 1]


@pytest.mark.parametrize("other", [torch.ones(2, 2), torch.ones(2, dtype=torch.int64), torch.tensor(1.0)])
def test_what_does_not_fit_together_is_refused_by_name(other: Tensor) -> None:
    with pytest.raises(BatchError, match="key 'a'"):
        Staging(HostStream(), count().__next__).stage([{"a": torch.ones(2)}, {"a": other}])
