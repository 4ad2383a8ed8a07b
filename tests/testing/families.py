"""Hypothesis strategies for whole families of models on trainers of any parallel sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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

FORMS = ("grouped", "sequential", "stacked")


@st.composite
def trainer_layouts(draw: st.DrawFn, *, max_ranks: int = 8) -> TrainerLayout:
    """Trainers of at most ``max_ranks`` ranks: TP, PP 1 to 3, EP 1 to 4, an expert-TP of their own, CP, DP."""
    tp, pp = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    ep, cp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 2))
    etp = draw(st.none() | st.integers(1, 2))
    drawn = TrainerLayout(tp, pp, ep, etp, None, cp)
    if draw(st.booleans()):
        drawn = TrainerLayout(tp, pp, ep, etp, 2 * drawn.replicas, cp)
    for smaller in (
        drawn,
        TrainerLayout(tp, pp, ep, 1),
        TrainerLayout(tp, 1, ep, 1),
        TrainerLayout(tp, pp, tp, 1),
    ):
        if smaller.world <= max_ranks:
            event(f"trainer: pp {smaller.pp}, ep {smaller.ep}, replicas {smaller.replicas * smaller.cp}")
            return smaller
    return TrainerLayout(tp, pp)


def rollout_layouts(*, max_tp: int = 4) -> st.SearchStrategy[RolloutLayout]:
    """Rollouts of TP 1 to ``max_tp``, fused or not, with any EP that divides it."""

    def with_ep(tp: int) -> st.SearchStrategy[RolloutLayout]:
        divisors = [ep for ep in range(1, tp + 1) if tp % ep == 0]
        return st.builds(RolloutLayout, st.just(tp), st.booleans(), st.sampled_from(divisors))

    return st.integers(1, max_tp).flatmap(with_ep)


@st.composite
def family_models(draw: st.DrawFn, *, tp: int, experts: int, layers: int) -> Model:
    """A small model of any family.

    Args:
        draw: Hypothesis's.
        tp: a multiple of every TP and expert-TP size that will cut it.
        experts: a multiple of the trainer's EP.
        layers: decoder layers.
    """
    size = st.integers(1, 3)
    groups = draw(size)
    sizes: dict[str, Any] = {"vocab": draw(st.integers(1, 9)), "hidden": draw(size), "layers": layers}
    wide = tp * draw(st.integers(1, 2))
    heads: dict[str, Any] = {
        "heads": groups * tp,
        "kv_heads": groups,
        "head_dim": draw(size),
    }  # any relation to the ranks
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
            **sizes, **routed, **ranks, **widths, **counts, heads=tp + draw(st.integers(0, 2)),
            intermediate=wide, router_bias=draw(st.booleans()),
        )  # fmt: skip

    def vision() -> Model:
        tower = VisionTower(
            2 * tp,
            wide,
            draw(size),
            tp,
            sizes["hidden"],
            (2, 2, 1, 2),
            draw(size),
            tp,
            1,
            draw(st.booleans()),
        )
        return Qwen3VL(**sizes, **heads, **tied, intermediate=wide, vision=tower)

    def next_() -> Model:
        linear = GatedDeltaNet(sizes["hidden"], tp, tp * draw(st.integers(1, 2)), draw(size), draw(size), 2)
        even: dict[str, Any] = {**heads, "heads": wide * tp, "kv_heads": tp}
        return Qwen3Next(
            **sizes, **even, **tied, **routed, shared_intermediate=wide, linear=linear, every=draw(size)
        )

    def nemotron() -> Model:
        mamba = Mamba(sizes["hidden"], tp, draw(size), tp, draw(size), 2)
        pattern = "".join(draw(st.sampled_from("M*-")) for _ in range(layers))
        rest: dict[str, Any] = {name: value for name, value in sizes.items() if name != "layers"}
        return NemotronH(**rest, **heads, **tied, intermediate=wide, pattern=pattern, mamba=mamba)

    makers: tuple[Callable[[], Model], ...] = (dense, moe, latent, vision, next_, nemotron)
    make = draw(st.sampled_from(makers))
    event(f"family: {make.__name__}")
    return make()


@st.composite
def family_deployments(draw: st.DrawFn, *, max_ranks: int = 8, max_tp: int = 4) -> Deployment:
    """A small model of any family on a trainer of any parallel sizes and on one or two rollouts."""
    trainer = draw(trainer_layouts(max_ranks=max_ranks))
    layouts = tuple(draw(st.lists(rollout_layouts(max_tp=max_tp), min_size=1, max_size=2)))
    tp = math.lcm(trainer.tp, trainer.expert_tp, *(layout.tp for layout in layouts))
    layers = trainer.pp * draw(st.integers(1, 2))
    if trainer.pp > 1 and draw(st.booleans()):
        first = draw(st.integers(0, layers))
        stages = (first, layers - first, *(0,) * (trainer.pp - 2))
        trainer = TrainerLayout(
            trainer.tp, trainer.pp, trainer.ep, trainer.etp, trainer.dp, trainer.cp, stages
        )
    model = draw(family_models(tp=tp, experts=trainer.ep, layers=layers))
    bucket_bytes = draw(st.sampled_from([300, 2000, 1 << 20]))
    return Deployment(model, trainer, layouts, bucket_bytes, trainer_multiple=2, rollout_multiple=4)
