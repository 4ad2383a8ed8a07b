"""The decoder on tensor-parallel ranks computes what the plain decoder computes, however it is cut and fused."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.cli.model import decoder
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.model.trainer import one_thread
from weightsync.cli.rl.local import at_once
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.policy import Cache, Policy
from weightsync.cli.rl.views import LocalModel, rollout_view, trainer_view
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import RankId
from weightsync.testing import strategies

OnRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]
TP = (1, 2, 3, 4)
SIDES = ("trainer", "fused", "unfused")


@dataclass(frozen=True)
class Cut:
    """A model with weights, cut for the ranks of one side."""

    config: DecoderConfig
    weights: dict[str, Tensor] = field(repr=False)
    tokens: Tensor
    tp: int
    side: str
    multiple: int

    @property
    def deployment(self) -> Deployment:
        layouts = (RolloutLayout(self.tp, self.side == "fused"),)
        return Deployment(self.config.shape, self.tp, layouts, 1 << 20, self.multiple, self.multiple)

    def held(self, rank: int) -> Mapping[str, Tensor]:
        """What a rank holds; rows of padding hold what no score may show."""
        if self.side == "trainer":
            held: Mapping[str, Tensor] = self.deployment.shards(rank, self.weights)
            maps = self.deployment.trainer_maps[rank]
        else:
            held = self.deployment.weights(RankId("rollout", 0, rank), self.weights)
            maps = self.deployment.rollout_maps(RankId("rollout", 0, rank))
        for name, row_map in maps.items():
            held[name].detach().view(-1, row_map.width)[row_map.tensor < 0] = 50.0
        return held

    def model(self, tp: TensorParallel) -> LocalModel:
        view = trainer_view if self.side == "trainer" else rollout_view
        return view(self.config.shape, self.held(tp.rank), tp)

    def policy(self, tp: TensorParallel) -> Policy:
        return Policy(self.config, self.model(tp), tp)

    def plain(self) -> Tensor:
        return decoder.logits(self.config, self.weights, self.tokens)


@st.composite
def cuts(draw: st.DrawFn, sides: tuple[str, ...] = SIDES) -> Cut:
    shape = draw(strategies.model_shapes(tp=TP, dtype=torch.float32))
    shape = replace(shape, head_dim=2 * shape.head_dim)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    weights = {
        meta.name: torch.randn(meta.shape, generator=generator) * 0.6 + ("norm" in meta.name)
        for meta in shape.tensors()
    }
    tokens = torch.randint(shape.vocab, draw(sizes()), generator=generator)
    side, tp = draw(st.sampled_from(sides)), draw(st.sampled_from(TP))
    event(f"{side} of {tp}")
    return Cut(DecoderConfig("qwen3", shape), weights, tokens, tp, side, draw(st.integers(1, 5)))


def sizes() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, 3), st.integers(1, 6))


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)


def real(scores: list[Tensor], models: list[LocalModel], vocab: int) -> Tensor:
    """The vocabulary put together from what ranks hold; everything beside it must be minus infinity."""
    whole = torch.full((*scores[0].shape[:-1], vocab), math.nan)
    for part, model in zip(scores, models, strict=True):
        first, end = model.first_token, model.first_token + model.real_rows
        whole[..., first:end] = part[..., : model.real_rows]
        assert bool((part[..., model.real_rows :] == -math.inf).all())
    return whole


@given(cuts())
def test_ranks_compute_the_logits_of_the_plain_decoder(on_ranks: OnRanks, cut: Cut) -> None:
    def logits(tp: TensorParallel) -> tuple[Tensor, LocalModel, Tensor]:
        policy = cut.policy(tp)
        with torch.no_grad():
            scores = policy.logits(cut.tokens)
            return scores, policy.model, policy.whole(scores)

    scores, models, wholes = zip(*on_ranks(cut.tp, logits), strict=True)
    vocab, plain = cut.config.shape.vocab, cut.plain()
    close(real(list(scores), list(models), vocab), plain)
    assert sum(model.real_rows for model in models) == vocab
    assert len({part.shape for part in scores}) == 1
    for whole in wholes:
        close(whole, plain)
        assert torch.equal(whole, wholes[0])


@given(cuts(), st.data())
def test_log_probabilities_and_entropy_are_those_of_a_softmax_over_the_real_vocabulary(
    on_ranks: OnRanks, cut: Cut, data: st.DataObject
) -> None:
    count = cut.tokens.numel()
    drawn = data.draw(st.lists(st.integers(0, cut.config.shape.vocab - 1), min_size=count, max_size=count))
    targets = torch.tensor(drawn).view(cut.tokens.shape)

    def judged(tp: TensorParallel) -> Tensor:
        policy = cut.policy(tp)
        with torch.no_grad():
            scores = policy.logits(cut.tokens)
            return torch.stack([policy.logprobs(scores, targets), policy.entropy(scores)])

    first, *others = on_ranks(cut.tp, judged)
    log_p = cut.plain().log_softmax(-1)
    close(first[0], log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1))
    close(first[1], -(log_p.exp() * log_p).sum(-1))
    assert all(torch.equal(first, other) for other in others)


@given(cuts(), st.lists(st.integers(1, 3), max_size=3))
def test_token_by_token_with_a_cache_equals_the_whole_prefix(
    on_ranks: OnRanks, cut: Cut, steps: list[int]
) -> None:
    cuts_at = sorted({min(sum(steps[:n]), cut.tokens.shape[1]) for n in range(len(steps) + 1)} - {0})
    pieces = torch.tensor_split(cut.tokens, cuts_at, dim=1)

    def logits(tp: TensorParallel) -> Tensor:
        policy, cache = cut.policy(tp), Cache()
        with torch.no_grad():
            parts = [policy.logits(piece, cache) for piece in pieces if piece.shape[1]]
        assert cache.tokens == cut.tokens.shape[1]
        return policy.whole(torch.cat(parts, dim=1))

    close(on_ranks(cut.tp, logits)[0], cut.plain())


@given(cuts(), st.integers(1, 6))
def test_only_the_last_tokens_are_scored_when_only_those_are_asked_for(
    on_ranks: OnRanks, cut: Cut, last: int
) -> None:
    last = min(last, cut.tokens.shape[1])

    def logits(tp: TensorParallel) -> Tensor:
        policy = cut.policy(tp)
        with torch.no_grad():
            return policy.whole(policy.logits(cut.tokens, last=last))

    found = on_ranks(cut.tp, logits)[0]
    assert found.shape[1] == last
    close(found, cut.plain()[:, -last:])


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_sums_are_in_rank_order_and_equal_on_all_ranks(on_ranks: OnRanks, tp: int) -> None:
    parts = torch.randn(tp, 1000, generator=torch.Generator().manual_seed(tp)) * 1e3
    in_order, backwards = parts[0].clone(), parts[-1].clone()
    for number in range(1, tp):
        in_order += parts[number]
        backwards += parts[-1 - number]
    sums = on_ranks(tp, lambda group: group.sum(parts[group.rank]))
    assert all(torch.equal(found, in_order) for found in sums)
    assert tp == 2 or not torch.equal(in_order, backwards)  # the order shows
    assert torch.equal(on_ranks(tp, lambda group: group.max(parts[group.rank]))[-1], parts.amax(0))


def test_a_rank_that_fails_does_not_keep_the_others_waiting(on_ranks: OnRanks) -> None:
    def fail(tp: TensorParallel) -> Tensor:
        if tp.rank == 1:
            raise ValueError("rank 1 has no part")
        return tp.sum(torch.ones(1))

    with pytest.raises(ValueError, match="rank 1 has no part"):
        on_ranks(3, fail)


def test_ranks_in_threads_compute_with_one_thread_and_leave_the_count_as_it_was() -> None:
    entered, both, left, found = threading.Event(), threading.Event(), threading.Event(), []

    def first() -> None:
        with one_thread():
            entered.set()
            assert both.wait(60)
        left.set()

    def second() -> None:
        assert entered.wait(60)
        with one_thread():
            both.set()
            assert left.wait(60)
            found.append(torch.get_num_threads())

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        at_once([first, second])
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()  # a new thread takes over what was set last
        later.join(60)
        assert found == [1, 2]
    finally:
        torch.set_num_threads(before)
