"""A rollout rank's part in sampling: it answers the lead's requests with what its engine generates."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weightsync.backends.store import Store, client_of
from weightsync.cli.desk import Desk
from weightsync.cli.model.config import read_config
from weightsync.cli.rl.engine import Generator, TokenTurns
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.requests import ASKED, GENERATE, SAMPLES
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.scenario_tables import Workload
from weightsync.reference.members import RankId
from weightsync.reference.rollout import Rollout


class SamplingRank:
    """One rollout rank that samples; all methods belong to the thread that reads its desk.

    Args:
        half: its half of the protocol, which knows whether its weights may be read.
        store: the run's store, on which the rollout's ranks meet.
        prefix: of every key.
        folder: the checkpoint that the run started from, for its configuration.
        weights: runtime name -> live weight; only read.
        work: the scenario's workload.
        turns: the engine, on the leader.
    """

    def __init__(
        self,
        half: Rollout,
        store: Store,
        prefix: str,
        folder: Path,
        weights: Mapping[str, Tensor],
        work: Workload,
        turns: TokenTurns | None,
    ) -> None:
        self._half = half
        self._store: Any = client_of(store)
        self._prefix = prefix
        self._config = read_config(folder / "config.json")
        self._weights = weights
        self._work = work
        self._turns = turns
        self._group = ""
        self._generator: Generator | None = None

    def answer(self, desk: Desk, lead: RankId, word: Mapping[str, Any]) -> None:
        """Generate what ``word`` asks for; the leader has its followers do the same, and replies."""
        if not self._half.leader:
            self._generate(word)
            return
        samples = None
        if self._half.dirty is None:
            desk.tell(self._half.followers, GENERATE, **{key: word[key] for key in ASKED})
            samples = self._generate(word)
        answer = None if samples is None else samples.to_json()
        desk.tell([lead], f"{SAMPLES} {word['request']}", samples=answer)

    def _generate(self, word: Mapping[str, Any]) -> Samples | None:
        """The samples; None when this rank, or one that it generates with, could not: the lead asks others then."""
        try:
            return self._draw(word)
        except Exception:
            traceback.print_exc()  # this rank's log; a group that broke is met under another name next time
            return None

    def _draw(self, word: Mapping[str, Any]) -> Samples:
        if word["group"] != self._group or self._generator is None:
            ranks = self._half.ranks
            tp = TensorParallel.over_gloo(
                self._store, f"{self._prefix}/{word['group']}", ranks.index(self._half.verbs.me), len(ranks)
            )
            self._generator = Generator(self._config, self._weights, self._work, tp, self._turns)
            self._group = word["group"]
        version, questions = self._half.version, torch.tensor(word["questions"], dtype=torch.int64)
        tokens, logprobs = self._generator.generate(
            word["step"], word["first"], questions, word["answer_tokens"]
        )
        return Samples(word["first"], tokens, logprobs, version)
