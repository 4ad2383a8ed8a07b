"""Micro-batches: what one forward and backward sees. As many on every data-parallel rank, none above the token cap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weightsync.reference.batching.balance import balanced
from weightsync.reference.batching.collective import Reduce, agreed_steps, alone
from weightsync.reference.batching.minibatch import ranges
from weightsync.reference.errors import BatchError


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The samples of one forward and backward.

    Attributes:
        samples: sample numbers of this rank, rising.
        dummy: this one only keeps the ranks in step. It runs a sample again that another micro-batch counts, and
            weighs exactly 0 in loss, gradients, token counts and metrics: see ``scaling.Share``.
    """

    samples: tuple[int, ...]
    dummy: bool = False


def static_microbatches(counts: Sequence[int], micro_batch_size: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """Per optimizer step its micro-batches of ``micro_batch_size`` consecutive samples.

    Args:
        counts: samples of this rank in each step: see ``minibatch.local_counts``.
        micro_batch_size: samples in each.

    Raises:
        BatchError: it does not divide the samples of a step.

    >>> [[one.samples for one in step] for step in static_microbatches((2, 4), 2)]
    [[(0, 1)], [(2, 3), (4, 5)]]
    """
    if micro_batch_size < 1:
        raise BatchError(f"micro_batch_size is {micro_batch_size}; expected a positive integer")
    for step, count in enumerate(counts):
        if count < 1 or count % micro_batch_size:
            raise BatchError(
                f"step {step} has {count} samples on this rank; expected a multiple of micro_batch_size "
                f"{micro_batch_size}, so change one of them or use a token cap"
            )
    return tuple(
        tuple(
            MicroBatch(tuple(numbers[first : first + micro_batch_size]))
            for first in range(0, len(numbers), micro_batch_size)
        )
        for numbers in ranges(counts)
    )


def dynamic_microbatches(
    lengths: Sequence[int],
    counts: Sequence[int],
    *,
    max_tokens: int,
    cp: int = 1,
    group_size: int = 1,
    max_reduce: Reduce = alone,
) -> tuple[tuple[MicroBatch, ...], ...]:
    """Per optimizer step its micro-batches of at most ``max_tokens * cp`` tokens, of nearly equal weight.

    A collective of the data-parallel group, in which every rank calls it. All ranks get as many micro-batches in a step
    as the rank that needs most; a rank with fewer samples than that gets dummies, at the end. A sample that is longer
    than the cap is alone in its micro-batch.

    Args:
        lengths: tokens of each sample of this rank, 0 or more.
        counts: samples of this rank in each step: see ``minibatch.local_counts``.
        max_tokens: the most tokens that one context-parallel rank takes at a time (``max_tokens_per_gpu``).
        cp: context-parallel ranks that share a micro-batch.
        group_size: with virtual pipeline stages, the number of micro-batches of a step is a multiple of this
            (``microbatch_group_size_per_vp_stage``).
        max_reduce: the maximum over the data-parallel ranks; called twice, with 2 numbers and with one per step.

    Returns:
        Per step its micro-batches, ordered by their first samples. Each sample of the step is in exactly one that is
        no dummy.

    Raises:
        BatchError: an argument makes no sense; or, on all ranks, they differ in the number of steps.
    """
    cap = _checked_cap(lengths, counts, max_tokens, cp, group_size)
    agreed_steps(len(counts), max_reduce)
    steps = ranges(counts)
    packed = [first_fit([lengths[number] for number in step], cap) for step in steps]
    most = max_reduce([len(bins) for bins in packed])
    return tuple(
        _exactly(-(-count // group_size) * group_size, bins, step, lengths, cap)
        for count, bins, step in zip(most, packed, steps, strict=True)
    )


def first_fit(lengths: Sequence[int], cap: int) -> list[list[int]]:
    """Bins of item numbers, each of at most ``cap`` tokens; an item above the cap is alone.

    Items go into the first bin with room, in the order given or longest first, whichever takes fewer bins.
    """
    orders = (range(len(lengths)), sorted(range(len(lengths)), key=lambda item: (-lengths[item], item)))
    packings = [_packed(order, lengths, cap) for order in orders]
    return min(packings, key=len)


def within(parts: Sequence[Sequence[int]], lengths: Sequence[int], cap: int) -> bool:
    """True when no part of several items has more than ``cap`` tokens, and no long item has company."""
    return all(len(part) == 1 or sum(lengths[item] for item in part) <= cap for part in parts)


def split_heaviest(bins: list[list[int]], lengths: Sequence[int], count: int) -> None:
    """Halve the heaviest bin of several items, in place, until there are ``count`` bins.

    Among bins of one weight the last is halved; items go to the lighter half, longest first, and neither is empty.

    Raises:
        BatchError: there are fewer items than ``count``.
    """
    while len(bins) < count:
        several = [number for number, one in enumerate(bins) if len(one) > 1]
        if not several:
            raise BatchError(
                f"{len(bins)} samples cannot make {count} micro-batches; expected one for each at least, so draw more "
                "samples or take fewer ranks"
            )
        heaviest = max(several, key=lambda number: (sum(lengths[item] for item in bins[number]), number))
        items = sorted(bins[heaviest], key=lambda item: (-lengths[item], item))
        halves: tuple[list[int], list[int]] = ([items[0]], [items[1]])
        for item in items[2:]:
            min(halves, key=lambda half: sum(lengths[one] for one in half)).append(item)
        bins[heaviest : heaviest + 1] = [sorted(half) for half in halves]


def _packed(order: Sequence[int], lengths: Sequence[int], cap: int) -> list[list[int]]:
    bins: list[list[int]] = []
    filled: list[int] = []
    for item in order:
        for number, used in enumerate(filled):
            if used + lengths[item] <= cap:
                bins[number].append(item)
                filled[number] += lengths[item]
                break
        else:
            bins.append([item])
            filled.append(lengths[item])
    return bins


def _exactly(
    count: int, bins: list[list[int]], step: range, lengths: Sequence[int], cap: int
) -> tuple[MicroBatch, ...]:
    """``count`` micro-batches of one step, of which ``bins`` are a packing into fewer or as many."""
    local = [lengths[number] for number in step]
    real = min(count, len(local))
    parts: Sequence[Sequence[int]] = balanced(local, real)
    if not within(parts, local, cap):  # balance knows no cap
        split_heaviest(bins, local, real)
        parts = bins
    found = sorted(tuple(step[item] for item in sorted(part)) for part in parts)
    shortest = min(step, key=lambda number: (lengths[number], number))
    dummies = [MicroBatch((shortest,), dummy=True)] * (count - real)
    return (*map(MicroBatch, found), *dummies)


def _checked_cap(
    lengths: Sequence[int], counts: Sequence[int], max_tokens: int, cp: int, group_size: int
) -> int:
    for name, value in (("max_tokens", max_tokens), ("cp", cp), ("group_size", group_size)):
        if value < 1:
            raise BatchError(f"{name} is {value}; expected a positive integer")
    if not counts or min(counts) < 1 or sum(counts) != len(lengths):
        raise BatchError(
            f"the steps have {list(counts)} samples and there are {len(lengths)} lengths; expected positive counts "
            "that add up to the samples of this rank"
        )
    if min(lengths) < 0:
        raise BatchError(
            f"sample {list(lengths).index(min(lengths))} has {min(lengths)} tokens; expected 0 or more"
        )
    return max_tokens * cp
