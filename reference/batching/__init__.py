"""Batches: mini-batches for optimizer steps, micro-batches for memory, and losses that do not depend on either."""

from weightsync.reference.batching.advantages import group_advantages, whitened
from weightsync.reference.batching.balance import balanced
from weightsync.reference.batching.bookkeeping import SampleClock, StepRecord, UpdateRecord, clip_coefficient
from weightsync.reference.batching.collective import Reduce, agreed_steps
from weightsync.reference.batching.context import Slice, cut, join, loss_slices, taken, zigzag
from weightsync.reference.batching.merge import merged
from weightsync.reference.batching.microbatch import MicroBatch, dynamic_microbatches, static_microbatches
from weightsync.reference.batching.minibatch import (
    MinibatchPlan,
    dealt,
    local_counts,
    plan_minibatches,
    ranges,
    rechunked,
    with_iterations,
)
from weightsync.reference.batching.scaling import (
    Divisor,
    Share,
    for_megatron,
    rollout_denominators,
    share,
    step_divisors,
    step_weights,
)
from weightsync.reference.batching.schedule import Schedule, pack_first

__all__ = [
    "Divisor",
    "MicroBatch",
    "MinibatchPlan",
    "Reduce",
    "SampleClock",
    "Schedule",
    "Share",
    "Slice",
    "StepRecord",
    "UpdateRecord",
    "agreed_steps",
    "balanced",
    "clip_coefficient",
    "cut",
    "dealt",
    "dynamic_microbatches",
    "for_megatron",
    "group_advantages",
    "join",
    "local_counts",
    "loss_slices",
    "merged",
    "pack_first",
    "plan_minibatches",
    "ranges",
    "rechunked",
    "rollout_denominators",
    "share",
    "static_microbatches",
    "step_divisors",
    "step_weights",
    "taken",
    "whitened",
    "with_iterations",
    "zigzag",
]
