"""Mini-batches: how many optimizer steps a rollout batch makes, and which samples of a rank each of them sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from weightsync.reference.errors import BatchError

LOCAL_COUNTS = "rollout_mini_local_sample_counts"
"""Key of a batch: how many samples of this rank each optimizer step sees, in order."""

GLOBAL_COUNTS = "rollout_mini_global_sample_counts"
"""Key of a batch: how many samples of all data-parallel ranks each optimizer step sees."""

PROMPT_COUNTS = "rollout_mini_prompt_group_counts"
"""Key of a batch: how many prompt groups of all data-parallel ranks each optimizer step sees."""


@dataclass(frozen=True, slots=True)
class MinibatchPlan:
    """How one rollout batch is cut into mini-batches, one per optimizer step, equal on all data-parallel ranks.

    Attributes:
        minibatches: how many there are.
        prompts: prompt groups in each, over all ranks.
        samples_per_prompt: samples in a prompt group.
        samples: samples in each mini-batch, over all ranks.
        local_samples: those of one rank.
    """

    minibatches: int
    prompts: int
    samples_per_prompt: int
    samples: int
    local_samples: int

    def counts(self) -> dict[str, list[int]]:
        """The three keys of a batch that say so: see ``LOCAL_COUNTS``, ``GLOBAL_COUNTS`` and ``PROMPT_COUNTS``."""
        each = {LOCAL_COUNTS: self.local_samples, GLOBAL_COUNTS: self.samples, PROMPT_COUNTS: self.prompts}
        return {key: [count] * self.minibatches for key, count in each.items()}


def plan_minibatches(
    *,
    rollout_batch_size: int,
    n_samples_per_prompt: int,
    dp_size: int,
    global_batch_size: int | None = None,
    num_steps_per_rollout: int | None = None,
) -> MinibatchPlan:
    """Cut a rollout batch into mini-batches of whole prompt groups; names are those of slime's and Relax's arguments.

    Args:
        rollout_batch_size: prompts in the rollout batch.
        n_samples_per_prompt: samples drawn to each of them.
        dp_size: data-parallel ranks.
        global_batch_size: samples in an optimizer step, over all ranks.
        num_steps_per_rollout: optimizer steps; left out, it follows from ``global_batch_size``.

    Raises:
        BatchError: a number is not positive, something does not divide, or the last two contradict each other.
    """
    for name, value in (
        ("rollout_batch_size", rollout_batch_size),
        ("n_samples_per_prompt", n_samples_per_prompt),
        ("dp_size", dp_size),
    ):
        _require_positive(name, value)
    every = rollout_batch_size * n_samples_per_prompt
    if global_batch_size is not None:
        _require_positive("global_batch_size", global_batch_size)
    if num_steps_per_rollout is None:
        if global_batch_size is None:
            raise BatchError(
                "neither global_batch_size nor num_steps_per_rollout is given; give one of them, so that the number of "
                "optimizer steps is known"
            )
        said, what = f"global_batch_size {global_batch_size}", f"the {every} samples of a rollout batch"
        _require_divides(global_batch_size, every, said, what)
        minibatches = every // global_batch_size
    else:
        _require_positive("num_steps_per_rollout", num_steps_per_rollout)
        minibatches = num_steps_per_rollout
    said, what = f"the number of optimizer steps, {minibatches},", f"rollout_batch_size {rollout_batch_size}"
    _require_divides(minibatches, rollout_batch_size, said, what)
    prompts = rollout_batch_size // minibatches
    _require_divides(dp_size, prompts, f"dp_size {dp_size}", f"the {prompts} prompts of a mini-batch")
    samples = prompts * n_samples_per_prompt
    if global_batch_size is not None and global_batch_size != samples:
        raise BatchError(
            f"global_batch_size is {global_batch_size}, but {minibatches} steps of {prompts} prompts with "
            f"{n_samples_per_prompt} samples have {samples} each; expected the same number, so leave one of "
            "global_batch_size and num_steps_per_rollout out"
        )
    return MinibatchPlan(minibatches, prompts, n_samples_per_prompt, samples, samples // dp_size)


def local_counts(
    batch: Mapping[str, Any], samples: int, *, global_batch_size: int, dp_size: int
) -> tuple[int, ...]:
    """How many of this rank's samples each optimizer step sees, in order; there are as many steps as numbers.

    What the batch says under ``LOCAL_COUNTS`` counts. Without that key a step sees this rank's part of
    ``global_batch_size``, or all samples if there are no more than that.

    Args:
        batch: a rank's batch; only that key is read.
        samples: how many the rank holds.
        global_batch_size: samples in an optimizer step, over all ranks.
        dp_size: data-parallel ranks.

    Raises:
        BatchError: the counts are not positive integers that add up to ``samples``, or would leave samples over.
    """
    _require_positive("the rank's number of samples", samples)
    if LOCAL_COUNTS in batch:
        found = batch[LOCAL_COUNTS]
        whole = isinstance(found, Sequence) and not isinstance(found, str | bytes) and len(found) > 0
        if not whole or not all(type(one) is int and one > 0 for one in found) or sum(found) != samples:
            raise BatchError(
                f"key {LOCAL_COUNTS!r} is {found!r}; expected a list of positive integers that add up to the "
                f"{samples} samples of this rank, one for each optimizer step"
            )
        return tuple(found)
    _require_positive("global_batch_size", global_batch_size)
    _require_positive("dp_size", dp_size)
    _require_divides(
        dp_size, global_batch_size, f"dp_size {dp_size}", f"global_batch_size {global_batch_size}"
    )
    each = global_batch_size // dp_size
    if samples <= each:
        return (samples,)
    _require_divides(each, samples, f"this rank's {each} of global_batch_size", f"its {samples} samples")
    return (each,) * (samples // each)


def rechunked(samples: int, num_iters_per_train_update: int) -> tuple[int, ...]:
    """The counts of ``num_iters_per_train_update`` equal consecutive pieces of a rank's samples.

    Raises BatchError when it does not divide ``samples``.

    >>> rechunked(12, 4)
    (3, 3, 3, 3)
    """
    _require_positive("num_iters_per_train_update", num_iters_per_train_update)
    _require_positive("the rank's number of samples", samples)
    times = num_iters_per_train_update
    said = f"num_iters_per_train_update {times}"
    _require_divides(times, samples, said, f"the {samples} samples of a rank")
    return (samples // times,) * times


def with_iterations(
    batch: Mapping[str, Any], samples: int, num_iters_per_train_update: int
) -> dict[str, Any]:
    """The merged batch of a rank, with as many optimizer steps as asked for; its values are borrowed, not copied.

    1 leaves the batch as it is, whatever counts it has. Advantages are to be in the batch already: they are of the
    whole batch, not of a piece.

    Raises BatchError when the samples cannot be cut so.
    """
    counts = rechunked(samples, num_iters_per_train_update)
    return dict(batch) if len(counts) == 1 else {**batch, LOCAL_COUNTS: list(counts)}


def ranges(counts: Sequence[int]) -> tuple[range, ...]:
    """The sample numbers of each step: consecutive, in order.

    >>> ranges((2, 3))
    (range(0, 2), range(2, 5))
    """
    return tuple(range(first, end) for first, end in pairwise((0, *accumulate(counts))))


def dealt(samples: int, parts: int) -> tuple[range, ...]:
    """Consecutive samples for ``parts`` takers whose numbers differ by one at most; the first ones get more.

    Raises BatchError when there are fewer samples than takers, since one of them would have nothing to do.

    >>> [len(part) for part in dealt(10, 4)]
    [3, 3, 2, 2]
    """
    _require_positive("the number of takers", parts)
    if samples < parts:
        raise BatchError(
            f"{samples} samples are to be dealt to {parts} takers; expected one for each at least, so draw more "
            "samples or take fewer ranks"
        )
    each, more = divmod(samples, parts)
    return ranges([each + (number < more) for number in range(parts)])


def _require_positive(name: str, value: int) -> None:
    if type(value) is not int or value <= 0:
        raise BatchError(f"{name} is {value!r}; expected a positive integer")


def _require_divides(divisor: int, number: int, said: str, what: str) -> None:
    """Raise BatchError unless ``divisor``, called ``said``, divides ``number``, called ``what``."""
    if number % divisor:
        raise BatchError(f"{said} does not divide {what}; expected equal parts, so change one of them")
