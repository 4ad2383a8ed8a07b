"""Gradients on tensor-parallel ranks are those of the whole model, and equal bits wherever a row is held twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.cli.model import decoder
from weightsync.cli.model import trainer as plain_trainer
from weightsync.cli.model.checkpoint import load_checkpoint, make_checkpoint
from weightsync.cli.model.config import DecoderConfig
from weightsync.cli.rl import views
from weightsync.cli.rl.learner import Learner
from weightsync.cli.rl.parallel import TensorParallel
from weightsync.cli.rl.policy import Policy
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.rl.views import trainer_view
from weightsync.cli.scenario_tables import Rl, Workload
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.params import same_bits
from weightsync.reference.rowmap import RowMap
from weightsync.testing import strategies

OnRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]
Grads = dict[str, Tensor]

UNEVEN = ModelShape(
    vocab=13, hidden=8, intermediate=24, layers=2, heads=9, kv_heads=3, head_dim=4, tied=True, qk_norm=True
)
"""Whose key/value heads two and four ranks hold twice."""

WORK = Workload(kind="rl", lr=1e-2, steps=9, rl=Rl(digits=2, base=4, prompts=3, samples=2))


def layout(shape: ModelShape, tp: int, multiple: int = 2) -> Deployment:
    return Deployment(shape, tp, (RolloutLayout(1, False),), 1 << 20, multiple, 4)


def drawn(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        meta.name: torch.randn(meta.shape, generator=generator) * 0.6 + ("norm" in meta.name)
        for meta in shape.tensors()
    }


def question(shape: ModelShape) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, the tokens that should follow, and how much each of these counts."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(shape.vocab, (3, 5), generator=generator)
    targets = torch.randint(shape.vocab, (3, 5), generator=generator)
    return tokens, targets, torch.randn(3, 5, generator=generator)


def gradients(
    on_ranks: OnRanks, deployment: Deployment, weights: Mapping[str, Tensor], padding: float = 0.0
) -> list[Grads]:
    """Per rank the gradient of each parameter; ``padding`` fills rows that stand for no token."""
    shape = deployment.model
    tokens, targets, counts = question(shape)

    def of(tp: TensorParallel) -> Grads:
        leaves = {}
        for name, param in deployment.shards(tp.rank, weights).items():
            row_map = deployment.trainer_maps[tp.rank][name]
            leaf = param.detach().clone()
            leaf.view(-1, row_map.width)[row_map.tensor < 0] = padding
            leaves[name] = leaf.requires_grad_()
        policy = Policy(DecoderConfig("qwen3", shape), trainer_view(shape, leaves, tp), tp)
        scores = policy.logits(tokens)
        objective = policy.logprobs(scores, targets) + policy.entropy(scores).square()
        (objective * counts).sum().backward()
        return {
            name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in leaves.items()
        }

    return on_ranks(deployment.tp, of)


def plain_gradients(shape: ModelShape, weights: Mapping[str, Tensor]) -> Grads:
    tokens, targets, counts = question(shape)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
    log_p = decoder.logits(DecoderConfig("qwen3", shape), leaves, tokens).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1) + entropy.square()) * counts).sum().backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def differing(found: Grads, expected: Grads) -> list[str]:
    """Names whose gradients are not close, measured by the largest element of each."""
    return [
        name
        for name, tensor in expected.items()
        if not torch.allclose(found[name], tensor, rtol=1e-3, atol=1e-5 + 1e-3 * float(tensor.abs().max()))
    ]


def unequal_replicas(deployment: Deployment, held: list[Mapping[str, Tensor]], whole: Grads) -> list[str]:
    """Rank and name of each tensor that does not hold the bits of whoever speaks for its rows."""
    found = []
    for rank, (maps, tensors) in enumerate(zip(deployment.trainer_maps, held, strict=True)):
        told = deployment.shards(rank, whole)
        found += [f"{rank}: {n}" for n, m in maps.items() if not same_rows(m, tensors[n], told[n])]
    return found


def same_rows(row_map: RowMap, one: Tensor, other: Tensor) -> bool:
    real = row_map.tensor >= 0
    first, second = (tensor.detach().reshape(-1, row_map.width)[real] for tensor in (one, other))
    return same_bits(first.contiguous(), second.contiguous())


@given(strategies.model_shapes(tp=(1, 2, 3, 4), dtype=torch.float32), st.integers(1, 4), st.integers(1, 3))
def test_gradients_are_those_of_the_whole_model_and_replicas_have_equal_bits(
    on_ranks: OnRanks, shape: ModelShape, tp: int, multiple: int
) -> None:
    shape = replace(shape, head_dim=2 * shape.head_dim)
    deployment, weights = layout(shape, tp, multiple), drawn(shape, seed=1)
    event(f"TP {tp}, {'no ' if shape.kv_heads % tp == 0 else ''}replicas")
    grads = gradients(on_ranks, deployment, weights, padding=50.0)
    whole = deployment.export(grads)
    assert differing(whole, plain_gradients(shape, weights)) == []
    assert unequal_replicas(deployment, grads, whole) == []
    for maps, of_rank in zip(deployment.trainer_maps, grads, strict=True):
        for name, row_map in maps.items():
            assert not of_rank[name].view(-1, row_map.width)[row_map.tensor < 0].any()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp"), [(9, 3, 2), (9, 3, 4), (4, 2, 4), (3, 1, 3), (3, 1, 2), (4, 4, 2)]
)
def test_weights_of_replicas_stay_equal_over_steps(
    on_ranks: OnRanks, heads: int, kv_heads: int, tp: int, tmp_path: Path
) -> None:
    shape = replace(UNEVEN, heads=heads, kv_heads=kv_heads)
    folder = make_checkpoint(tmp_path, DecoderConfig("qwen3", shape), 0)
    deployment = layout(shape, tp)

    def learn(group: TensorParallel) -> tuple[Mapping[str, Tensor], list[float], Any]:
        learner = Learner(folder, group.rank, deployment, WORK, group)
        said = [learner.learn(step, learner.task.questions(step), answers(step)) for step in (1, 2, 3)]
        return learner.params, [one["grad_norm"] for one in said], learner.export()

    held, norms, exports = zip(*on_ranks(tp, learn), strict=True)
    assert all(norm == norms[0] for norm in norms)
    assert unequal_replicas(deployment, list(held), exports[0]) == []
    assert exports[1:] == (None,) * (tp - 1)
    before = load_checkpoint(folder).weights
    changed = {name for name, tensor in exports[0].items() if not same_bits(tensor, before[name])}
    assert {name for name in before if not name.endswith("norm.weight")} <= changed


def answers(step: int) -> Samples:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(12, (6, 2), generator=generator)
    return Samples(0, tokens, torch.zeros(6, 2), step)


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("scale", [0.001, 1.0])
def test_the_norm_counts_each_element_of_the_model_once(
    on_ranks: OnRanks, tp: int, scale: float, tmp_path: Path
) -> None:
    shape = replace(UNEVEN, dtype=torch.float32, qkv_bias=False)
    folder = make_checkpoint(tmp_path, DecoderConfig("qwen3", shape), 0)
    deployment = layout(shape, tp)
    whole = {name: tensor * scale for name, tensor in drawn(shape, 2).items()}

    def clip(group: TensorParallel) -> tuple[float, Grads]:
        grads = {n: p.detach().clone() for n, p in deployment.shards(group.rank, whole).items()}
        return Learner(folder, group.rank, deployment, WORK, group).clip(grads), grads

    found = on_ranks(tp, clip)
    expected = {name: tensor.clone() for name, tensor in whole.items()}
    norm = plain_trainer.clip(expected)
    assert (norm > plain_trainer.MAX_NORM) == (scale == 1.0)
    assert [one for one, _ in found] == pytest.approx([norm] * tp, rel=1e-5)
    clipped = deployment.export([grads for _, grads in found])
    assert differing(clipped, expected) == []
    if scale < 1:
        assert all(same_bits(clipped[name], whole[name]) for name in whole)


# ---- wrong layers, each of which a property above must see -----------------------------------------------------


def norms_are_not_entered(patch: pytest.MonkeyPatch) -> None:
    enter = TensorParallel.enter
    patch.setattr(TensorParallel, "enter", lambda tp, x: x if x.dim() == 1 else enter(tp, x))


def replicas_do_not_share(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(views, "shared_rows", lambda weight, *others: weight)


def padding_is_scored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(views.LocalModel, "real_rows", property(lambda model: len(model.head)))


def partial_results_are_not_summed(patch: pytest.MonkeyPatch) -> None:
    leave = TensorParallel.leave
    patch.setattr(TensorParallel, "leave", lambda tp, part: part if part.dim() == 3 else leave(tp, part))


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        (norms_are_not_entered, ["model.layers.0.self_attn.k_norm.weight"]),
        (replicas_do_not_share, ["model.layers.0.self_attn.v_proj.weight"]),
        (padding_is_scored, ["model.embed_tokens.weight"]),
        (partial_results_are_not_summed, ["model.norm.weight"]),
    ],
)
def test_wrong_layers_give_wrong_gradients(
    on_ranks: OnRanks,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[pytest.MonkeyPatch], None],
    names: list[str],
) -> None:
    shape = replace(UNEVEN, dtype=torch.float32)
    deployment, weights = layout(shape, 2, multiple=4), drawn(shape, seed=1)
    expected = plain_gradients(shape, weights)
    assert differing(deployment.export(gradients(on_ranks, deployment, weights)), expected) == []
    wrong(monkeypatch)
    found = differing(deployment.export(gradients(on_ranks, deployment, weights)), expected)
    assert set(names) <= set(found)


def test_unshared_replicas_differ_in_bits(on_ranks: OnRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = replace(UNEVEN, dtype=torch.float32)
    deployment, weights = layout(shape, 2), drawn(shape, seed=1)
    replicas_do_not_share(monkeypatch)
    grads = gradients(on_ranks, deployment, weights)
    found = unequal_replicas(deployment, grads, deployment.export(grads))
    assert found == [f"1: decoder.layers.{layer}.self_attention.linear_qkv.weight" for layer in (0, 1)]


def test_counting_replicas_twice_gives_another_norm(on_ranks: OnRanks, tmp_path: Path) -> None:
    shape = replace(UNEVEN, dtype=torch.float32)
    folder = make_checkpoint(tmp_path, DecoderConfig("qwen3", shape), 0)
    deployment, whole = layout(shape, 2), drawn(shape, 2)

    def clip(group: TensorParallel) -> float:
        learner = Learner(folder, group.rank, deployment, WORK, group)
        learner._maps = {n: replace(m, owned=m.tensor >= 0) for n, m in learner._maps.items()}
        return learner.clip(dict(deployment.shards(group.rank, whole)))

    assert on_ranks(2, clip)[0] != pytest.approx(plain_trainer.clip(whole), rel=1e-3)
