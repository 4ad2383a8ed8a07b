"""Generating: requests in flight go on with new weights, and weights are read only when they may be."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from weightsync.cli.model.checkpoint import seeded_weights
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.rl.engine import Generator, TokenTurns
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.policy import Policy
from weightsync.cli.rl.sampling import draw, uniforms
from weightsync.cli.rl.views import rollout_view
from weightsync.cli.scenario_tables import Rl, Workload
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape

OnRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]
LIMIT_S = 60.0

SHAPE = ModelShape(
    vocab=12, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, head_dim=8, tied=True, qk_norm=True
)
CONFIG = DecoderConfig("qwen3", SHAPE)
LAYOUT = Deployment(SHAPE, 1, (RolloutLayout(1, False), RolloutLayout(2, True)), 1 << 20, 2, 4)
WORK = Workload(kind="rl", rl=Rl(digits=6, base=4, prompts=3, samples=2))
QUESTIONS = torch.tensor([[1, 2, 3, 11], [3, 0, 0, 11], [2, 2, 1, 11]])


class StopsAfter(TokenTurns):
    """Stands still after so many tokens, until the test goes on."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.left = tokens
        self.stopped, self.go_on = threading.Event(), threading.Event()

    def end(self) -> None:
        super().end()
        self.left -= 1
        if self.left == 0:
            self.stopped.set()
            assert self.go_on.wait(LIMIT_S)


class Weights(dict[str, Tensor]):
    """Live weights that remember whether anyone read them while they must not be."""

    closed, wrong_reads, reads = False, 0, 0

    def items(self) -> Any:
        self.reads += 1
        self.wrong_reads += self.closed
        return super().items()


def held(rollout: int, rank: int, seed: int) -> Weights:
    weights = {name: t * 8 if t.dim() > 1 else t for name, t in seeded_weights(CONFIG, seed).items()}
    return Weights(LAYOUT.weights(RankId("rollout", rollout, rank), weights))


def expected(change_after: int) -> tuple[Tensor, Tensor]:
    """What one rank draws that changes its weights after so many tokens."""
    alone, tokens = TensorParallel(), WORK.rl.digits
    policies = [
        Policy(CONFIG, rollout_view(SHAPE, {n: t.float() for n, t in held(0, 0, seed).items()}, alone), alone)
        for seed in (0, 1)
    ]
    numbers = iter(range(tokens))

    @contextmanager
    def turn() -> Iterator[Policy]:
        yield policies[next(numbers) >= change_after]

    prompts = QUESTIONS.repeat_interleave(WORK.rl.samples, dim=0)
    with torch.no_grad():
        return draw(turn, prompts, uniforms(0, 5, 0, len(prompts), tokens), WORK.rl.temperature)


@pytest.mark.parametrize("rollout", [0, 1])
def test_requests_in_flight_go_on_with_the_new_weights(on_ranks: OnRanks, rollout: int) -> None:
    tp, tokens, turns = LAYOUT.layouts[rollout].tp, WORK.rl.digits, StopsAfter(2)
    weights = [held(rollout, rank, 0) for rank in range(tp)]

    def generate(group: TensorParallel) -> tuple[Tensor, Tensor]:
        engine = turns if group.rank == 0 else None
        return Generator(CONFIG, weights[group.rank], WORK, group, engine).generate(5, 0, QUESTIONS, tokens)

    async def update() -> list[tuple[Tensor, Tensor]]:
        await turns.resume()
        drawing = asyncio.create_task(asyncio.to_thread(on_ranks, tp, generate))
        assert await asyncio.to_thread(turns.stopped.wait, LIMIT_S)
        await turns.pause()
        for rank, live in enumerate(weights):
            live.closed = True
            for name, new in held(rollout, rank, 1).items():
                live[name].copy_(new)
        turns.go_on.set()
        for _ in range(10):  # time for a wrong read
            await asyncio.sleep(0)
        for live in weights:
            live.closed = False
        await turns.resume()
        return await drawing

    found = asyncio.run(asyncio.wait_for(update(), LIMIT_S))
    for drawn in found:
        torch.testing.assert_close(drawn, expected(2))
    assert not torch.equal(found[0][0], expected(tokens)[0])  # other weights give other tokens
    assert not torch.equal(found[0][0], expected(0)[0])
    assert [(live.reads, live.wrong_reads) for live in weights] == [(2, 0)] * tp


def test_weights_are_read_anew_for_every_request_and_only_then(on_ranks: OnRanks) -> None:
    weights = held(0, 0, 0)
    generator = Generator(CONFIG, weights, WORK, TensorParallel())
    first = generator.generate(5, 0, QUESTIONS, WORK.rl.digits)
    for name, new in held(0, 0, 1).items():
        weights[name].copy_(new)
    second = generator.generate(5, 0, QUESTIONS, WORK.rl.digits)
    torch.testing.assert_close(first, expected(WORK.rl.digits))
    torch.testing.assert_close(second, expected(0))
    assert weights.reads == 2


def test_a_request_that_fails_gives_its_turn_back() -> None:
    turns = TokenTurns()
    broken = cast(Any, {"model.embed_tokens.weight": torch.zeros(12, 16)})

    async def fail() -> None:
        await turns.resume()
        with pytest.raises(KeyError):
            Generator(CONFIG, broken, WORK, TensorParallel(), turns).generate(5, 0, QUESTIONS, 2)
        await turns.pause()

    asyncio.run(asyncio.wait_for(fail(), LIMIT_S))
