"""Fault case 025: samples vanish, and fewer batches than workers come back, when the count does not divide."""

from __future__ import annotations

import pytest

from weightsync.reference.batching.minibatch import dealt, local_counts, rechunked
from weightsync.reference.errors import BatchError


@pytest.mark.parametrize(("samples", "parts", "sizes"), [(5, 4, [2, 1, 1, 1]), (10, 4, [3, 3, 2, 2])])
def test_the_remainder_is_spread(samples: int, parts: int, sizes: list[int]) -> None:
    """Fault case 025: each sample exactly once, in order."""
    found = dealt(samples, parts)
    assert [len(part) for part in found] == sizes
    assert [number for part in found for number in part] == list(range(samples))


def test_fewer_samples_than_workers_are_refused() -> None:
    """Fault case 025: 2 into 4, and the refusal says what to do."""
    with pytest.raises(
        BatchError, match="2 samples are to be dealt to 4 takers; expected one for each at least"
    ):
        dealt(2, 4)


@pytest.mark.parametrize(("samples", "parts"), [(5, 4), (10, 4), (2, 4)])
def test_cuts_that_must_be_equal_refuse_a_remainder(samples: int, parts: int) -> None:
    """Fault case 025: the same kind in optimizer steps, which drop no tail."""
    with pytest.raises(BatchError, match="does not divide"):
        rechunked(samples, parts)
    if samples > parts:
        with pytest.raises(BatchError, match="does not divide"):
            local_counts({}, samples, global_batch_size=parts, dp_size=1)


def test_full_rows_alone_lose_samples() -> None:
    """Fault case 025: the fault itself, cut into full rows: 8 of 10 samples are left."""
    rows = [list(range(10))[first : first + 2] for first in range(0, 8, 2)]
    assert [number for row in rows for number in row] != [number for part in dealt(10, 4) for number in part]
