from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from weightsync.cli.model.synthetic import SyntheticTrainer, SyntheticWorkload, special_bits
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, int_view, same_bits

SHAPE = ModelShape(
    vocab=5, hidden=4, intermediate=6, layers=1, heads=4, kv_heads=2, head_dim=2, tied=True, qk_norm=True
)


def deployment(tp: int) -> Deployment:
    return Deployment(SHAPE, tp, (RolloutLayout(1, False),), 4096)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("seed", "density"), [(0, 0.0), (1, 0.01), (2, 0.2), (3, 0.7), (4, 1.0)])
def test_each_step_changes_exactly_the_elements_that_counts_says(
    seed: int, density: float, world: int
) -> None:
    trainer = SyntheticTrainer(deployment(world), 0, density=density, seed=seed)
    before = trainer.export()
    for step in (1, 2):
        total = trainer.step()["changed"]
        after = trainer.export()
        changed = tuple(int((int_view(after[name]) != int_view(before[name])).sum()) for name in after)
        assert changed == trainer.workload.counts(step)
        assert sum(changed) == total
        before = after


def test_ranks_in_different_processes_and_different_cuts_agree() -> None:
    trainers = [SyntheticTrainer(deployment(world), 0, density=0.5, seed=3) for world in (1, 2, 2)]
    for _ in range(3):
        for trainer in trainers:
            trainer.step()
    exports = [trainer.export() for trainer in trainers]
    for name in exports[0]:
        assert same_bits(exports[0][name], exports[1][name])
        assert same_bits(exports[0][name], exports[2][name])
    norm = "decoder.final_layernorm.weight"
    assert same_bits(trainers[1].model.params[0][norm].detach(), trainers[1].model.params[1][norm].detach())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "world", "replicas"), [(9, 3, 2, 1), (9, 3, 3, 0), (4, 1, 3, 2), (6, 3, 2, 1)]
)
def test_replicated_key_value_heads_stay_equal_on_all_ranks(
    heads: int, kv_heads: int, world: int, replicas: int
) -> None:
    cut = Deployment(replace(SHAPE, heads=heads, kv_heads=kv_heads), world, (RolloutLayout(1, False),), 4096)
    fused = "decoder.layers.0.self_attention.linear_qkv.weight"
    keys = sum(maps[fused].elements(1) for maps in cut.trainer_maps)
    assert keys == (kv_heads + replicas) * SHAPE.head_dim * SHAPE.hidden
    trainer = SyntheticTrainer(cut, 0, density=0.5, seed=4)
    for _ in range(2):
        trainer.step()
        whole = trainer.export()
        for rank in range(world):
            for name, told in cut.shards(rank, whole).items():
                held, real = trainer.model.params[rank][name], cut.trainer_maps[rank][name].tensor >= 0
                rows = [int_view(one).view(len(real), -1)[real] for one in (held, told)]
                assert torch.equal(*rows), f"{name} on rank {rank}"


def test_padding_rows_change_and_are_not_in_the_export() -> None:
    trainer = SyntheticTrainer(deployment(2), 1, density=0.0, seed=0)
    before = trainer.export()
    trainer.step()
    padding = int_view(trainer.params["embedding.word_embeddings.weight"])
    assert bool((padding != 0).all())
    assert all(same_bits(before[name], tensor) for name, tensor in trainer.export().items())


def test_the_extremes_of_density() -> None:
    metas = SHAPE.tensors()
    assert set(SyntheticWorkload(metas, 0.0, 1).counts(1)) == {0}
    assert SyntheticWorkload(metas, 1.0, 1).counts(1) == tuple(meta.numel for meta in metas)


def test_seed_and_step_decide_and_nothing_else() -> None:
    work = SyntheticWorkload(SHAPE.tensors(), 0.5, 1)
    assert work.counts(1) == SyntheticWorkload(SHAPE.tensors(), 0.5, 1).counts(1)
    assert work.counts(1) != work.counts(2)
    assert work.counts(1) != SyntheticWorkload(SHAPE.tensors(), 0.5, 2).counts(1)


def test_counts_of_a_large_model_allocate_nothing_of_its_size() -> None:
    large = (ParamMeta("huge", torch.bfloat16, (1 << 20, 1 << 14)),)
    (count,) = SyntheticWorkload(large, 0.01, 0).counts(1)
    assert abs(count / large[0].numel - 0.01) < 1e-4


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_include_nans_and_signed_zeros_and_always_differ(dtype: torch.dtype) -> None:
    work = SyntheticWorkload((ParamMeta("t", dtype, (4096,)),), 0.5, 0)
    change = work.change(1, 0)
    old = int_view(work.initial()["t"])[change.positions]
    new = change.applied(old, torch.ones(len(old), dtype=torch.bool))
    assert bool((new != old).all())
    assert torch.equal(change.positions, change.positions.unique())
    seen = {value % (1 << 8 * dtype.itemsize) for value in new.tolist()}
    assert set(special_bits(dtype)) <= seen
    if dtype.is_floating_point:
        patterns = (
            torch.tensor(list(special_bits(dtype)), dtype=torch.int64).to(new.dtype).view(dtype).float()
        )
        assert bool(patterns.isnan().any())
        assert bool(((patterns == 0) & patterns.signbit()).any())
