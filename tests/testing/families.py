"""Hypothesis strategies for whole families of models on trainers of any parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from hypothesis import event
from hypothesis import strategies as st

from weightsync.reference.deployment import Deployment
from weightsync.reference.families import (
    DeepSeek,
    GatedDeltaNet,
    Mamba,
    NemotronH,
    Qwen3Moe,
    Qwen3Next,
    Qwen3VL,
    VisionTower,
)
from weightsync.reference.model import ModelShape
from weightsync.reference.modules import Model
from weightsync.reference.parallel import RolloutLayout, TrainerLayout
from weightsync.testing.strategies import DTYPES

FORMS = ("grouped", "sequential", "stacked")
MOST_ROWS = 300
"""Sides that every parallel size divides grow with their common multiple; above this, a second rollout goes."""


@st.composite
def trainer_layouts(draw: st.DrawFn, *, max_ranks: int = 8, max_tp: int = 3) -> TrainerLayout:
    """Trainers of TP 1 to ``max_tp``, PP 1 to 3, EP 1 to 4, an expert-TP of their own, CP, DP.

    Those of more than ``max_ranks`` ranks give sizes up, the replicas first, then expert-TP, EP and PP.
    """
    tp, pp = draw(st.integers(1, max_tp)), draw(st.integers(1, 3))
    ep, cp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 2))
    etp = draw(st.none() | st.integers(1, 2) | st.integers(1, max_tp))
    drawn = TrainerLayout(tp, pp, ep, etp, None, cp)
    if draw(st.booleans()):
        drawn = TrainerLayout(tp, pp, ep, etp, 2 * drawn.replicas, cp)
    for smaller in (
        drawn,
        TrainerLayout(tp, pp, ep, etp),
        TrainerLayout(tp, pp, ep, 1),
        TrainerLayout(tp, 1, ep, 1),
        TrainerLayout(tp, pp, tp, 1),
    ):
        if smaller.world <= max_ranks:
            event(f"trainer: tp {smaller.tp}, pp {smaller.pp}, ep {smaller.ep}")
            event(f"trainer replicas: {smaller.replicas * smaller.cp}")
            return smaller
    return TrainerLayout(tp, pp)


def rollout_layouts(*, max_tp: int = 4) -> st.SearchStrategy[RolloutLayout]:
    """Rollouts of TP 1 to ``max_tp``, fused or not, with any EP that divides it."""

    def with_ep(tp: int) -> st.SearchStrategy[RolloutLayout]:
        divisors = [ep for ep in range(1, tp + 1) if tp % ep == 0]
        return st.builds(RolloutLayout, st.just(tp), st.booleans(), st.sampled_from(divisors))

    return st.integers(1, max_tp).flatmap(with_ep)


@st.composite
def family_models(
    draw: st.DrawFn,
    *,
    tp: int,
    widest: int,
    experts: int,
    layers: int,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> Model:
    """A small model of any family.

    Attention may have fewer key/value heads than ranks, and heads that no number of ranks divides.

    Args:
        draw: Hypothesis's.
        tp: a multiple of every TP and expert-TP size that will cut it.
        widest: the largest of them.
        experts: a multiple of the trainer's EP.
        layers: decoder layers.
        dtypes: of the checkpoint; a router's correction is fp32 whatever is drawn.
    """
    size = st.integers(1, 3)
    dtype: dict[str, Any] = {"dtype": draw(st.sampled_from(list(dtypes)))}
    sizes: dict[str, Any] = {
        "vocab": draw(st.integers(1, 9)),
        "hidden": draw(size),
        "layers": layers,
        **dtype,
    }
    wide = tp * draw(st.integers(1, 2))
    groups = draw(st.integers(1, 4))
    fewest = -(-widest // groups)
    more = st.integers(fewest, fewest + 2)
    per_group = draw(more if tp > 3 * widest else more | st.just(tp))
    heads: dict[str, Any] = {"heads": groups * per_group, "kv_heads": groups, "head_dim": draw(size)}
    routed: dict[str, Any] = {"expert_intermediate": tp, "experts": experts * draw(st.integers(1, 2))}
    routed["form"] = draw(st.sampled_from(FORMS))
    tied: dict[str, Any] = {"tied": draw(st.booleans())}

    def dense() -> Model:
        norms: dict[str, Any] = {"qk_norm": draw(st.booleans()), "qkv_bias": draw(st.booleans())}
        return ModelShape(**sizes, **heads, **tied, **norms, intermediate=wide)

    def moe() -> Model:
        return Qwen3Moe(**sizes, **heads, **tied, **routed)

    def latent() -> Model:
        ranks: dict[str, Any] = {"q_rank": draw(st.none() | size), "kv_rank": draw(size)}
        widths: dict[str, Any] = {name: draw(size) for name in ("nope", "rope", "value")}
        counts: dict[str, Any] = {
            "dense_layers": draw(st.integers(0, layers)),
            "shared_experts": draw(st.integers(0, 2)),
        }
        return DeepSeek(
            **sizes, **routed, **ranks, **widths, **counts, heads=widest + draw(st.integers(0, 2)),
            intermediate=wide, router_bias=draw(st.booleans()),
        )  # fmt: skip

    def vision() -> Model:
        count = widest + draw(st.integers(0, 2))
        tower = VisionTower(
            count * draw(size), wide, draw(size), count, sizes["hidden"], (2, 2, 1, 2), draw(size),
            draw(size), draw(st.integers(0, 1)), draw(st.booleans()), **dtype,
        )  # fmt: skip
        return Qwen3VL(**sizes, **heads, **tied, intermediate=wide, vision=tower)

    def next_() -> Model:
        value_heads = tp * draw(st.integers(1, 2))
        linear = GatedDeltaNet(sizes["hidden"], tp, value_heads, draw(size), draw(size), 2, **dtype)
        even: dict[str, Any] = {**heads, "heads": tp * draw(st.integers(1, 2)), "kv_heads": tp}
        return Qwen3Next(
            **sizes, **even, **tied, **routed, shared_intermediate=wide, linear=linear, every=draw(size)
        )

    def nemotron() -> Model:
        mamba = Mamba(sizes["hidden"], tp, draw(size), tp, draw(size), 2, **dtype)
        pattern = "".join(draw(st.sampled_from("M*-")) for _ in range(layers))
        rest: dict[str, Any] = {name: value for name, value in sizes.items() if name != "layers"}
        return NemotronH(**rest, **heads, **tied, intermediate=wide, pattern=pattern, mamba=mamba)

    makers: tuple[Callable[[], Model], ...] = (dense, moe, latent, vision, next_, nemotron)
    make = draw(st.sampled_from(makers))
    event(f"family: {make.__name__}")
    event(f"heads: {'fewer key/value heads than ranks' if groups < widest else 'a group per rank or more'}")
    return make()


@st.composite
def family_deployments(
    draw: st.DrawFn,
    *,
    max_ranks: int = 8,
    max_trainer_tp: int = 3,
    max_tp: int = 4,
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> Deployment:
    """A small model of any family on a trainer of any parallel sizes and on one or two rollouts.

    Layers are shared out among pipeline stages equally or not; a stage may hold none.
    """
    trainer = draw(trainer_layouts(max_ranks=max_ranks, max_tp=max_trainer_tp))
    layouts = tuple(draw(st.lists(rollout_layouts(max_tp=max_tp), min_size=1, max_size=2)))
    sizes = (trainer.tp, trainer.expert_tp)
    if math.lcm(*sizes, *(layout.tp for layout in layouts)) > MOST_ROWS:
        layouts = layouts[:1]
    tp = math.lcm(*sizes, *(layout.tp for layout in layouts))
    layers = draw(st.integers(1, max(2, trainer.pp + 1)))
    if layers % trainer.pp or draw(st.booleans()):
        ends = [0, *sorted(draw(st.integers(0, layers)) for _ in range(trainer.pp - 1)), layers]
        stages = tuple(end - start for start, end in pairwise(ends))
        trainer = replace(trainer, stages=stages)
        event(f"stages: {'with an empty one' if 0 in stages else 'of any lengths'}")
    widest = max(*sizes, *(layout.tp for layout in layouts))
    model = draw(family_models(tp=tp, widest=widest, experts=trainer.ep, layers=layers, dtypes=dtypes))
    bucket_bytes = draw(st.sampled_from([300, 2000, 1 << 20]))
    return Deployment(model, trainer, layouts, bucket_bytes, trainer_multiple=2, rollout_multiple=4)


def whole_range(*, max_ranks: int = 48) -> st.SearchStrategy[Deployment]:
    """The whole range that is promised: trainer and rollout TP 1 to 8, PP 1 to 3, EP 1 to 4, any dtype."""
    return family_deployments(max_ranks=max_ranks, max_trainer_tp=8, max_tp=8, dtypes=DTYPES)
