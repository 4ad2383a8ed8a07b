"""The parameters of each module, built here a second time by hand, and their names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.families import (
    Attention,
    DeepSeek,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Qwen3Moe,
    Qwen3Next,
    Qwen3VL,
    VisionAttention,
    VisionTower,
)
from weightsync.reference.families.experts import ExpertForm
from weightsync.reference.modules import Model, Module, Placed
from weightsync.reference.parallel import RolloutLayout, TrainerLayout
from weightsync.reference.rowmap import RowMap, local_tensor
from weightsync.reference.tables import Tables

F32 = torch.float32


class Alone(Model):
    """A model of one module in one layer."""

    layers = 1

    def __init__(self, module: Module) -> None:
        self.module = module

    def modules(self) -> tuple[Placed, ...]:
        return (Placed(self.module, 0, "", "", ""),)


def numbered(model: Model) -> dict[str, Tensor]:
    """A checkpoint in which no two elements are equal."""
    made, start = {}, 1
    for meta in model.tensors():
        made[meta.name] = (
            torch.arange(start, start + meta.numel, dtype=F32).to(meta.dtype).reshape(meta.shape)
        )
        start += meta.numel
    return made


def build(maps: dict[str, RowMap], checkpoint: dict[str, Tensor]) -> dict[str, Tensor]:
    tensors = list(checkpoint.values())
    return {name: local_tensor(one, [tensors[o] for o in one.outputs]) for name, one in maps.items()}


def trained(module: Module, layout: TrainerLayout, rank: int) -> dict[str, Tensor]:
    held = Tables(Alone(module)).trainer(layout.at(rank, 1))
    return build({name: one.row_map for name, one in held.items()}, numbered(Alone(module)))


def rolled(module: Module, layout: RolloutLayout, rank: int) -> dict[str, Tensor]:
    return build(Tables(Alone(module)).rollout(layout.at(rank, 1)), numbered(Alone(module)))


@pytest.mark.parametrize("form", ["grouped", "sequential", "stacked"])
def test_experts_are_local_on_the_trainer_and_stacked_on_the_rollout(form: ExpertForm) -> None:
    module = Experts(hidden=3, intermediate=4, count=4, form=form, dtype=F32)
    full = numbered(Alone(module))

    def expert(number: int, which: str) -> Tensor:
        return full[f"{number}.{which}_proj.weight"]

    for rank in range(4):  # EP 2, expert-TP 2
        ep, etp = divmod(rank, 2)
        found = trained(module, TrainerLayout(ep=2, etp=2), rank)
        fc1 = [
            torch.cat([expert(number, which).chunk(2)[etp] for which in ("gate", "up")])
            for number in (2 * ep, 2 * ep + 1)
        ]
        fc2 = [expert(number, "down").chunk(2, 1)[etp] for number in (2 * ep, 2 * ep + 1)]
        if form == "stacked":
            expected = {"linear_fc1.weight": torch.stack(fc1), "linear_fc2.weight": torch.stack(fc2)}
        else:
            name = {"grouped": "linear_fc{}.weight{}", "sequential": "local_experts.{1}.linear_fc{0}.weight"}[
                form
            ]
            expected = {name.format(1, local): tensor for local, tensor in enumerate(fc1)}
            expected |= {name.format(2, local): tensor for local, tensor in enumerate(fc2)}
        assert found.keys() == expected.keys()
        for one, tensor in expected.items():
            assert torch.equal(found[one], tensor), one
    for layout in (RolloutLayout(2, True), RolloutLayout(2, True, 2)):
        for rank in range(2):
            held = range(4) if layout.ep == 1 else (2 * rank, 2 * rank + 1)
            part, parts = (rank, 2) if layout.ep == 1 else (0, 1)
            found = rolled(module, layout, rank)
            w13 = [torch.cat([expert(n, w).chunk(parts)[part] for w in ("gate", "up")]) for n in held]
            w2 = [expert(n, "down").chunk(parts, 1)[part] for n in held]
            assert torch.equal(found["w13_weight"], torch.stack(w13))
            assert torch.equal(found["w2_weight"], torch.stack(w2))


def test_a_rollout_with_more_ranks_than_experts_has_ranks_without_any() -> None:
    module = Experts(hidden=2, intermediate=2, count=2, dtype=F32)
    held = [rolled(module, RolloutLayout(3, fused, 3), 2) for fused in (True, False)]
    assert held == [{}, {}]


@pytest.mark.parametrize("tp", [1, 2])
def test_gated_attention_is_per_head_in_the_checkpoint_and_per_group_in_megatron(tp: int) -> None:
    heads, groups, width, hidden = 4, 2, 2, 3
    module = Attention(hidden, heads, groups, width, gated=True, dtype=F32)
    full = numbered(Alone(module))
    q, k, v = (full[f"{which}_proj.weight"] for which in "qkv")
    pairs = q.reshape(heads, 2, width, hidden)
    rows = []
    for group in range(groups):
        mine = pairs[group * 2 : group * 2 + 2]
        rows += [mine[:, 0].reshape(-1, hidden), mine[:, 1].reshape(-1, hidden)]
        rows += [one.reshape(groups, width, hidden)[group] for one in (k, v)]
    whole = torch.cat(rows)
    found = torch.cat([trained(module, TrainerLayout(tp), rank)["linear_qkv.weight"] for rank in range(tp)])
    assert torch.equal(found, whole)
    for rank in range(tp):
        stacked = torch.cat([one.chunk(tp)[rank] for one in (q, k, v)])
        assert torch.equal(rolled(module, RolloutLayout(tp, True), rank)["qkv_proj.weight"], stacked)
    with pytest.raises(PlanMismatch, match="output gate has 4 query and 2 key/value heads, which 3 ranks"):
        trained(module, TrainerLayout(3), 0)
    with pytest.raises(PlanMismatch, match="which 3 ranks cannot cut evenly"):
        rolled(module, RolloutLayout(3, True), 0)


@pytest.mark.parametrize("q_rank", [None, 2])
def test_latent_attention_has_whole_down_projections_and_cuts_the_others_by_heads(q_rank: int | None) -> None:
    module = LatentAttention(hidden=3, heads=3, q_rank=q_rank, kv_rank=2, nope=2, rope=1, value=2, dtype=F32)
    full = numbered(Alone(module))
    query = "q_proj.weight" if q_rank is None else "q_b_proj.weight"
    up = "linear_q_proj.weight" if q_rank is None else "linear_q_up_proj.weight"
    for rank, heads in enumerate((slice(0, 2), slice(2, 3))):  # three heads on two ranks
        expected = {
            up: full[query].reshape(3, 3, -1)[heads].flatten(0, 1),
            "linear_kv_up_proj.weight": full["kv_b_proj.weight"].reshape(3, 4, 2)[heads].flatten(0, 1),
            "linear_proj.weight": full["o_proj.weight"].reshape(3, 3, 2)[:, heads].flatten(1),
            "linear_kv_down_proj.weight": full["kv_a_proj_with_mqa.weight"],
            "linear_kv_up_proj.layer_norm_weight": full["kv_a_layernorm.weight"],
        }
        held = rolled(module, RolloutLayout(2, True), rank)
        if q_rank is not None:
            expected["linear_q_down_proj.weight"] = full["q_a_proj.weight"]
            expected["linear_q_up_proj.layer_norm_weight"] = full["q_a_layernorm.weight"]
            fused = torch.cat([full["q_a_proj.weight"], full["kv_a_proj_with_mqa.weight"]])
            assert torch.equal(held["fused_qkv_a_proj.weight"], fused)
        else:
            assert torch.equal(held["kv_a_proj_with_mqa.weight"], full["kv_a_proj_with_mqa.weight"])
        found = trained(module, TrainerLayout(2), rank)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name
        assert torch.equal(held[query], expected[up])
        assert torch.equal(held["kv_b_proj.weight"], expected["linear_kv_up_proj.weight"])
        assert torch.equal(held["o_proj.weight"], expected["linear_proj.weight"])


def test_vision_attention_is_per_head_in_megatron_and_stacked_per_rank_in_vllm() -> None:
    module = VisionAttention(hidden=4, heads=2, dtype=F32)
    full = numbered(Alone(module))
    for kind in ("weight", "bias"):
        q, k, v = full[f"qkv.{kind}"].chunk(3)
        for rank in range(2):
            parts = [one.chunk(2)[rank] for one in (q, k, v)]  # a head each
            assert torch.equal(
                trained(module, TrainerLayout(2), rank)[f"linear_qkv.{kind}"], torch.cat(parts)
            )
            assert torch.equal(rolled(module, RolloutLayout(2, True), rank)[f"qkv.{kind}"], torch.cat(parts))
        whole = torch.cat([one.chunk(2)[head] for head in range(2) for one in (q, k, v)])
        assert torch.equal(trained(module, TrainerLayout(1), 0)[f"linear_qkv.{kind}"], whole)


@pytest.mark.parametrize("tp", [1, 2])
def test_gated_delta_nets_have_six_blocks_in_megatron_and_key_heads_in_the_checkpoint(tp: int) -> None:
    module = GatedDeltaNet(hidden=3, key_heads=2, value_heads=4, key_dim=2, value_dim=3, kernel=2, dtype=F32)
    full = numbered(Alone(module))
    qkvz = full["in_proj_qkvz.weight"].reshape(2, -1, 3)  # per key head
    q, k, v, z = qkvz.split([2, 2, 6, 6], dim=1)
    b, a = full["in_proj_ba.weight"].reshape(2, -1, 3).split([2, 2], dim=1)
    for rank in range(tp):
        mine = torch.cat([one.chunk(tp)[rank].flatten(0, 1) for one in (q, k, v, z, b, a)])
        found = trained(module, TrainerLayout(tp), rank)
        assert torch.equal(found["in_proj.weight"], mine)
        conv = torch.cat([one.chunk(tp)[rank] for one in full["conv1d.weight"].split([4, 4, 12])])
        assert torch.equal(found["conv1d.weight"], conv)
        assert torch.equal(found["A_log"], full["A_log"].chunk(tp)[rank])
        held = rolled(module, RolloutLayout(tp, True), rank)
        assert torch.equal(held["in_proj_qkvz.weight"], qkvz.chunk(tp)[rank].flatten(0, 1))
        assert torch.equal(held["conv1d.weight"], conv)
    with pytest.raises(PlanMismatch, match="do not divide for 4 ranks"):
        trained(module, TrainerLayout(4), 0)


def test_a_mamba_mixer_is_cut_block_by_block() -> None:
    module = Mamba(hidden=3, heads=4, head_dim=2, groups=2, state=3, kernel=2, dtype=F32)
    full = numbered(Alone(module))
    for rank in range(2):
        for found in (trained(module, TrainerLayout(2), rank), rolled(module, RolloutLayout(2, True), rank)):
            packed = torch.cat([one.chunk(2)[rank] for one in full["in_proj.weight"].split([8, 8, 6, 6, 4])])
            assert torch.equal(found["in_proj.weight"], packed)
            bias = torch.cat([one.chunk(2)[rank] for one in full["conv1d.bias"].split([8, 6, 6])])
            assert torch.equal(found["conv1d.bias"], bias)
            assert torch.equal(found["norm.weight"], full["norm.weight"].chunk(2)[rank])
            assert torch.equal(found["out_proj.weight"], full["out_proj.weight"].chunk(2, 1)[rank])


MOE = Qwen3Moe(
    vocab=6, hidden=4, expert_intermediate=2, experts=4, layers=2, heads=2, kv_heads=2, head_dim=2, tied=True
)
DEEPSEEK = DeepSeek(
    vocab=6, hidden=4, intermediate=4, expert_intermediate=2, experts=2, layers=2, heads=2, kv_rank=2, nope=2,
    rope=2, value=2, q_rank=2,
)  # fmt: skip
TOWER = VisionTower(4, 4, 1, 2, 4, (3, 2, 2, 2), 5, 4, 1)
VISION = Qwen3VL(
    vocab=6, hidden=4, intermediate=4, layers=2, heads=2, kv_heads=2, head_dim=2, vision=TOWER, tied=True
)
NEXT = Qwen3Next(
    vocab=6, hidden=4, expert_intermediate=2, shared_intermediate=2, experts=2, layers=4, heads=2, kv_heads=2,
    head_dim=2, linear=GatedDeltaNet(4, 2, 2, 2, 2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("model", "checkpoint", "trainer", "rollout"),
    [
        (
            MOE,
            ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.3.gate_proj.weight"],
            ["decoder.layers.0.mlp.router.weight", "decoder.layers.0.mlp.experts.linear_fc1.weight1"],
            ["model.layers.1.mlp.gate.weight", "model.layers.1.mlp.experts.w13_weight"],
        ),
        (
            DEEPSEEK,
            ["model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.0.mlp.gate_proj.weight"],
            ["decoder.layers.0.mlp.router.expert_bias", "decoder.layers.0.pre_mlp_layernorm.weight"],
            ["model.layers.1.self_attn.fused_qkv_a_proj.weight", "model.layers.1.mlp.experts.w2_weight"],
        ),
        (
            VISION,
            [
                "model.visual.merger.linear_fc2.weight",
                "model.language_model.layers.1.self_attn.q_norm.weight",
            ],
            ["language_model.decoder.layers.0.mlp.linear_fc1.weight", "language_model.output_layer.weight"],
            ["visual.blocks.0.attn.qkv.bias", "language_model.model.layers.1.self_attn.qkv_proj.weight"],
        ),
        (
            NEXT,
            ["model.layers.3.self_attn.q_proj.weight", "model.layers.2.linear_attn.in_proj_ba.weight"],
            [
                "decoder.layers.1.self_attention.linear_qkv.weight",
                "decoder.layers.0.self_attention.in_proj.weight",
            ],
            ["model.layers.0.linear_attn.conv1d.weight", "model.layers.0.mlp.shared_expert_gate.weight"],
        ),
    ],
    ids=["qwen3-moe", "deepseek", "qwen3-vl", "qwen3-next"],
)
def test_names_are_those_of_the_frameworks(
    model: Model, checkpoint: list[str], trainer: list[str], rollout: list[str]
) -> None:
    """The trainer is the last of two pipeline stages, where layers are numbered from 0 again."""
    tables = Tables(model)
    last = tables.trainer(TrainerLayout(pp=2, ep=2).at(3, 1))
    assert {*checkpoint} <= {meta.name for meta in model.tensors()}
    assert {*trainer} <= last.keys()
    assert {*rollout} <= tables.rollout(RolloutLayout(1, True).at(0, 1)).keys()
    assert not any(name.startswith(("embedding.", "vision_model.")) for name in last)


def test_two_modules_under_one_name_are_refused() -> None:
    class Twice(Alone):
        def modules(self) -> tuple[Placed, ...]:
            module = Mamba(hidden=1, heads=1, head_dim=1, groups=1, state=1)
            return (Placed(module, 0, "a.", "m.", "a."), Placed(module, 0, "b.", "m.", "b."))

    with pytest.raises(PlanMismatch, match=r"two modules name a parameter 'm\.dt_bias'"):
        Tables(Twice(MOE.modules()[0].module)).trainer(TrainerLayout().at(0, 1))
