"""What a learner makes of rewards: advantages, step sizes, and steps that nothing but advantages drive."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.cli.model.checkpoint import make_checkpoint
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.rl.learner import ADVANTAGE_EPS, Learner, advantages, learning_rate
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.rl.task import Questions
from weightsync.cli.rl.trainer import RlTrainer
from weightsync.cli.scenario_tables import Rl, Workload
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.params import same_bits


@st.composite
def rewarded(draw: st.DrawFn) -> tuple[Workload, np.ndarray]:
    """A workload, and a reward per prompt and sample."""
    prompts, samples, digits = draw(st.integers(1, 5)), draw(st.integers(2, 9)), draw(st.integers(1, 8))
    algorithm = draw(st.sampled_from(["grpo", "reinforce"]))
    rl = Rl.model_validate({"algorithm": algorithm, "prompts": prompts, "samples": samples, "digits": digits})
    right = draw(st.lists(st.integers(0, digits), min_size=prompts * samples, max_size=prompts * samples))
    return Workload(kind="rl", rl=rl), np.array(right).reshape(prompts, samples) / digits


@given(rewarded())
def test_advantages_are_those_of_the_papers_formula(given: tuple[Workload, np.ndarray]) -> None:
    work, rewards = given
    if work.rl.algorithm == "grpo":
        spread = rewards.std(1, ddof=1, keepdims=True)
        expected = (rewards - rewards.mean(1, keepdims=True)) / (spread + ADVANTAGE_EPS)
    else:
        expected = rewards - rewards.mean()
    found = advantages(torch.tensor(rewards.reshape(-1), dtype=torch.float32), work)
    np.testing.assert_allclose(found, expected.reshape(-1), rtol=1e-4, atol=2e-3)


@given(rewarded(), st.integers(0, 8))
def test_equal_rewards_teach_nothing(given: tuple[Workload, np.ndarray], right: int) -> None:
    work, rewards = given
    equal = torch.full((rewards.size,), min(right, work.rl.digits) / work.rl.digits)
    assert float(advantages(equal, work).abs().max()) < 2e-3


def test_grpo_compares_within_a_prompt_and_reinforce_within_the_batch() -> None:
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0])
    grpo = Workload(kind="rl", rl=Rl(prompts=2, samples=2))
    reinforce = Workload(kind="rl", rl=Rl(prompts=2, samples=2, algorithm="reinforce"))
    torch.testing.assert_close(
        advantages(rewards, grpo), torch.tensor([0.7070, -0.7070, 0.0, 0.0]), atol=1e-3, rtol=0.0
    )
    assert advantages(rewards, reinforce).tolist() == [0.25, -0.75, 0.25, 0.25]


@given(st.integers(2, 200), st.floats(1e-5, 1e-1), st.floats(1e-4, 1.0), st.floats(0.0, 1.0))
def test_the_step_size_only_falls_and_ends_at_its_last(
    steps: int, lr: float, share: float, decay_from: float
) -> None:
    work = Workload(kind="rl", steps=steps, lr=lr, rl=Rl(lr_last=lr * share, decay_from=decay_from))
    sizes = [learning_rate(work, step) for step in range(1, steps)]
    start = decay_from * (steps - 1)
    assert all(size == lr for step, size in enumerate(sizes, 1) if step <= start)
    assert all(after <= before for before, after in pairwise(sizes))
    falling = np.log([lr, *(size for step, size in enumerate(sizes, 1) if step > start)])
    if len(falling) > 1:
        assert sizes[-1] == pytest.approx(lr * share)
        np.testing.assert_allclose(np.diff(falling[1:]), np.log(share) / (steps - 1 - start), atol=1e-9)


# ---- steps -------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(
    vocab=12, hidden=16, intermediate=24, layers=1, heads=2, kv_heads=2, head_dim=8, tied=True, qk_norm=True
)
LAYOUT = Deployment(SHAPE, 1, (RolloutLayout(1, False),), 1 << 20, 4, 4)
WORK = Workload(kind="rl", lr=1e-2, steps=9, rl=Rl(digits=2, base=4, prompts=2, samples=3))
QUESTIONS = Questions(torch.tensor([[1, 2, 11], [3, 0, 11]]), ("21", "03"))


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    folder = make_checkpoint(tmp_path, DecoderConfig("qwen3", SHAPE), 0)
    return Learner(folder, 0, LAYOUT, WORK, TensorParallel())


def said(*answers: str) -> Samples:
    tokens = torch.tensor([[int(digit) for digit in answer] for answer in answers])
    return Samples(0, tokens, torch.zeros(tokens.shape), 0)


def test_each_sample_is_marked_by_the_answer_to_its_own_prompt(learner: Learner) -> None:
    marks = learner.rewards(QUESTIONS, said("21", "20", "03", "21", "01", "03"))
    assert marks.tolist() == [1.0, 0.5, 0.0, 0.0, 0.5, 1.0]


def test_a_step_without_differences_in_reward_has_no_gradient(learner: Learner) -> None:
    told = learner.learn(1, QUESTIONS, said("20", "20", "31", "03", "03", "03"))
    assert told["grad_norm"] == 0.0
    assert told["reward"] == pytest.approx((3 * 0.5 + 3) / 6)


def test_a_step_makes_what_was_rewarded_likelier(learner: Learner) -> None:
    answers = said("21", "30", "33", "11", "22", "03")

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            leaves = {name: param.detach().float() for name, param in learner.params.items()}
            return learner._judged(leaves, QUESTIONS, answers, slice(None))[0].sum(1)

    before = logprobs()
    told = [learner.learn(step, QUESTIONS, answers) for step in range(1, 6)]
    change = logprobs() - before
    assert float(change[[0, 5]].min()) > 0 > float(change[[1, 2, 3, 4]].max())
    assert [one["lr"] for one in told] == [learning_rate(WORK, step) for step in range(1, 6)]
    assert told[-1]["loss"] < told[0]["loss"]
    assert (told[0]["samples"], told[0]["generated_tokens"]) == (6, 12)


def test_the_entropy_bonus_spreads_the_policy_and_falls_with_the_step_size(tmp_path: Path) -> None:
    entropies = {}
    for weight in (0.0, 20.0):
        rl = Rl(digits=2, base=4, prompts=2, samples=3, entropy=weight, decay_from=0.5)
        work = Workload(kind="rl", lr=1e-2, steps=9, rl=rl)
        folder = make_checkpoint(tmp_path / str(weight), DecoderConfig("qwen3", SHAPE), 0)
        learner = Learner(folder, 0, LAYOUT, work, TensorParallel())
        answers = said("21", "30", "33", "11", "22", "03")
        told = [learner.learn(step, QUESTIONS, answers) for step in range(1, 9)]
        entropies[weight] = [one["entropy"] for one in told]
        undriven = learner.learn(8, QUESTIONS, said("20", "20", "31", "03", "03", "03"))
        assert (undriven["grad_norm"] > 0) == (weight > 0)
        assert undriven["grad_norm"] < 1e-3  # at the last step size the weight is one in ten thousand
    assert entropies[0.0][0] == entropies[20.0][0] == pytest.approx(np.log(12), rel=0.05)
    assert entropies[0.0][-1] < entropies[0.0][0] - 0.02
    assert entropies[20.0][-1] > entropies[20.0][0]


def test_the_mismatch_is_the_largest_difference_of_any_token(learner: Learner) -> None:
    answers = said("21", "30", "33", "11", "22", "03")
    leaves = {name: param.detach().float() for name, param in learner.params.items()}
    own = learner._judged(leaves, QUESTIONS, answers, slice(None))[0].detach()
    off = own.clone()
    off[4, 1] -= 0.75
    assert learner.learn(1, QUESTIONS, Samples(0, answers.tokens, off, 0))["mismatch"] == pytest.approx(0.75)


def test_the_first_step_learns_nothing_and_each_batch_serves_once(learner: Learner) -> None:
    asked: list[int] = []

    def source(step: int, questions: Questions) -> Samples:
        asked.append(step)
        assert questions.answers == learner.task.questions(step).answers
        return said("21", "30", "33", "11", "22", "03")

    trainer = RlTrainer(learner, source)
    before = {name: param.detach().clone() for name, param in trainer.params.items()}
    trainer.collect()
    assert trainer.step() == {}
    assert all(same_bits(before[name], param.detach()) for name, param in trainer.params.items())
    for _ in range(2):
        trainer.collect()
        assert trainer.step()["samples"] == 6
    assert asked == [1, 2]
    assert not same_bits(
        before["decoder.layers.0.mlp.linear_fc1.weight"],
        trainer.params["decoder.layers.0.mlp.linear_fc1.weight"].detach(),
    )
