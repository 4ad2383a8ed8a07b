"""The engine of a rollout rank: it generates with the weights the rank holds, and stands still while they change."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.model.trainer import one_thread
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.policy import Policy
from weightsync.cli.rl.sampling import draw, uniforms
from weightsync.cli.rl.views import rollout_view
from weightsync.cli.scenario_tables import Workload
from weightsync.reference.errors import DeadlineExceeded

HELD_S = 240.0
"""How long a request waits for generation to be resumed; less than its other ranks and the lead wait for it."""


class TokenTurns:
    """The leader's engine as the protocol sees it; implements ``reference.seams.Engine``.

    A generating thread takes a turn per token. ``pause`` returns between two turns, so that in-flight requests keep
    their place and go on with the new weights. ``pause`` and ``resume`` belong to the rank's loop, the others to the
    generating thread.

    Args:
        held_s: how long a request waits for generation to be resumed.

    Attributes:
        generating: True between ``resume`` and ``pause``.
        resumed: how often ``resume`` was called; weights read under an older count may have changed since.
    """

    def __init__(self, held_s: float = HELD_S) -> None:
        self.held_s = held_s
        self.generating = False
        self.resumed = 0
        self._state = threading.Condition()
        self._reading = False
        self._idle: asyncio.Future[None] | None = None

    async def pause(self) -> None:
        """Return once no turn is being taken; none begins until ``resume``."""
        with self._state:
            self.generating = False
            if not self._reading:
                return
            self._idle = asyncio.get_running_loop().create_future()
        await self._idle

    async def resume(self) -> None:
        """Let turns be taken again."""
        with self._state:
            self.generating = True
            self.resumed += 1
            self._state.notify_all()

    def begin(self) -> None:
        """Take a turn, when generation is not paused; blocks. Raises DeadlineExceeded after ``held_s``."""
        with self._state:
            if not self._state.wait_for(lambda: self.generating, self.held_s):
                raise DeadlineExceeded(f"the pause that a request waited {self.held_s:.0f} s to end")
            self._reading = True

    def end(self) -> None:
        """Give the turn back: no rank of the rollout reads a weight any more."""
        with self._state:
            self._reading = False
            if self._idle is not None:
                with contextlib.suppress(RuntimeError):  # its loop has ended
                    self._idle.get_loop().call_soon_threadsafe(_finish, self._idle)
                self._idle = None


class Generator:
    """What one rank of a rollout does to generate; all ranks of the rollout call ``generate`` alike.

    Args:
        config: the whole model's configuration.
        weights: runtime name -> live weight of this rank; only read.
        work: the scenario's workload.
        tp: the rollout's group.
        turns: the leader's engine; None on other ranks, and where nothing can change meanwhile.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Mapping[str, Tensor],
        work: Workload,
        tp: TensorParallel,
        turns: TokenTurns | None = None,
    ) -> None:
        self._config = config
        self._weights = weights
        self._work = work
        self._tp = tp
        self._turns = turns
        self._policy: Policy | None = None
        self._read_at = -1

    def generate(self, step: int, first: int, questions: Tensor, answer_tokens: int) -> tuple[Tensor, Tensor]:
        """Answer each question ``samples`` times.

        Args:
            step: draws the random numbers, with the number of each sample.
            first: number of the first sample within its step.
            questions: (n, P) int64.
            answer_tokens: tokens of every answer.

        Returns:
            Tokens (n * samples, answer_tokens) int64 and log-probabilities in nats, float32; the same on all ranks.
        """
        samples = self._work.rl.samples
        prompts = questions.repeat_interleave(samples, dim=0)
        uniform = uniforms(self._work.seed, step, first, len(prompts), answer_tokens)
        self._read_at = -1
        with one_thread(), torch.no_grad():
            return draw(self._turn, prompts, uniform, self._work.rl.temperature)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Policy]:
        """The policy of the next token; ranks of the rollout wait here for their leader's turn."""
        if self._turns is None:
            yield self._present(0)
            return
        self._turns.begin()
        try:
            yield self._present(self._turns.resumed)
        finally:
            self._turns.end()

    def _present(self, resumed: int) -> Policy:
        """The policy of the present weights, read anew if the leader's engine was resumed since the last token."""
        now = int(self._tp.all_gather(torch.tensor(resumed))[0])
        if self._policy is None or now != self._read_at:
            self._policy = None  # its copy of the weights goes before the next one is made
            weights = {name: weight.detach().float() for name, weight in self._weights.items()}
            model = rollout_view(self._config.shape, weights, self._tp)
            self._policy, self._read_at = Policy(self._config, model, self._tp), now
        return self._policy


def _finish(idle: asyncio.Future[None]) -> None:
    if not idle.done():
        idle.set_result(None)
