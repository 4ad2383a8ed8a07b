"""Batches of samples and a model of their losses, computed at once and as data-parallel ranks compute them in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from weightsync.reference.batching.context import Slice, cut, loss_slices, taken
from weightsync.reference.batching.microbatch import MicroBatch, dynamic_microbatches
from weightsync.reference.batching.minibatch import rechunked
from weightsync.reference.batching.scaling import Divisor, Per, Share, share, step_divisors

VOCAB, WIDTH = 7, 5


@dataclass(frozen=True, eq=False)
class Sample:
    """Tokens (T,) int64, how many at their end have a loss, which of those count (response,) bool, the advantage."""

    tokens: Tensor
    response: int
    mask: Tensor
    advantage: float

    @property
    def in_loss(self) -> int:
        """Tokens that count."""
        return int(self.mask.sum())


@dataclass(frozen=True)
class Job:
    """How the samples of all ranks are computed: ``len(samples)`` is a multiple of ``dp * iterations``."""

    samples: tuple[Sample, ...]
    dp: int
    iterations: int
    cp: int
    group_size: int
    max_tokens: int
    per: Per

    def local(self, rank: int) -> tuple[Sample, ...]:
        """The samples of one data-parallel rank: every ``dp``-th."""
        return self.samples[rank :: self.dp]

    @property
    def each(self) -> int:
        """Samples per rank."""
        return len(self.samples) // self.dp


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Any job: DP 1 to 8, 1 to 8 iterations, CP 1 to 4, groups of 1 to 4 micro-batches; long and short samples."""
    dp, iterations = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    count = (
        dp
        * iterations
        * draw(st.integers(1, 4 if dp * iterations <= 8 else 2 if dp * iterations <= 16 else 1))
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    longest = draw(st.integers(2, 24))

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    samples = []
    for _ in range(count):
        tokens = number(2, longest)
        response = number(1, tokens - 1)
        mask = torch.rand(response, generator=generator) < 0.8
        drawn = torch.randint(VOCAB, (tokens,), generator=generator)
        samples.append(Sample(drawn, response, mask, float(torch.randn((), generator=generator))))
    return Job(
        tuple(samples),
        dp,
        iterations,
        draw(st.integers(1, 4)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from(["sample", "token"])),
    )


def parameters(seed: int = 0) -> list[Tensor]:
    """An embedding and an output matrix, float64 leaves."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((VOCAB, WIDTH), (WIDTH, VOCAB))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


def token_losses(
    params: Sequence[Tensor], sample: Sample, cp: int = 1, rank: int = 0
) -> tuple[Tensor, Tensor]:
    """A context-parallel rank's losses of a sample's loss tokens, and which of them count, both (n,)."""
    logits = torch.tanh(params[0][cut(sample.tokens, cp, rank)]) @ params[1]
    slices = loss_slices(len(sample.tokens), sample.response, cp, rank)
    wanted = torch.cat([sample.tokens[one.tokens.start : one.tokens.stop] for one in slices])
    losses = functional.cross_entropy(taken(logits, slices), wanted, reduction="none")
    return sample.advantage * losses, mask_of(sample, slices)


def mask_of(sample: Sample, slices: tuple[Slice, Slice]) -> Tensor:
    """Which of a rank's loss tokens count, (n,) bool."""
    first = len(sample.tokens) - sample.response
    return torch.cat([sample.mask[one.tokens.start - first : one.tokens.stop - first] for one in slices])


def plain_loss(params: Sequence[Tensor], samples: Sequence[Sample], per: Per) -> Tensor:
    """The loss of whole samples at once, by its definition; knows nothing of batching."""
    sums, counts = [], []
    for sample in samples:
        logits = torch.tanh(params[0][sample.tokens[:-1]]) @ params[1]
        losses = functional.cross_entropy(logits, sample.tokens[1:], reduction="none")[-sample.response :]
        sums.append(sample.advantage * losses[sample.mask].sum())
        counts.append(max(1, int(sample.mask.sum())))
    if per == "token":
        return torch.stack(sums).sum() / sum(counts)
    return torch.stack([one / count for one, count in zip(sums, counts, strict=True)]).mean()


def each_rank(
    dp: int, call: Callable[[int, Callable[[Sequence[int]], list[int]]], object], how: Callable[..., int]
) -> list[Any]:
    """What ``call(rank, reduce)`` returns on every rank; reductions are replayed until each rank's input is known.

    Ranks run one after another, again and again: a reduction whose inputs are not all known ends the rank's turn.
    """
    told: list[list[list[int]]] = [[] for _ in range(dp)]

    class Waits(Exception):
        pass

    def reduce(rank: int, done: list[int], values: Sequence[int]) -> list[int]:
        place = done[0]
        done[0] += 1
        if place == len(told[rank]):
            told[rank].append(list(values))
        if any(len(one) <= place for one in told):
            raise Waits
        if len({len(one[place]) for one in told}) != 1:
            raise AssertionError("ranks reduce lists of different lengths")
        return [how(column) for column in zip(*(one[place] for one in told), strict=True)]

    found: dict[int, object] = {}
    for _ in range(16):
        for rank in range(dp):
            try:
                found[rank] = call(rank, partial(reduce, rank, [0]))
            except Waits:
                continue
        if len(found) == dp:
            return [found[rank] for rank in range(dp)]
    raise AssertionError("ranks wait for each other for ever")


def microbatches(job: Job) -> list[tuple[tuple[MicroBatch, ...], ...]]:
    """Per rank, per step its micro-batches."""

    def plan(rank: int, reduce: Callable[[Sequence[int]], list[int]]) -> object:
        return dynamic_microbatches(
            [len(sample.tokens) for sample in job.local(rank)],
            rechunked(job.each, job.iterations),
            max_tokens=job.max_tokens,
            cp=job.cp,
            group_size=job.group_size,
            max_reduce=reduce,
        )

    return each_rank(job.dp, plan, max)


def divisors(job: Job, steps: Sequence[range]) -> tuple[Divisor, ...]:
    """The divisor of each step, which all ranks agree on."""

    def count(rank: int, reduce: Callable[[Sequence[int]], list[int]]) -> object:
        return step_divisors(job.per, [sample.in_loss for sample in job.local(rank)], steps, reduce)

    first, *others = each_rank(job.dp, count, sum)
    if any(other != first for other in others):
        raise AssertionError("ranks differ in divisors")
    return tuple(first)


def shares_of(
    job: Job,
    params: Sequence[Tensor],
    rank: int,
    one: MicroBatch,
    divisor: Divisor,
    of: Callable[..., Share] = share,
) -> list[Share]:
    """What a micro-batch of a data-parallel rank adds, on each of its context-parallel ranks."""
    chosen = [job.local(rank)[number] for number in one.samples]
    found = []
    for cp_rank in range(job.cp):
        values, masks = zip(
            *(token_losses(params, sample, job.cp, cp_rank) for sample in chosen), strict=True
        )
        tokens = [sample.in_loss for sample in chosen]
        found.append(
            of(values, masks, divisor, tokens_in_loss=tokens, dummy=one.dummy, first_cp=cp_rank == 0)
        )
    return found
