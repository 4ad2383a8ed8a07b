"""Pack first, deal second: samples of whole rollouts are packed into micro-batches, which are dealt to the ranks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from weightsync.reference.batching.balance import balanced
from weightsync.reference.batching.microbatch import first_fit, split_heaviest, within
from weightsync.reference.errors import BatchError

Bins = tuple[tuple[int, ...], ...]
"""Micro-batches, as sample numbers."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who computes which samples when.

    Attributes:
        steps: per optimizer step, per rank, its micro-batches, as numbers of the samples given.
        trailing: rollout ids that fill no step. Nobody computes their samples: keep them for the next batch.
    """

    steps: tuple[tuple[Bins, ...], ...]
    trailing: tuple[Hashable, ...]

    def samples_of(self, rank: int) -> tuple[int, ...]:
        """The samples to send to a rank, in the order in which it computes them."""
        return tuple(sample for step in self.steps for one in step[rank] for sample in one)

    def local(self, rank: int) -> tuple[Bins, ...]:
        """The micro-batches of a rank per step, as places in ``samples_of(rank)``: 0 and on, without a gap."""
        place, found = 0, []
        for step in self.steps:
            bins = []
            for one in step[rank]:
                bins.append(tuple(range(place, place + len(one))))
                place += len(one)
            found.append(tuple(bins))
        return tuple(found)


def pack_first(
    rollout_ids: Sequence[Hashable],
    lengths: Sequence[int],
    *,
    global_batch_size: int,
    dp: int,
    max_tokens: int | None = None,
    micro_batch_size: int | None = None,
    cp: int = 1,
    group_size: int = 1,
    costs: Sequence[int] | None = None,
    allow_trailing: bool = False,
) -> Schedule:
    """A schedule in which every rank has as many micro-batches in a step as the others, without dummies.

    A pure function of its arguments, for one process that holds all samples.

    Args:
        rollout_ids: of each sample. A rollout's samples stay in one step; rollouts go in the order of first occurrence.
        lengths: tokens of each sample, 0 or more.
        global_batch_size: rollouts, not samples, in an optimizer step.
        dp: data-parallel ranks.
        max_tokens: pack up to ``max_tokens * cp`` tokens into a micro-batch; a longer sample is alone. Either this,
        micro_batch_size: or so many consecutive samples.
        cp: context-parallel ranks.
        group_size: with virtual pipeline stages, each rank's micro-batches of a step are a multiple of this.
        costs: of each sample, such as its operations; micro-batches are dealt so that ranks have nearly equal sums.
            Without them rank r gets every ``dp``-th, from r on.
        allow_trailing: return rollouts that fill no step as ``trailing``; otherwise they are an error.

    Raises:
        BatchError: too few rollouts or samples for a step, or samples that make no multiple of ``dp * group_size``
            micro-batches; rollouts would be left over, and that was not allowed.
    """
    if (max_tokens is None) == (micro_batch_size is None):
        raise BatchError("expected either max_tokens or micro_batch_size, not both and not neither")
    for name, value in (
        ("global_batch_size", global_batch_size), ("dp", dp), ("cp", cp), ("group_size", group_size),
        ("max_tokens", 1 if max_tokens is None else max_tokens),
        ("micro_batch_size", 1 if micro_batch_size is None else micro_batch_size),
    ):  # fmt: skip
        if value < 1:
            raise BatchError(f"{name} is {value}; expected a positive integer")
    if len(lengths) != len(rollout_ids) or (costs is not None and len(costs) != len(lengths)):
        raise BatchError(
            f"{len(rollout_ids)} rollout ids and {len(lengths)} lengths; expected one of each per sample"
        )
    if any(length < 0 for length in lengths):
        raise BatchError(f"lengths are {min(lengths)} and more; expected 0 or more")
    rollouts: dict[Hashable, list[int]] = {}
    for number, rollout in enumerate(rollout_ids):
        rollouts.setdefault(rollout, []).append(number)
    groups = list(rollouts.values())
    count = len(groups) // global_batch_size
    trailing = tuple(rollouts)[count * global_batch_size :]
    if count == 0 or (trailing and not allow_trailing):
        raise BatchError(
            f"{len(groups)} rollouts make {count} steps of global_batch_size {global_batch_size} and leave "
            f"{list(trailing)} over; expected whole steps, so draw more rollouts"
            + (", or allow trailing ones and keep them for the next batch" if count else "")
        )
    steps = []
    for step in range(count):
        chosen = groups[step * global_batch_size : (step + 1) * global_batch_size]
        samples = [number for group in chosen for number in group]
        local = [lengths[number] for number in samples]
        if max_tokens is not None:
            bins = _tokens_packed(local, max_tokens * cp, dp * group_size)
        else:
            bins = _consecutive(len(samples), micro_batch_size or 1, dp * group_size)
        weights = None if costs is None else [sum(costs[samples[item]] for item in one) for one in bins]
        steps.append(
            tuple(
                tuple(tuple(samples[item] for item in bins[number]) for number in dealt)
                for dealt in _dealt(len(bins), dp, weights)
            )
        )
    return Schedule(tuple(steps), trailing)


def _tokens_packed(lengths: Sequence[int], cap: int, multiple: int) -> list[list[int]]:
    bins = first_fit(lengths, cap)
    count = -(-len(bins) // multiple) * multiple
    split_heaviest(bins, lengths, count)
    even = balanced(lengths, count)
    return [list(one) for one in even] if within(even, lengths, cap) else [sorted(one) for one in bins]


def _consecutive(samples: int, size: int, multiple: int) -> list[list[int]]:
    if samples % (size * multiple):
        raise BatchError(
            f"a step has {samples} samples; expected a multiple of {size * multiple}, which is micro_batch_size {size} "
            f"times {multiple} for dp and group_size, so change one of them or use max_tokens"
        )
    return [list(range(first, first + size)) for first in range(0, samples, size)]


def _dealt(bins: int, dp: int, weights: Sequence[int] | None) -> Sequence[Sequence[int]]:
    if weights is None:
        return [range(rank, bins, dp) for rank in range(dp)]
    return balanced(weights, dp, equal_size=True)
