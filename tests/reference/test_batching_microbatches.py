"""Laws of micro-batches: as many on each rank, none above the cap, each sample once; balance; chunks; schedules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.batching.balance import balanced
from weightsync.reference.batching.context import cut, join, loss_slices, taken, zigzag
from weightsync.reference.batching.microbatch import dynamic_microbatches, first_fit, static_microbatches
from weightsync.reference.batching.minibatch import ranges, rechunked
from weightsync.reference.batching.schedule import Schedule, pack_first
from weightsync.reference.errors import BatchError
from weightsync.reference.params import same_bits
from weightsync.testing.batches import Job, jobs, microbatches

lengths_of = st.lists(st.integers(0, 20), min_size=1, max_size=24)


@given(jobs())
def test_ranks_run_as_many_micro_batches_none_above_the_cap_each_sample_once(job: Job) -> None:
    plan = microbatches(job)
    steps = ranges(rechunked(job.each, job.iterations))
    for number, step in enumerate(steps):
        counts = {len(rank[number]) for rank in plan}
        assert len(counts) == 1
        assert counts.pop() % job.group_size == 0
        for rank, of_rank in enumerate(plan):
            real = [one for one in of_rank[number] if not one.dummy]
            assert sorted(item for one in real for item in one.samples) == list(step)
            assert [one.dummy for one in of_rank[number]] == sorted(one.dummy for one in of_rank[number])
            assert [one.samples for one in real] == sorted(tuple(sorted(one.samples)) for one in real)
            for one in of_rank[number]:
                tokens = sum(len(job.local(rank)[item].tokens) for item in one.samples)
                assert len(one.samples) == 1 or tokens <= job.max_tokens * job.cp


@given(lengths_of, st.integers(1, 30))
def test_no_more_micro_batches_than_first_fit_needs(lengths: Sequence[int], cap: int) -> None:
    ((*found,),) = dynamic_microbatches(lengths, [len(lengths)], max_tokens=cap)
    assert len(found) == len(first_fit(lengths, cap))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"cp": 0}, "cp is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"counts": [1]}, "add up to the samples"),
        ({"counts": []}, "add up to the samples"),
        ({"counts": [3, -1]}, "positive counts"),
        ({"lengths": [1, -2]}, "sample 1 has -2 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, object], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        dynamic_microbatches(**{"lengths": [1, 2], "counts": [2], "max_tokens": 4, **more})  # type: ignore[arg-type]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_static_micro_batches_are_consecutive(parts: Sequence[int], size: int) -> None:
    counts = [part * size for part in parts]
    found = static_microbatches(counts, size)
    assert [len(step) for step in found] == list(parts)
    assert [item for step in found for one in step for item in one.samples] == list(range(sum(counts)))
    if size > 1:
        with pytest.raises(BatchError, match=f"step {len(counts)} has {size + 1} samples"):
            static_microbatches([*counts, size + 1], size)


# ---- balance ----------------------------------------------------------------------------------------------------


@given(lengths_of, st.integers(1, 24), st.booleans())
def test_parts_are_a_partition_none_empty(weights: Sequence[int], parts: int, equal: bool) -> None:
    if len(weights) < parts or (equal and len(weights) % parts):
        with pytest.raises(BatchError, match="expected"):
            balanced(weights, parts, equal_size=equal)
        return
    found = balanced(weights, parts, equal_size=equal)
    assert len(found) == parts
    assert all(found)
    assert sorted(item for part in found for item in part) == list(range(len(weights)))
    assert list(found) == sorted(tuple(sorted(part)) for part in found)
    if equal:
        assert {len(part) for part in found} == {len(weights) // parts}
    assert found == balanced(list(weights), parts, equal_size=equal)


@given(st.lists(st.integers(0, 30), min_size=2, max_size=8))
def test_two_parts_are_nearly_as_even_as_can_be(weights: Sequence[int]) -> None:
    """Karmarkar-Karp is within a sixth of the larger sum of the best cut in two (Fischetti and Martello, 1987)."""
    total = sum(weights)
    best = min(
        max(sum(weights[i] for i in chosen), total - sum(weights[i] for i in chosen))
        for size in range(1, len(weights))
        for chosen in combinations(range(len(weights)), size)
    )
    assert max(sum(weights[i] for i in part) for part in balanced(weights, 2)) <= best * 7 / 6 + 1e-9


# ---- context parallelism ----------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 6))
def test_chunks_hold_each_position_once_and_join_to_the_same_bits(tokens: int, cp: int) -> None:
    owned = [place for rank in range(cp) for chunk in zigzag(tokens, cp, rank) for place in chunk]
    assert sorted(owned) == list(range(tokens))
    whole = torch.randn(tokens, 3)
    assert same_bits(join([cut(whole, cp, rank) for rank in range(cp)]), whole)


@given(st.integers(1, 40), st.integers(0, 39), st.integers(1, 6))
def test_each_loss_token_is_with_the_rank_that_predicts_it(tokens: int, response: int, cp: int) -> None:
    if response >= tokens:
        with pytest.raises(BatchError, match="nothing predicts the first token"):
            loss_slices(tokens, response, cp, 0)
        return
    seen = []
    for rank in range(cp):
        held = cut(torch.arange(tokens), cp, rank)
        for one in loss_slices(tokens, response, cp, rank):
            assert (held[one.logits.start : one.logits.stop] + 1).tolist() == list(one.tokens)
            seen += one.tokens
    assert sorted(seen) == list(range(tokens - response, tokens))


def test_a_rank_without_loss_tokens_still_has_a_gradient() -> None:
    values = torch.randn(4, requires_grad=True)
    empty = taken(values, loss_slices(8, 1, 2, 1))
    assert len(empty) == 0
    empty.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [0.0] * 4


def test_parts_of_other_samples_do_not_join() -> None:
    with pytest.raises(BatchError, match="rank 0 of 2 gives 1 of 4"):
        join([torch.zeros(1), torch.zeros(3)])
    with pytest.raises(BatchError, match="rank 2 of 2"):
        zigzag(4, 2, 2)


# ---- pack first -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 30),
    st.booleans(),
)
def test_a_schedule_keeps_rollouts_together_and_ranks_in_step(
    ids: list[int], gbs: int, dp: int, group: int, cap: int, costs: bool
) -> None:
    lengths = [(7 * number) % 11 for number in range(len(ids))]

    def make(allow: bool) -> Schedule:
        return pack_first(
            ids, lengths, global_batch_size=gbs, dp=dp, group_size=group, max_tokens=cap,
            costs=lengths if costs else None, allow_trailing=allow,
        )  # fmt: skip

    order = list(dict.fromkeys(ids))
    kept = len(order) // gbs * gbs
    steps = [order[first : first + gbs] for first in range(0, kept, gbs)]
    members = [[number for number, one in enumerate(ids) if one in step] for step in steps]
    needed = [len(first_fit([lengths[number] for number in step], cap)) for step in members]
    rounded = [-(-count // (dp * group)) * dp * group for count in needed]
    if not steps or any(len(step) < count for step, count in zip(members, rounded, strict=True)):
        with pytest.raises(BatchError, match="expected"):
            make(True)
        return
    if kept < len(order):
        with pytest.raises(BatchError, match="allow trailing ones"):
            make(False)
    found = make(True)
    assert found.trailing == tuple(order[kept:])
    assert len(found.steps) == len(steps)
    for step, chosen in zip(found.steps, members, strict=True):
        assert len({len(rank) for rank in step}) == 1
        assert len(step[0]) % group == 0
        samples = [sample for rank in step for one in rank for sample in one]
        assert sorted(samples) == chosen
        for one in (one for rank in step for one in rank):
            assert one
            assert len(one) == 1 or sum(lengths[sample] for sample in one) <= cap
    for rank in range(dp):
        flat = [place for step in found.local(rank) for one in step for place in one]
        assert flat == list(range(len(found.samples_of(rank))))


def test_consecutive_micro_batches_are_dealt_in_turn() -> None:
    found = pack_first([0, 0, 1, 1] * 2, [1] * 8, global_batch_size=1, dp=2, micro_batch_size=2)
    assert found.steps == ((((0, 1),), ((4, 5),)), (((2, 3),), ((6, 7),)))
    with pytest.raises(BatchError, match="a step has 4 samples; expected a multiple of 6"):
        pack_first([0, 0, 1, 1] * 2, [1] * 8, global_batch_size=1, dp=2, micro_batch_size=3)
    with pytest.raises(BatchError, match="either max_tokens or micro_batch_size"):
        pack_first([0], [1], global_batch_size=1, dp=1)
