"""The scenario ``tiny-fault`` in code: two dozen elements, their bits after each step, deadlines in simulated ms."""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch

from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view
from weightsync.reference.protocol import ProtocolSettings

MS = 1_000_000
STALL_NS = 250 * MS
"""Longer than every deadline, shorter than the lease."""

SETTINGS = ProtocolSettings(
    verify_every=2,  # so that both ways of proving a digest are met
    connect_ns=50 * MS,
    update_ns=100 * MS,
    lease_ns=600 * MS,
    patience_ns=5_000 * MS,
    on_rollout_loss="continue",
)
QUIET_NS = 100_000 * MS
"""When the last fault and everything it delayed is over."""

LIMIT_NS = 1_000_000 * MS


@lru_cache(maxsize=2)
def tiny_deployment(hidden: int = 1) -> Deployment:
    """TP 2 trainer, an unfused TP 1 and a fused TP 2 rollout, about two dozen elements times ``hidden``."""
    model = ModelShape(vocab=3, hidden=hidden, intermediate=2, layers=1, heads=2, kv_heads=2, head_dim=1)
    layouts = (RolloutLayout(1, False), RolloutLayout(2, True))
    return Deployment(model, 2, layouts, bucket_bytes=192, trainer_multiple=2, rollout_multiple=4)


DENSITY = 0.35
"""Share of the elements that a step changes; at this one every tensor travels whole."""

WIDE = 8
"""So wide that few changes travel as changed elements."""


def deployment_for(density: float) -> Deployment:
    """The tiny deployment, or, for fewer changes than ``DENSITY``, one whose tensors are ``WIDE``."""
    return tiny_deployment(1 if density >= DENSITY else WIDE)


@lru_cache(maxsize=64)
def tiny_shards(seed: int, step: int, density: float = DENSITY) -> tuple[dict[str, torch.nn.Parameter], ...]:
    """Every trainer rank's shards after ``step`` optimizer steps, each of which changes about ``density`` of
    the elements; the first one starts from zeros and changes most.
    """
    deployment = deployment_for(density)
    stream = torch.Generator().manual_seed(seed)
    checkpoint = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
    for number in range(step + 1):
        share = density if number else max(density, DENSITY)
        for tensor in checkpoint.values():
            bits = int_view(tensor)
            chosen = torch.rand(len(bits), generator=stream) < share
            drawn = torch.randint(-(1 << 15), 1 << 15, (len(bits),), generator=stream).to(bits.dtype)
            bits[chosen] = drawn[chosen]
            tensor.copy_(bits.view(tensor.dtype).reshape(tensor.shape))
    return tuple(deployment.shards(rank, checkpoint) for rank in range(len(deployment.trainers)))


@lru_cache(maxsize=1)
def memo() -> dict[Hashable, Any]:
    """What runs with equal bits share: the exports that their oracles compare with."""
    return {}
