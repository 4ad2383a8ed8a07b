"""A schedule that somebody spoiled, and parts and shards that do not fit, are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, event, given
from hypothesis import strategies as st

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.reshard import Copy, require_complete, reshard, schedule
from weightsync.reference.shards import Part, parts
from weightsync.testing.cuts import two_cuts

Cut = tuple[Part, ...]


@given(cuts=two_cuts(replicas=False), data=st.data())
def test_a_spoiled_schedule_is_refused(cuts: tuple[tuple[int, ...], Cut, Cut], data: st.DataObject) -> None:
    shape, source, destination = cuts
    copies = list(schedule(source, destination))
    assume(copies)
    spot = data.draw(st.integers(0, len(copies) - 1))
    kind = data.draw(
        st.sampled_from(["dropped", "doubled", "out of order", "misplaced", "wrong rank", "too long"])
    )
    event(f"schedule: {kind}")
    copy = copies[spot]
    if kind == "dropped":
        del copies[spot]
    elif kind == "doubled":
        copies.insert(spot, copy)
    elif kind == "out of order":
        assume(len(copies) > 1)
        other = (spot + 1) % len(copies)
        copies[spot], copies[other] = copies[other], copies[spot]
    elif kind == "wrong rank":
        copies[spot] = replace(
            copy, source=data.draw(st.integers(-1, len(source)).filter(lambda r: r != copy.source))
        )
    else:
        assume(shape)
        dim = data.draw(st.integers(0, len(shape) - 1))
        start, end = copy.taken[dim]
        moved = (start, end + 1) if kind == "too long" else (start + 1, end + 1)
        copies[spot] = replace(copy, taken=(*copy.taken[:dim], moved, *copy.taken[dim + 1 :]))
    with pytest.raises(PlanMismatch, match="compute the schedule from both cuts again"):
        require_complete(copies, source, destination)


def test_two_swapped_intervals_of_one_size_are_seen() -> None:
    """Sizes and coverage are right; only the places are not."""
    source, destination = parts((8,), 2, 0, stride=2), parts((8,), 1, None)
    first, second, *rest = schedule(source, destination)
    swapped = [
        replace(first, taken=second.taken, source=second.source),
        replace(second, taken=first.taken, source=first.source),
        *rest,
    ]
    with pytest.raises(PlanMismatch, match=r"copy 0.*takes full indices .*\(2, 4\).* as .*\(0, 2\)"):
        require_complete(swapped, source, destination)
    naive = [Copy(rank, 0, ((0, 4),), ((4 * rank, 4 * rank + 4),)) for rank in range(2)]
    with pytest.raises(PlanMismatch, match="copy 0"):
        require_complete(naive, source, destination)


def test_parts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"shapes \[\[4\], \[5\]\]"):
        schedule(parts((4,), 2, 0), parts((5,), 1, 0))
    with pytest.raises(PlanMismatch, match="2 of the 4 elements of destination rank 0 are held by none of 1"):
        schedule(parts((4,), 2, 0)[:1], parts((4,), 1, None))
    with pytest.raises(PlanMismatch, match="held by none of 0"):
        schedule([], parts((4,), 1, None))
    halves = parts((4,), 2, 0)
    with pytest.raises(PlanMismatch, match="1 shards were given for 2"):
        reshard([torch.zeros(2)], halves, halves)
    with pytest.raises(PlanMismatch, match=r"rank 1 is torch.float32 \[3\], expected torch.float32 \[2\]"):
        reshard([torch.zeros(2), torch.zeros(3)], halves, halves)
    with pytest.raises(PlanMismatch, match=r"rank 1 is torch.float64"):
        reshard([torch.zeros(2), torch.zeros(2).double()], halves, halves)


def test_one_half_written_twice_instead_of_both_is_seen() -> None:
    """The number of elements is right."""
    halves, whole = parts((4,), 2, 0), parts((4,), 1, None)
    first, _ = schedule(halves, whole)
    with pytest.raises(PlanMismatch, match="write the same elements"):
        require_complete([first, first], halves, whole)
