"""Mini-batch plans and every way they are refused; local counts; merging; bookkeeping of rates and clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.batching.advantages import group_advantages, whitened
from weightsync.reference.batching.bookkeeping import SampleClock, UpdateRecord, clip_coefficient
from weightsync.reference.batching.collective import agreed_steps
from weightsync.reference.batching.merge import merged
from weightsync.reference.batching.minibatch import (
    GLOBAL_COUNTS,
    LOCAL_COUNTS,
    PROMPT_COUNTS,
    MinibatchPlan,
    dealt,
    local_counts,
    plan_minibatches,
    ranges,
    rechunked,
    with_iterations,
)
from weightsync.reference.errors import BatchError
from weightsync.reference.params import same_bits
from weightsync.testing.batches import each_rank

small = st.integers(-1, 12)


def rules(rbs: int, n: int, dp: int, gbs: int | None, steps: int | None) -> MinibatchPlan | None:
    """The plan by its eight rules, one after the other, or None where one is broken."""
    if rbs <= 0 or n <= 0 or dp <= 0 or (gbs is not None and gbs <= 0):
        return None
    if steps is None and (gbs is None or rbs * n % gbs):
        return None
    minis = steps if steps is not None else rbs * n // (gbs or 1)
    if minis <= 0 or rbs % minis or rbs // minis % dp:
        return None
    whole = rbs // minis * n
    if whole % dp or (gbs is not None and gbs != whole):
        return None
    return MinibatchPlan(minis, rbs // minis, n, whole, whole // dp)


@given(
    small,
    st.integers(-1, 4),
    st.integers(-1, 4),
    st.none() | st.integers(-1, 24),
    st.none() | st.integers(-1, 4),
)
def test_a_plan_is_made_exactly_where_its_rules_hold(
    rbs: int, n: int, dp: int, gbs: int | None, steps: int | None
) -> None:
    def plan() -> MinibatchPlan:
        return plan_minibatches(
            rollout_batch_size=rbs,
            n_samples_per_prompt=n,
            dp_size=dp,
            global_batch_size=gbs,
            num_steps_per_rollout=steps,
        )

    expected = rules(rbs, n, dp, gbs, steps)
    if expected is None:
        with pytest.raises(ValueError, match=r"expected|give one"):
            plan()
    else:
        assert plan() == expected
        counts = expected.counts()
        assert sum(counts[LOCAL_COUNTS]) * dp == sum(counts[GLOBAL_COUNTS]) == rbs * n
        assert sum(counts[PROMPT_COUNTS]) == rbs


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_batch_size": 0}, "rollout_batch_size is 0"),
        ({"n_samples_per_prompt": 0}, "n_samples_per_prompt is 0"),
        ({"dp_size": -1}, "dp_size is -1"),
        ({"global_batch_size": None}, "neither global_batch_size nor num_steps_per_rollout"),
        ({"global_batch_size": 0}, "global_batch_size is 0"),
        ({"global_batch_size": 7}, "global_batch_size 7 does not divide the 32 samples"),
        ({"global_batch_size": None, "num_steps_per_rollout": 0}, "num_steps_per_rollout is 0"),
        ({"num_steps_per_rollout": 3}, "optimizer steps, 3, does not divide rollout_batch_size 8"),
        ({"dp_size": 3}, "dp_size 3 does not divide the 4 prompts"),
        ({"num_steps_per_rollout": 4}, "global_batch_size is 16, but 4 steps of 2 prompts"),
    ],
)
def test_each_refusal_names_what_was_found(given: dict[str, Any], said: str) -> None:
    right = {"rollout_batch_size": 8, "n_samples_per_prompt": 4, "dp_size": 2, "global_batch_size": 16}
    assert plan_minibatches(**right).counts()[LOCAL_COUNTS] == [8, 8]
    with pytest.raises(BatchError, match=said):
        plan_minibatches(**{**right, **given})


@pytest.mark.parametrize("wrong", [[], [0, 6], [3, 2], [6.0], [True] * 6, "6", None, 6, [-1, 7], [3, 4]])
def test_wrong_local_counts_are_refused(wrong: object) -> None:
    with pytest.raises(BatchError, match=LOCAL_COUNTS):
        local_counts({LOCAL_COUNTS: wrong}, 6, global_batch_size=6, dp_size=1)


def test_local_counts_of_a_batch_count_and_without_them_the_global_batch_size_does() -> None:
    assert local_counts({LOCAL_COUNTS: [1, 5]}, 6, global_batch_size=99, dp_size=98) == (1, 5)
    assert local_counts({}, 6, global_batch_size=4, dp_size=2) == (2, 2, 2)
    assert local_counts({}, 2, global_batch_size=8, dp_size=2) == (2,)
    with pytest.raises(BatchError, match="does not divide its 7 samples"):  # the last one would be dropped
        local_counts({}, 7, global_batch_size=4, dp_size=2)
    with pytest.raises(BatchError, match="dp_size 3 does not divide global_batch_size 4"):
        local_counts({}, 6, global_batch_size=4, dp_size=3)


@given(st.integers(1, 8), st.integers(1, 8))
def test_pieces_are_equal_consecutive_and_all_there(times: int, each: int) -> None:
    batch = {"rewards": list(range(times * each))}
    cut = with_iterations(batch, times * each, times)
    counts = local_counts(cut, times * each, global_batch_size=times * each, dp_size=1)
    assert counts == (each,) * times
    assert [number for step in ranges(counts) for number in step] == list(range(times * each))
    assert cut["rewards"] is batch["rewards"]
    assert (LOCAL_COUNTS in cut) == (times > 1)


def test_one_iteration_leaves_the_batch_as_it_is() -> None:
    batch = {LOCAL_COUNTS: [2, 4], "x": torch.zeros(6)}
    assert with_iterations(batch, 6, 1) == batch
    assert with_iterations(batch, 6, 3)[LOCAL_COUNTS] == [2, 2, 2]
    assert batch[LOCAL_COUNTS] == [2, 4]


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_split_that_leaves_samples_over_is_refused(samples: int, times: int) -> None:
    if samples % times:
        with pytest.raises(
            BatchError, match=f"num_iters_per_train_update {times} does not divide the {samples}"
        ):
            rechunked(samples, times)
    else:
        assert rechunked(samples, times) == (samples // times,) * times


def test_ranks_that_differ_in_steps_all_refuse() -> None:
    def steps(rank: int, reduce: Any) -> str:
        try:
            return str(agreed_steps(2 + (rank == 1), reduce))
        except BatchError as error:
            return str(error)

    assert len(set(each_rank(3, steps, max))) == 1
    assert "2 to 3 optimizer steps" in each_rank(3, steps, max)[0]
    assert each_rank(1, steps, max) == ["2"]


@given(st.integers(1, 30), st.integers(1, 30))
def test_dealt_samples_are_all_there_in_order(samples: int, parts: int) -> None:
    if samples < parts:
        with pytest.raises(BatchError, match=f"{samples} samples are to be dealt to {parts} takers"):
            dealt(samples, parts)
        return
    found = dealt(samples, parts)
    assert [number for part in found for number in part] == list(range(samples))
    assert max(map(len, found)) - min(map(len, found)) <= 1


# ---- merging ----------------------------------------------------------------------------------------------------


def parts() -> list[dict[str, Any]]:
    return [
        {"tokens": torch.arange(n * 3).view(n, 3) + n, "texts": ["a"] * n, "temperature": math.nan, "step": 4}
        for n in (2, 1)
    ]


def test_lists_are_joined_rows_are_joined_and_what_is_shared_stays() -> None:
    first, second = parts()
    found = merged([first, second], [2, 1])
    assert same_bits(found["tokens"], torch.cat([first["tokens"], second["tokens"]]))
    assert found["texts"] == ["a", "a", "a"]
    assert found["step"] == 4
    assert math.isnan(found["temperature"])
    assert first["texts"] == ["a", "a"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"step": 5}, "key 'step' is 5 in batch 1 and 4 in batch 0"),
        ({"step": 4.0}, "key 'step' is 4.0 in batch 1"),
        ({"temperature": 1.0}, "key 'temperature'"),
        ({"texts": "a"}, "key 'texts' is a list and a single value"),
        ({"tokens": [1]}, "key 'tokens' is a list and a tensor"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, "expected torch.int64 of shape .1, 3."),
        ({"tokens": torch.zeros(1, 4, dtype=torch.int64)}, "one row per sample"),
        ({"tokens": torch.zeros(1, 3)}, "torch.float32"),
        ({"more": 1}, r"differ in keys \['more'\]"),
    ],
)
def test_what_cannot_be_merged_is_refused_by_name(change: Mapping[str, Any], said: str) -> None:
    first, second = parts()
    with pytest.raises(BatchError, match=said):
        merged([first, {**second, **change}], [2, 1])


def test_zeros_of_two_signs_are_two_values() -> None:
    with pytest.raises(BatchError, match="key 'a'"):
        merged([{"a": 0.0}, {"a": -0.0}], [1, 1])


# ---- rates, clips, advantages -----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 5))
def test_a_split_batch_moves_the_learning_rate_as_far_as_an_unsplit_one(
    sizes: Sequence[int], times: int
) -> None:
    whole, split = SampleClock(lambda seen: 1 / (1 + seen)), SampleClock(lambda seen: 1 / (1 + seen))
    for size in sizes:
        whole.step(size * times, 0.5, 1.0)
        records = [split.step(size, 2.0 + number, 1.0) for number in range(times)]
        assert split.seen == whole.seen
        assert split.lr == whole.lr
        update = UpdateRecord.of(records)
        assert (update.steps, update.samples, update.clipped) == (times, size * times, times)
        assert update.grad_norm == 1.0 + times
        assert update.lr == records[-1].lr


@given(st.floats(0, 1e9), st.floats(1e-3, 1e3))
def test_clipped_norms_are_at_most_the_largest(norm: float, most: float) -> None:
    assert norm * clip_coefficient(norm, most) <= most * (1 + 1e-15)
    assert clip_coefficient(min(norm, most), most) == 1.0


def test_advantages_of_pieces_are_others_than_those_of_the_whole_batch() -> None:
    rewards = torch.tensor([0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0])
    mask = torch.ones(8, dtype=torch.bool)
    whole = whitened(rewards, mask)
    pieces = torch.cat([whitened(part, mask[:4]) for part in rewards.split(4)])
    assert int((whole.sign() != pieces.sign()).sum()) == 4
    with pytest.raises(BatchError, match="whiten the whole batch at once"):
        whitened(rewards[:1], mask[:1])


def test_groups_without_differences_teach_nothing() -> None:
    found = group_advantages(torch.tensor([1.0, 1.0, 0.0, 1.0]), 2)
    assert found[:2].tolist() == [0.0, 0.0]
    assert float(found[3]) == -float(found[2]) > 0
    with pytest.raises(BatchError, match="whole groups"):
        group_advantages(torch.zeros(5), 2)
