"""Fault case 004: query, key and value heads scrambled between the fused tensor and the checkpoint."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from weightsync.reference.heads import HeadCut, HeadOrder
from weightsync.reference.layouts import concat, export, local_tensor, qkv, row_map
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.reshard import reshard
from weightsync.reference.shards import Part, split, take

COLUMN = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
NUMBERS = {"q": 0, "k": 1, "v": 2}


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("inputs", [(), (1,), (3,)], ids=["bias", "one input", "three inputs"])
def test_fused_rows_come_out_per_head_kind_and_go_back(tp: int, inputs: tuple[int, ...]) -> None:
    """Fault case 004: four query heads in two groups; rows stand per group, not per kind."""
    rows = torch.tensor([0.0, 1, 20, 30, 2, 3, 21, 31])
    fused = rows.reshape(-1, *(1,) * len(inputs)).expand(8, *inputs).contiguous()
    metas = tuple(
        ParamMeta(name, torch.float32, (count, *inputs)) for name, count in (("q", 4), ("k", 2), ("v", 2))
    )
    layout = qkv(*metas, heads=4, groups=2, head_dim=1)
    maps = [row_map(layout, "w", COLUMN, rank, tp, NUMBERS) for rank in range(tp)]
    shards = [split(fused, tp, rank, 0) for rank in range(tp)]
    full = export([{"w": one} for one in maps], [{"w": shard} for shard in shards], metas)
    expected = {"q": [0, 1, 2, 3], "k": [20, 21], "v": [30, 31]}
    for name, values in expected.items():
        assert full[name].reshape(len(values), -1)[:, 0].tolist() == values
        assert full[name].shape == (len(values), *inputs)
    back = [local_tensor(one, [full["q"], full["k"], full["v"]]) for one in maps]
    assert torch.equal(torch.cat(back), fused)


def test_a_cut_per_kind_reads_the_fused_rows_wrongly() -> None:
    """Fault case 004: what the fault exports; so the test above would see it."""
    fused = torch.tensor([0.0, 1, 20, 30, 2, 3, 21, 31]).reshape(8, 1)
    metas = tuple(
        ParamMeta(name, torch.float32, (count, 1)) for name, count in (("q", 4), ("k", 2), ("v", 2))
    )
    one = row_map(concat(*metas), "w", COLUMN, 0, 1, NUMBERS)
    assert export([{"w": one}], [{"w": fused}], metas)["q"].flatten().tolist() == [0, 1, 20, 30]


@given(
    group=st.integers(1, 3),
    kv_heads=st.integers(1, 4),
    head_dim=st.integers(1, 3),
    worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    order=st.sampled_from(["stacked", "grouped"]),
)
def test_heads_go_from_any_ranks_to_any_ranks_in_one_order(
    group: int,
    kv_heads: int,
    head_dim: int,
    worlds: tuple[int, int],
    order: HeadOrder,
) -> None:
    """Fault case 004: also where ranks share a key/value head and hold it several times over."""
    heads = group * kv_heads
    assume(heads >= max(worlds))
    cut = HeadCut(heads, kv_heads, head_dim, 0, order)
    full = torch.arange((heads + 2 * kv_heads) * head_dim)
    held = [
        [
            Part(full.shape, (tuple(interval for interval, _ in cut.held(rank, world)),))
            for rank in range(world)
        ]
        for world in worlds
    ]
    made = reshard([take(full, part) for part in held[0]], *held)
    assert all(torch.equal(shard, take(full, part)) for shard, part in zip(made, held[1], strict=True))
