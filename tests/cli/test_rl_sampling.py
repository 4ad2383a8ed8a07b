"""Samples: drawn as their distribution says, the same wherever they are drawn, and each of them there once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.cli.model.checkpoint import make_checkpoint, seeded_weights
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.rl.engine import Generator
from weightsync.cli.rl.learner import Learner
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.policy import Policy
from weightsync.cli.rl.sampling import Samples, draw, joined, shares, uniforms
from weightsync.cli.rl.task import DigitTask, PlainCodec
from weightsync.cli.scenario_tables import Rl, Workload
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.params import same_bits

OnRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]

SHAPE = ModelShape(
    vocab=13, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, head_dim=8, tied=True, qk_norm=True
)
CONFIG = DecoderConfig("qwen3", SHAPE)
LAYOUT = Deployment(SHAPE, 2, (RolloutLayout(1, False), RolloutLayout(2, True)), 1 << 20, 2, 4)
WORK = Workload(kind="rl", lr=1e-2, steps=9, rl=Rl(digits=3, base=4, prompts=6, samples=4, temperature=0.7))
TASK = DigitTask(WORK.rl, PlainCodec(), 0)


# ---- drawing ---------------------------------------------------------------------------------------------------


@dataclass
class FixedPolicy:
    """Scores that do not depend on the tokens, (n, vocab)."""

    scores: Tensor

    def logits(self, tokens: Tensor, cache: object, last: int) -> Tensor:
        return self.scores[:, None].expand(-1, last, -1)

    def whole(self, scores: Tensor) -> Tensor:
        return scores


def drawn(scores: Tensor, uniform: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    prompts = torch.zeros(len(scores), 1, dtype=torch.int64)
    return draw(lambda: nullcontext(cast(Policy, FixedPolicy(scores))), prompts, uniform, temperature)


@given(
    st.lists(st.just(-math.inf) | st.floats(-5, 5, width=32), min_size=1, max_size=6),
    st.lists(st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 1, exclude_max=True), min_size=1),
    st.floats(0.25, 4.0),
)
def test_a_token_is_the_first_whose_cumulated_probability_exceeds_its_number(
    scores: list[float], numbers: list[float], temperature: float
) -> None:
    scores[len(numbers) % len(scores)] = 0.0  # one token at least is possible
    row = np.array(scores) / temperature
    p = np.exp(row - row.max())
    p /= p.sum()
    tokens, logprobs = drawn(
        torch.tensor(scores)[None], torch.tensor(numbers, dtype=torch.float64)[None], temperature
    )
    below = np.concatenate([[0.0], np.cumsum(p)])
    for number, token, logprob in zip(numbers, tokens[0].tolist(), logprobs[0].tolist(), strict=True):
        assert p[token] > 0
        assert below[token] - 1e-12 <= number * below[-1] < below[token + 1] + 1e-12
        assert logprob == pytest.approx(math.log(p[token]), rel=1e-5, abs=1e-6)


def test_evenly_spread_numbers_give_each_token_its_share() -> None:
    n, scores = 1000, torch.tensor([0.0, 1.0, -2.0, 3.0, -math.inf, 0.5])
    uniform = (torch.arange(n, dtype=torch.float64) + 0.5)[:, None] / n
    tokens, _ = drawn(scores.expand(n, -1), uniform, 2.0)
    expected = (scores / 2).softmax(0) * n
    assert ((tokens.view(-1).bincount(minlength=6) - expected).abs() <= 1).all()


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 40), st.integers(1, 9), st.data())
def test_a_samples_numbers_depend_on_its_own_number_only(
    seed: int, step: int, first: int, count: int, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, count - 1))
    rows = uniforms(seed, step, first, count, 5)
    assert rows.dtype == torch.float64
    assert bool(((rows >= 0) & (rows < 1)).all())
    assert torch.equal(rows[row], uniforms(seed, step, first + row, 1, 5)[0])
    assert not torch.equal(rows[row], uniforms(seed, step + 1, first + row, 1, 5)[0])
    assert not torch.equal(rows[row], uniforms(seed, step, first + row + 1, 1, 5)[0])


# ---- rollouts --------------------------------------------------------------------------------------------------


def lively(seed: int) -> dict[str, Tensor]:
    """Weights under which some tokens are much likelier than others."""
    weights = seeded_weights(CONFIG, seed)
    return {name: tensor * 8 if tensor.dim() > 1 else tensor for name, tensor in weights.items()}


def sampled(
    on_ranks: OnRanks, rollout: int, questions: Tensor, first: int = 0, seed: int = 0, work: Workload = WORK
) -> tuple[Tensor, Tensor]:
    """What a rollout answers; all its ranks must say the same."""

    def generate(tp: TensorParallel) -> tuple[Tensor, Tensor]:
        held = LAYOUT.weights(RankId("rollout", rollout, tp.rank), lively(seed))
        return Generator(CONFIG, held, work, tp).generate(4, first, questions, 3)

    found = on_ranks(LAYOUT.layouts[rollout].tp, generate)
    assert all(same_bits(one, other) for one, other in zip(found[0], found[-1], strict=True))
    return cast(tuple[Tensor, Tensor], found[0])


def test_samples_do_not_depend_on_who_draws_them(on_ranks: OnRanks) -> None:
    questions = TASK.questions(4).tokens
    tokens, logprobs = sampled(on_ranks, 0, questions)
    assert tokens.shape == (24, 3)
    assert len({tuple(row) for row in tokens.tolist()}) > 12
    parts = [
        sampled(on_ranks, rollout, questions[a:b], first=a * 4) for rollout, a, b in ((0, 0, 2), (1, 2, 6))
    ]
    assert torch.equal(torch.cat([part[0] for part in parts]), tokens)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), logprobs)


def learner_of(tp: TensorParallel, folder: Path, work: Workload = WORK) -> Learner:
    learner = Learner(folder, tp.rank, LAYOUT, work, tp)
    for name, shard in LAYOUT.shards(tp.rank, lively(0)).items():
        learner.params[name].data.copy_(shard)
    return learner


def mismatch(on_ranks: OnRanks, folder: Path, samples: Samples, work: Workload = WORK) -> float:
    def learn(tp: TensorParallel) -> float:
        return learner_of(tp, folder, work).learn(1, TASK.questions(4), samples)["mismatch"]

    first, second = on_ranks(2, learn)
    assert first == second
    return cast(float, first)


@pytest.mark.parametrize("rollout", [0, 1])
def test_log_probabilities_are_the_learners_unless_version_or_temperature_is_another(
    on_ranks: OnRanks, rollout: int, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, CONFIG, 0)
    questions = TASK.questions(4)
    samples = Samples(0, *sampled(on_ranks, rollout, questions.tokens), version=1)
    stale = Samples(0, *sampled(on_ranks, rollout, questions.tokens, seed=1), version=0)
    assert mismatch(on_ranks, folder, samples) < 1e-4
    assert mismatch(on_ranks, folder, stale) > 0.1
    hot = WORK.model_copy(update={"rl": WORK.rl.model_copy(update={"temperature": 1.0})})
    assert mismatch(on_ranks, folder, samples, hot) > 0.1


# ---- a step's samples ------------------------------------------------------------------------------------------


@st.composite
def whole_steps(draw: st.DrawFn) -> Samples:
    count, tokens = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    floats = st.floats(width=32, max_value=0.0) | st.sampled_from([-0.0, -1e-45])
    numbers = draw(st.lists(floats, min_size=count * tokens, max_size=count * tokens))
    drawn = torch.arange(count * tokens).view(count, tokens) * 7 % 49152
    return Samples(0, drawn, torch.tensor(numbers, dtype=torch.float32).view(count, tokens), 3)


def part_of(step: Samples, bounds: tuple[int, int], version: int = 3) -> Samples:
    first, end = bounds
    return Samples(first, step.tokens[first:end], step.logprobs[first:end], version)


def same(one: Samples, other: Samples) -> bool:
    bits = same_bits(one.tokens, other.tokens) and same_bits(one.logprobs, other.logprobs)
    return bits and (one.first, one.version) == (other.first, other.version)


@given(whole_steps())
def test_samples_travel_as_json_to_the_bit(step: Samples) -> None:
    assert same(Samples.of(json.loads(json.dumps(step.to_json()))), step)


@given(whole_steps(), st.integers(1, 5), st.randoms())
def test_parts_in_any_order_are_the_step_and_a_missing_or_doubled_one_is_refused(
    step: Samples, takers: int, random: Any
) -> None:
    total = len(step.tokens)
    dealt = [bounds for bounds in shares(total, takers) if bounds[0] < bounds[1]]
    parts = [part_of(step, bounds) for bounds in dealt]
    random.shuffle(parts)
    assert same(joined(parts, total), step)
    old = replace(parts[0], version=1)
    assert joined([old, *parts[1:]], total).version == 1
    with pytest.raises(WeightSyncError, match="samples"):
        joined(parts[1:], total)
    with pytest.raises(WeightSyncError, match=r"there twice|gave"):
        joined([*parts, parts[0]], total)


def test_what_is_wrong_with_parts_is_said() -> None:
    step = Samples(0, torch.zeros(6, 1, dtype=torch.int64), torch.zeros(6, 1), 0)
    take = partial(part_of, step)
    for bounds, words in (
        ([(0, 2), (4, 6)], "samples 2 to 3 of a step are missing"),
        ([(0, 4), (2, 6)], "samples 2 to 3 of a step are there twice"),
        ([(0, 4)], "gave 4 samples of a step; expected 6"),
    ):
        with pytest.raises(WeightSyncError, match=words):
            joined([take(one) for one in bounds], 6)


@given(st.integers(0, 50), st.integers(1, 9))
def test_shares_are_consecutive_and_differ_by_one_at_most(count: int, parts: int) -> None:
    dealt = shares(count, parts)
    assert [place for first, end in dealt for place in range(first, end)] == list(range(count))
    sizes = [end - first for first, end in dealt]
    assert len(sizes) == parts
    assert max(sizes) - min(sizes) <= 1
