"""Fault case 005: fewer key/value heads than ranks, so that a rank's fused rows hold no whole head of some kind."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import RowMap, export, local_tensor, qkv, row_map
from weightsync.reference.params import ParamMeta, TPAttributes, same_bits
from weightsync.reference.shards import split

COLUMN = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
NUMBERS = {"q": 0, "k": 1, "v": 2}


def metas(heads: int, groups: int, head_dim: int) -> tuple[ParamMeta, ParamMeta, ParamMeta]:
    q, k, v = (
        ParamMeta(name, torch.float32, (count * head_dim, 1))
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    return q, k, v


def maps(heads: int, groups: int, head_dim: int, tp: int) -> list[RowMap]:
    layout = qkv(*metas(heads, groups, head_dim), heads=heads, groups=groups, head_dim=head_dim)
    return [row_map(layout, "w", COLUMN, rank, tp, NUMBERS) for rank in range(tp)]


def test_the_first_rank_gives_no_key_row_and_no_value_row() -> None:
    """Fault case 005: four query heads and one key/value head over two ranks."""
    first, second = maps(4, 1, 1, 2)
    assert [first.elements(output) for output in range(3)] == [3, 0, 0]
    assert [second.elements(output) for output in range(3)] == [1, 1, 1]
    shards = [torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([[3.0], [20.0], [30.0]])]
    full = export([{"w": first}, {"w": second}], [{"w": shard} for shard in shards], metas(4, 1, 1))
    assert {name: full[name].flatten().tolist() for name in NUMBERS} == {
        "q": [0.0, 1.0, 2.0, 3.0], "k": [20.0], "v": [30.0],
    }  # fmt: skip


@given(
    group=st.integers(1, 4), groups=st.integers(1, 3), head_dim=st.integers(1, 3), replicas=st.integers(2, 4),
    data=st.data(),
)  # fmt: skip
def test_rows_find_their_heads_wherever_the_ranks_cut(
    group: int, groups: int, head_dim: int, replicas: int, data: st.DataObject
) -> None:
    """Fault case 005: every rank count that the key/value heads divide, as far as the rows divide by it."""
    tp = groups * replicas
    rows = (group + 2) * groups * head_dim
    assume(rows % tp == 0)
    heads = group * groups
    whole = torch.randperm(rows, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99))))
    fused = whole.float().reshape(rows, 1)
    every = maps(heads, groups, head_dim, tp)
    shards = [split(fused, tp, rank, 0) for rank in range(tp)]
    full = export(
        [{"w": one} for one in every], [{"w": one} for one in shards], metas(heads, groups, head_dim)
    )
    per_group = fused.view(groups, group + 2, head_dim)
    assert same_bits(full["q"], per_group[:, :group].reshape(-1, 1))
    assert same_bits(full["k"], per_group[:, group].reshape(-1, 1))
    assert same_bits(full["v"], per_group[:, group + 1].reshape(-1, 1))
    for one, shard in zip(every, shards, strict=True):
        assert same_bits(local_tensor(one, [full[name] for name in NUMBERS]), shard)


@pytest.mark.parametrize(("heads", "groups"), [(4, 0), (4, 3)])
def test_heads_without_whole_groups_are_refused_before_anything_divides_by_them(
    heads: int, groups: int
) -> None:
    """Fault case 005: a sentence, not a division by zero."""
    with pytest.raises(PlanMismatch, match="expected a whole number of heads per group"):
        qkv(*metas(heads, groups, 1), heads=heads, groups=groups, head_dim=1)
