"""Maps, plans and the bookkeeping of an update of large models, on metadata alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
from harness import Row, compete

from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.families import Qwen3Moe
from weightsync.reference.model import ModelShape
from weightsync.reference.modules import Model
from weightsync.reference.parallel import TrainerLayout
from weightsync.reference.params import ParamMeta
from weightsync.reference.plan import TransferPlan

DENSE = ModelShape(
    vocab=151_936, hidden=4096, intermediate=12_288, layers=36, heads=32, kv_heads=8, head_dim=128, tied=False,
    qk_norm=True,
)  # fmt: skip
SPARSE = Qwen3Moe(
    vocab=151_936,
    hidden=2048,
    expert_intermediate=768,
    experts=128,
    layers=48,
    heads=32,
    kv_heads=4,
    head_dim=128,
)
CASES = (
    ("Qwen3-8B", DENSE, TrainerLayout(tp=4, pp=2), RolloutLayout(4, True)),
    (
        "Qwen3-30B-A3B", SPARSE,
        TrainerLayout(tp=2, pp=2, ep=8, etp=1, dp=4),
        RolloutLayout(4, True, 4),
    ),
)  # fmt: skip
DENSITY = 0.02
BUCKET_BYTES = 1 << 28
ENOUGH_S = 5.0
"""What making all maps of both sides and the plan may take."""
ENOUGH_US = 5.0
"""What an update may spend on each checkpoint tensor without touching a weight."""

Made = TypeVar("Made")


def rows() -> Iterator[Row]:
    for name, model, trainer, rollout in CASES:
        conditions = {
            "trainer_ranks": trainer.world,
            "rollout_ranks": rollout.tp,
            "tensors": len(model.tensors()),
            "bucket_bytes": BUCKET_BYTES,
            "threads": 1,
        }
        seconds, plan = made(model, trainer, rollout)
        listed, _ = timed(model.tensors)
        yield Row(
            f"{name}: maps of all ranks and the plan", "s", seconds, "what may be", ENOUGH_S,
            conditions | {"statistic": "one call"}, listed, "listing the tensors",
        )  # fmt: skip
        counts = drawn(plan)
        matrix = [
            [
                -(-count * plan.owned(rank, number) // plan.pieces[number].count)
                for number, count in enumerate(counts)
            ]
            for rank in range(len(plan.maps))
        ]
        times = compete(
            {
                "groups": lambda plan=plan, counts=counts: plan.groups(counts),
                "update": lambda plan=plan, counts=counts, matrix=matrix: bookkeeping(plan, counts, matrix),
                "floor": lambda plan=plan: one_object_each(plan.tensors),
            },
            rounds=5,
        )  # fmt: skip
        each = {what: 1000 * ms / len(plan.tensors) for what, ms in times.items()}
        delta = conditions | {"density": DENSITY, "statistic": "median of 5 interleaved calls"}
        for what, said in (
            ("groups", "cutting a delta in groups and buckets"),
            ("update", "and sizing every part"),
        ):
            yield Row(
                f"{name}: {said}", "us a tensor", each[what], "what may be", ENOUGH_US, delta,
                each["floor"], "one object a tensor",
            )  # fmt: skip


def made(model: Model, trainer: TrainerLayout, rollout: RolloutLayout) -> tuple[float, TransferPlan]:
    """Seconds for every map of a new deployment, and its plan."""

    def make() -> TransferPlan:
        deployment = Deployment(model, trainer, (rollout,), BUCKET_BYTES)
        for rank in deployment.rollouts[0].ranks:
            deployment.rollout_maps(rank)
        plan = deployment.plan
        plan.owned(0, 0)
        return plan

    return timed(make)


def bookkeeping(plan: TransferPlan, counts: list[int], matrix: list[list[int]]) -> int:
    """What one update computes from the counts: groups, buckets, and the bytes that each rank brings to each."""
    return sum(sum(plan.part_sizes(group, matrix)) for group in plan.groups(counts))


def one_object_each(metas: tuple[ParamMeta, ...]) -> list[ParamMeta]:
    return [ParamMeta(meta.name, meta.dtype, meta.shape) for meta in metas]


def drawn(plan: TransferPlan) -> list[int]:
    sizes = [piece.count for piece in plan.pieces]
    counts: list[int] = np.random.default_rng(0).binomial(sizes, DENSITY).tolist()
    return counts


def timed(call: Callable[[], Made]) -> tuple[float, Made]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result
