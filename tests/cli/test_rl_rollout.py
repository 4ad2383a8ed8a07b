"""A rollout's ranks answer together, refuse together, and can answer again after one of them failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.backends.store import host_store, local_store
from weightsync.cli.desk import Desk
from weightsync.cli.model.checkpoint import make_checkpoint, seeded_weights
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.rl.engine import Generator, TokenTurns
from weightsync.cli.rl.local import at_once
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.requests import GENERATE, SAMPLES
from weightsync.cli.rl.rollout import SamplingRank
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.scenario_tables import Rl, Workload
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape

SHAPE = ModelShape(
    vocab=12, hidden=8, intermediate=8, layers=1, heads=2, kv_heads=2, head_dim=4, tied=True, qk_norm=True
)
CONFIG = DecoderConfig("qwen3", SHAPE)
LAYOUT = Deployment(SHAPE, 2, (RolloutLayout(2, True),), 1 << 20, 2, 4)
WORK = Workload(kind="rl", rl=Rl(digits=2, base=4, prompts=3, samples=2))


class Rank:
    """A rollout rank with a desk and no protocol: it holds version 4, unless a test says it is dirty."""

    def __init__(self, store: Any, desks: Any, rank: int, folder: Path) -> None:
        ranks = LAYOUT.rollouts[0].ranks
        self.half = SimpleNamespace(
            leader=rank == 0, dirty=None, version=4, ranks=ranks, followers=ranks[1:] if rank == 0 else (),
            verbs=SimpleNamespace(me=ranks[rank]),
        )  # fmt: skip
        self.weights: dict[str, Tensor] = LAYOUT.weights(ranks[rank], seeded_weights(CONFIG, 0))
        turns = TokenTurns() if rank == 0 else None
        if turns is not None:
            turns.generating = True
        half: Any = self.half
        self.sampling = SamplingRank(half, store, "t", folder, self.weights, WORK, turns)
        self.desk = Desk(desks, "t", str(ranks[rank]))

    def serve(self, words: int) -> None:
        for _ in range(words):
            self.sampling.answer(self.desk, RankId("trainer", 0, 0), self.desk.hear())


ASK = {"step": 3, "first": 0, "questions": [[1, 2, 11], [3, 0, 11]], "answer_tokens": 2}


def serve(
    tmp_path: Path, asks: list[dict[str, Any]], change: Callable[[list[Rank]], None] = lambda ranks: None
) -> list[Mapping[str, Any]]:
    """What a rollout of two ranks replies to ``asks``."""
    folder = make_checkpoint(tmp_path / "model", CONFIG, 0)
    desks, store = host_store(), local_store()
    ranks = [Rank(store, desks, rank, folder) for rank in range(2)]
    change(ranks)
    asking = Desk(desks, "t", "trainer.0")
    for number, ask in enumerate(asks):
        asking.tell(["rollout0.0"], GENERATE, request=number, **ASK, **ask)
    words = 0 if ranks[0].half.dirty else len(asks)
    at_once([partial(ranks[0].serve, len(asks)), partial(ranks[1].serve, words)])
    return [asking.hear() for _ in asks]


def test_a_rollouts_leader_replies_for_all_its_ranks(tmp_path: Path) -> None:
    first, second = serve(tmp_path, [{"group": "a"}, {"group": "a"}])
    assert [(word["op"], word["from"]) for word in (first, second)] == [
        (f"{SAMPLES} 0", "rollout0.0"),
        (f"{SAMPLES} 1", "rollout0.0"),
    ]
    alone = Generator(CONFIG, layout_of_one(seeded_weights(CONFIG, 0)), WORK, TensorParallel()).generate(
        3, 0, torch.tensor(ASK["questions"]), 2
    )
    for word in (first, second):
        samples = Samples.of(word["samples"])
        assert (samples.first, samples.version) == (0, 4)
        assert torch.equal(samples.tokens, alone[0])


def layout_of_one(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    one = Deployment(SHAPE, 1, (RolloutLayout(1, False),), 1 << 20, 2, 4)
    return one.weights(RankId("rollout", 0, 0), weights)


def test_a_dirty_rollout_refuses_and_says_why(tmp_path: Path) -> None:
    def spoil(ranks: list[Rank]) -> None:
        ranks[0].half.dirty = "it holds no weights yet"

    (word,) = serve(tmp_path, [{"group": "a"}], spoil)
    assert (word["samples"], word["reason"]) == (None, "it holds no weights yet")


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_makes_its_rollout_refuse_at_once_and_answer_again_later(
    failing: int, tmp_path: Path
) -> None:
    class Once(dict[str, Tensor]):
        """Weights that cannot be read the first time."""

        left = 1

        def items(self) -> Any:
            self.left -= 1
            if self.left == 0:
                raise MemoryError(f"none at rank {failing}")
            return super().items()

    def fail_once(ranks: list[Rank]) -> None:
        ranks[failing].sampling._weights = Once(ranks[failing].weights)

    first, second = serve(tmp_path, [{"group": "a"}, {"group": "b"}], fail_once)
    assert first["samples"] is None
    assert ("MemoryError: none at rank 0" if failing == 0 else "RuntimeError") in first["reason"]
    assert second["samples"] is not None
