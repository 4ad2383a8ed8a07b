"""A rollout rank's part in sampling: it answers the lead's requests with what its engine generates."""

from __future__ import annotations

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
        self._tp: TensorParallel | None = None
        self._generator: Generator | None = None

    def answer(self, desk: Desk, lead: RankId, word: Mapping[str, Any]) -> None:
        """Generate what ``word`` asks for; the leader has its followers do the same, and replies.

        Never raises: a rollout that cannot generate says why, and a rank that fails leaves the group of its rollout, so
        that the others fail at once as well. They meet anew when they are asked under another group name.
        """
        if self._half.leader and self._half.dirty is not None:
            samples, reason = None, self._half.dirty
        else:
            if self._half.leader:
                desk.tell(self._half.followers, GENERATE, **{key: word[key] for key in ASKED})
            try:
                samples, reason = self._generate(word).to_json(), ""
            except Exception as error:
                samples, reason = None, f"{type(error).__name__}: {error}"
                self._leave()
        if self._half.leader:
            desk.tell([lead], f"{SAMPLES} {word['request']}", samples=samples, reason=reason)

    def _generate(self, word: Mapping[str, Any]) -> Samples:
        if word["group"] != self._group or self._generator is None:
            self._leave()
            ranks, group = self._half.ranks, word["group"]
            self._tp = TensorParallel.over_gloo(
                self._store, f"{self._prefix}/{group}", ranks.index(self._half.verbs.me), len(ranks)
            )
            self._generator = Generator(self._config, self._weights, self._work, self._tp, self._turns)
            self._group = group
        version, questions = self._half.version, torch.tensor(word["questions"], dtype=torch.int64)
        tokens, logprobs = self._generator.generate(
            word["step"], word["first"], questions, word["answer_tokens"]
        )
        return Samples(word["first"], tokens, logprobs, version)

    def _leave(self) -> None:
        self._generator = None
        if self._tp is not None:
            self._tp.close()
            self._tp = None
