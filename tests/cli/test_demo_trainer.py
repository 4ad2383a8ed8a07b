from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.cli import scenario_files, workload
from weightsync.cli.model import optimizer
from weightsync.cli.model.checkpoint import load_checkpoint, make_checkpoint
from weightsync.cli.model.config import DecoderConfig, RopeScaling, read_config
from weightsync.cli.model.trainer import DemoTrainer
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.parallel import TrainerLayout
from weightsync.reference.params import read, same_bits

SHAPE = ModelShape(
    vocab=259, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2, head_dim=4, tied=True, qk_norm=True
)
CONFIG = DecoderConfig("qwen3", SHAPE)
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=64)


def config_of(kind: str, *, tied: bool = True, dtype: torch.dtype = torch.float32) -> DecoderConfig:
    shape = replace(SHAPE, tied=tied, qk_norm=kind == "qwen3", qkv_bias=kind == "qwen2", dtype=dtype)
    return DecoderConfig(kind, shape, rope_scaling=SCALING if kind == "llama" else None)


def trainer_of(folder: Path, rank: int, tp: int, **options: Any) -> DemoTrainer:
    shape = read_config(folder / "config.json").shape
    return DemoTrainer(
        folder, rank, Deployment(shape, tp, (RolloutLayout(1, False),), 4096), seed=0, **options
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", CONFIG, seed=0)


def test_adamw_equals_torchs_own_and_keeps_storage_and_attributes() -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(6, 4).bfloat16())
    norm = torch.nn.Parameter(torch.ones(4).bfloat16())
    weight.tensor_model_parallel, weight.partition_dim = True, 0  # type: ignore[attr-defined]
    theirs = [torch.nn.Parameter(weight.detach().float()), torch.nn.Parameter(norm.detach().float())]
    reference = torch.optim.AdamW(
        [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    ours = optimizer.AdamW({"w": weight, "n": norm}, lr=1e-2)
    place = weight.data_ptr()
    for _ in range(5):
        grads = {"w": torch.randn(6, 4), "n": torch.randn(4)}
        theirs[0].grad, theirs[1].grad = grads["w"], grads["n"]
        reference.step()
        ours.step(grads)
    torch.testing.assert_close(ours.masters["w"], theirs[0].detach(), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(ours.masters["n"], theirs[1].detach(), rtol=1e-6, atol=1e-7)
    assert same_bits(weight.detach(), ours.masters["w"].bfloat16())
    assert weight.data_ptr() == place
    assert read(weight) == read(ours.masters["w"])
    with pytest.raises(PlanMismatch, match="gradient of 'n' is none"):
        ours.step({"w": torch.zeros(6, 4)})


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_every_rank_takes_the_same_steps_and_padding_rows_change(kind: str, tmp_path: Path) -> None:
    config = replace(config_of(kind, tied=kind != "llama", dtype=torch.bfloat16), rope_scaling=None)
    folder = make_checkpoint(tmp_path, config, seed=0)
    ranks = [trainer_of(folder, rank, 2, lr=1e-3, batch=2, tokens=16) for rank in range(2)]
    first = ranks[0].export()
    assert all(same_bits(load_checkpoint(folder).weights[name], tensor) for name, tensor in first.items())
    losses = [[rank.step()["loss"] for _ in range(4)] for rank in ranks]
    assert losses[0] == losses[1]
    assert losses[0][-1] < losses[0][0]
    exports = [rank.export() for rank in ranks]
    assert all(same_bits(exports[0][name], exports[1][name]) for name in first)
    assert all(not same_bits(exports[0][name], first[name]) for name in first if first[name].dim() > 1)
    joined = ranks[0].model.joined()
    assert all(same_bits(full, joined[name][: len(full)]) for name, full in exports[0].items())
    head = "embedding.word_embeddings.weight" if config.shape.tied else "output_layer.weight"
    padding = ranks[1].params[head][config.shape.vocab - 256 :].detach()
    assert bool((padding != 0).any())


@pytest.mark.parametrize(("heads", "kv_heads", "worlds"), [(4, 2, (1, 2)), (9, 3, (1, 2, 3))])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen2"])
def test_cutting_the_model_changes_no_bit(
    kind: str, heads: int, kv_heads: int, worlds: tuple[int, ...], tmp_path: Path
) -> None:
    config = replace(config_of(kind, tied=kind != "llama", dtype=torch.bfloat16), rope_scaling=None)
    unpadded = replace(
        config, shape=replace(config.shape, vocab=256 * worlds[-1], heads=heads, kv_heads=kv_heads)
    )
    folder = make_checkpoint(tmp_path, unpadded, seed=0)
    exports = []
    for world in worlds:
        trainer = trainer_of(folder, 0, world, lr=1e-3, batch=2, tokens=16)
        losses = [trainer.step()["loss"] for _ in range(3)]
        exports.append((losses, trainer.export()))
        for rank, params in enumerate(trainer.model.params):  # replicas took the steps of who speaks for them
            told = trainer.model.deployment.shards(rank, exports[-1][1])
            assert all(same_bits(params[name], told[name]) for name in params)
    for one in exports[1:]:
        assert one[0] == exports[0][0]
        assert all(same_bits(one[1][name], tensor) for name, tensor in exports[0][1].items())


@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_stages_and_replicas_change_no_bit_of_what_is_trained(tied: bool, tmp_path: Path) -> None:
    """The padded vocabulary is of one size here, so the softmax is; a tied copy follows its embedding."""
    folder = make_checkpoint(tmp_path, config_of("qwen3", tied=tied, dtype=torch.bfloat16), seed=0)
    shape = read_config(folder / "config.json").shape
    exports = []
    for layout in (TrainerLayout(2), TrainerLayout(2, pp=2), TrainerLayout(2, pp=2, dp=2, stages=(0, 2))):
        deployment = Deployment(shape, layout, (RolloutLayout(1, False),), 4096)
        trainer = DemoTrainer(folder, 0, deployment, lr=1e-3, seed=0, batch=2, tokens=16)
        losses = [trainer.step()["loss"] for _ in range(3)]
        exports.append((losses, trainer.export()))
        for name, copy in trainer.params_of(len(deployment.trainers) - 1).items():
            if tied and layout.pp > 1 and name == "output_layer.weight":
                first = trainer.params_of(1)["embedding.word_embeddings.weight"]
                assert same_bits(copy.detach(), first.detach())
    for losses, export in exports[1:]:
        assert losses == exports[0][0]
        assert all(same_bits(export[name], tensor) for name, tensor in exports[0][1].items())


def test_a_deployment_of_another_model_is_refused(folder: Path) -> None:
    other = Deployment(replace(SHAPE, layers=1), 2, (RolloutLayout(1, False),), 4096)
    with pytest.raises(PlanMismatch, match=r"build the deployment from this folder's config\.json"):
        DemoTrainer(folder, 0, other, lr=1e-3, seed=0)


def test_live_parameters_keep_their_attributes_and_storage_over_steps(folder: Path) -> None:
    trainer = trainer_of(folder, 1, 2, lr=1e-3, batch=1, tokens=8)
    before = {name: (read(param), param.data_ptr()) for name, param in trainer.params.items()}
    trainer.step()
    assert {name: (read(param), param.data_ptr()) for name, param in trainer.params.items()} == before
    fused = read(trainer.params["decoder.layers.0.mlp.linear_fc1.weight"])
    assert (fused.sharded, fused.partition_dim, fused.partition_stride) == (True, 0, 2)


def test_another_thread_count_gives_the_same_bits(folder: Path) -> None:
    before = torch.get_num_threads()
    exports = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            trainer = trainer_of(folder, 0, 2, lr=1e-3)
            trainer.step()
            assert torch.get_num_threads() == threads
            exports.append(trainer.export())
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(exports[0][name], exports[1][name]) for name in exports[0])


def test_the_loss_starts_where_a_uniform_guess_over_the_padded_vocabulary_is(folder: Path) -> None:
    loss = trainer_of(folder, 0, 2, lr=1e-3).step()["loss"]
    assert abs(loss - math.log(512)) < 0.1


def test_a_scenario_leads_to_its_trainer_and_rollout_weights(tmp_path: Path) -> None:
    small = [
        "model.shape.hidden_size=16",
        "model.shape.intermediate_size=16",
        "model.shape.num_hidden_layers=1",
        "model.shape.num_attention_heads=2",
        "model.shape.num_key_value_heads=2",
        "model.shape.head_dim=4",
    ]
    demo = scenario_files.load("demo", small)
    folder = workload.prepare(demo, tmp_path)
    assert folder is not None
    again = scenario_files.load("demo", [f"model.checkpoint={folder}", "workload.kind=synthetic"])
    assert workload.model_shape(again) == workload.model_shape(demo)
    assert workload.prepare(again, tmp_path) == folder
    tiny = scenario_files.load("tiny-sync")
    assert workload.prepare(tiny, tmp_path) is None
    for scenario, where in ((demo, folder), (again, folder), (tiny, None)):
        trainer = workload.make_trainer(scenario, 0, where)
        first = workload.first_weights(scenario, where)
        exported = trainer.export()
        assert all(same_bits(first[name], exported[name]) for name in first)
        fused = workload.deployment(scenario).weights(RankId("rollout", 1, 1), first)
        assert "model.layers.0.self_attn.qkv_proj.weight" in fused
        trainer.step()
