"""Fault case 004: query, key and value heads scrambled between the fused tensor and the checkpoint."""

from __future__ import annotations

import pytest
import torch

from weightsync.reference.layouts import export, local_tensor, qkv, row_map
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.shards import split

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
