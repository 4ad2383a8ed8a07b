"""One trainer rank of the RL job: GRPO or REINFORCE steps on samples that the rollouts drew."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.cli.model.checkpoint import load_checkpoint
from weightsync.cli.model.optimizer import AdamW
from weightsync.cli.model.trainer import one_thread, shrink
from weightsync.cli.parts import local_bytes
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.policy import Policy
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.rl.task import DigitTask, Questions, codec
from weightsync.cli.rl.views import trainer_view
from weightsync.cli.scenario_tables import Workload
from weightsync.reference.batching.minibatch import ranges, rechunked
from weightsync.reference.deployment import Deployment

ADVANTAGE_EPS = 1e-4
"""Added to a group's deviation, so that a group of equal rewards teaches nothing (GRPO)."""

TIS_CAP = 2.0
"""The most that a token counts under truncated importance sampling."""


class _Step(NamedTuple):
    """What one optimizer step says of itself: see ``Learner.learn``."""

    loss: float
    entropy: float
    grad_norm: float
    mismatch: float


class Learner:
    """A tensor-parallel rank that learns. Its live parameters are Megatron's, with their attributes.

    Forward and backward run on this rank's shards only, in float32, with the collectives of column-, row- and
    vocabulary-parallel layers; AdamW steps on this rank's fp32 masters. One thread, and sums in rank order, so that
    equal samples give equal bits on every backend of one machine.

    Args:
        folder: the checkpoint to start from.
        rank: this rank.
        deployment: who holds what.
        work: the scenario's workload.
        tp: the trainer's group.

    Attributes:
        params: runtime name -> live parameter; changed in place by ``learn``.
        task: asks the questions and marks the answers.
    """

    def __init__(
        self, folder: Path, rank: int, deployment: Deployment, work: Workload, tp: TensorParallel
    ) -> None:
        loaded = load_checkpoint(folder)
        self.config = loaded.config
        self.deployment = deployment
        self.work = work
        self.tp = tp
        self.task = DigitTask(work.rl, codec(folder, loaded.config.shape.vocab), work.seed)
        self.params: dict[str, Parameter] = deployment.shards(rank, loaded.weights)
        self._maps = deployment.trainer_maps[rank]
        self._optimizer = AdamW(self.params, work.lr)

    def learn(self, step: int, questions: Questions, samples: Samples) -> dict[str, float]:
        """Take the optimizer steps of update ``step``, from 1, on all ranks; what they say, equal on all of them.

        Advantages are those of all samples; then each of ``num_iters_per_train_update`` consecutive pieces takes one
        step, its loss a mean over its own tokens, at the update's learning rate. From the second piece on, the policy
        is no longer the one that drew the samples.

        ``loss`` is the policy gradient's surrogate in nats per token; ``reward`` the mean over samples; ``entropy``
        the policy's, in nats, a mean over the tokens; ``mismatch`` the largest difference, in nats, between a token's
        log-probability at the rollout that drew it and at the trainer, before any step; ``grad_norm`` the largest of
        the steps' norms before clipping.
        """
        with one_thread():
            lr = self._optimizer.lr = learning_rate(self.work, step)
            rewards = self.rewards(questions, samples)
            whole = advantages(rewards, self.work)
            counts = rechunked(len(samples.tokens), self.work.rl.num_iters_per_train_update)
            steps = [self._step(lr, whole, questions, samples, piece) for piece in ranges(counts)]
        share = 1 / len(steps)  # pieces are equal
        return {
            "loss": sum(one.loss for one in steps) * share,
            "reward": float(rewards.mean()),
            "entropy": sum(one.entropy for one in steps) * share,
            "lr": lr,
            "grad_norm": max(one.grad_norm for one in steps),
            "mismatch": steps[0].mismatch,
            "samples": len(samples.tokens),
            "generated_tokens": samples.tokens.numel(),
            "optimizer_steps": len(steps),
        }

    def _step(self, lr: float, whole: Tensor, questions: Questions, samples: Samples, piece: range) -> _Step:
        """One optimizer step on consecutive samples; ``whole`` are the advantages of all."""
        leaves = {name: param.detach().float().requires_grad_() for name, param in self.params.items()}
        rows = slice(piece.start, piece.stop)
        with torch.enable_grad():
            logprobs, entropies = self._judged(leaves, questions, samples, rows)
            weights = importance(logprobs.detach(), samples.logprobs[rows], self.work)
            loss = -(weights * whole[rows].unsqueeze(1) * logprobs).mean()
            entropy = entropies.mean()
            bonus = self.work.rl.entropy * lr / self.work.lr
            (loss - bonus * entropy).backward()  # type: ignore[no-untyped-call]
        grads = {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
        }
        norm = self.clip(grads)
        self._optimizer.step(grads)
        mismatch = float((logprobs.detach() - samples.logprobs[rows]).abs().max())
        return _Step(float(loss.detach()), float(entropy.detach()), norm, mismatch)

    def rewards(self, questions: Questions, samples: Samples) -> Tensor:
        """Reward of each sample, (prompts * samples,) float32."""
        each = self.work.rl.samples
        marks = [
            self.task.reward(questions.answers[number // each], row)
            for number, row in enumerate(samples.tokens.tolist())
        ]
        return torch.tensor(marks, dtype=torch.float32)

    def clip(self, grads: Mapping[str, Tensor]) -> float:
        """Scale the gradients in place to a norm of at most ``MAX_NORM`` over the whole model; their norm before.

        Rows that this rank does not speak for are another rank's to count, as are replicated parameters.
        """
        squares = torch.zeros(())
        for name, grad in grads.items():
            row_map = self._maps[name]
            squares += grad.reshape(-1, row_map.width)[row_map.owned].square().sum()
        return shrink(grads, float(self.tp.sum(squares).sqrt()))

    def export(self) -> dict[str, Tensor] | None:
        """Hugging Face name -> whole tensor, on rank 0; None elsewhere. A collective of the trainer's group."""
        sizes = [sum(local_bytes(one) for one in maps.values()) for maps in self.deployment.trainer_maps]
        gathered = self.tp.gather_bytes(list(self.params.values()), sizes)
        if gathered is None:
            return None
        every = []
        for maps, flat in zip(self.deployment.trainer_maps, gathered, strict=True):
            pieces = flat.split_with_sizes([local_bytes(row_map) for row_map in maps.values()])
            every.append(
                {
                    name: piece.clone().view(row_map.dtype).view(row_map.local_shape)
                    for (name, row_map), piece in zip(maps.items(), pieces, strict=True)
                }
            )
        return self.deployment.export(every)

    def _judged(
        self, leaves: Mapping[str, Tensor], questions: Questions, samples: Samples, rows: slice
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy at the tokens of these samples, (n, answer tokens), at the draw's temperature."""
        model = trainer_view(self.config.shape, leaves, self.tp)
        policy = Policy(self.config, model, self.tp)
        prompts = questions.tokens.repeat_interleave(self.work.rl.samples, dim=0)[rows]
        tokens = samples.tokens[rows]
        whole = torch.cat([prompts, tokens], dim=1)
        scores = policy.logits(whole[:, :-1], last=tokens.shape[1]) / self.work.rl.temperature
        return policy.logprobs(scores, tokens), policy.entropy(scores)


def advantages(rewards: Tensor, work: Workload) -> Tensor:
    """How much better each sample is than its peers, (n,) float32.

    ``grpo``: against the other samples of its prompt, in their deviations (DeepSeekMath, 2402.03300, equation 4.1);
    ``reinforce``: against the mean of the whole batch.
    """
    if work.rl.algorithm == "reinforce":
        return rewards - rewards.mean()
    groups = rewards.view(-1, work.rl.samples)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + ADVANTAGE_EPS)).view(-1)


def importance(now: Tensor, drawn: Tensor, work: Workload) -> Tensor:
    """What each token's gradient is weighed with, for samples of older weights: (samples, tokens) float32.

    1 without a correction; with ``tis`` the token's probability now over that at its draw, at most ``TIS_CAP``
    (truncated importance sampling, Ionides 2008).

    Args:
        now: log-probabilities at the trainer, in nats.
        drawn: those at the rollout that drew the tokens.
        work: the scenario's workload.
    """
    return (now - drawn).exp().clamp(max=TIS_CAP) if work.rl.correction == "tis" else torch.ones_like(now)


def learning_rate(work: Workload, step: int) -> float:
    """``lr`` for a share ``decay_from`` of the optimizer steps, then down by equal factors to ``lr_last`` at the last.

    The first of ``steps`` updates seeds the rollouts, so there is one optimizer step fewer.
    """
    last = work.steps - 1
    start = work.rl.decay_from * last
    if step <= start:
        return work.lr
    share = (step - start) / (last - start)
    return work.lr * math.exp(share * math.log(work.rl.lr_last / work.lr))
