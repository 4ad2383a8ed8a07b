"""Layouts, cuts and live parameters that do not fit are refused by name; nothing is guessed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.layouts import (
    Layout,
    RowMap,
    concat,
    export,
    local_tensor,
    plain,
    qkv,
    row_map,
    row_maps,
    vocab,
)
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.shards import split

COLUMN = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
ROW = TPAttributes({"tensor_model_parallel": True, "partition_dim": 1, "partition_stride": 1})
GLU = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2})
WHOLE = TPAttributes({"tensor_model_parallel": False})


def meta(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParamMeta:
    return ParamMeta(name, dtype, shape)


def maps_of(layout: Layout, attributes: TPAttributes, world: int) -> list[RowMap]:
    numbers = {one.name: number for number, one in enumerate(layout.metas)}
    return [row_map(layout, "w", attributes, rank, world, numbers) for rank in range(world)]


def exported(maps: list[RowMap], local: list[Tensor], metas: tuple[ParamMeta, ...]) -> list[Tensor]:
    full = export([{"w": one} for one in maps], [{"w": tensor} for tensor in local], metas)
    return [full[one.name] for one in metas]


def test_a_sharded_parameter_without_attributes_is_an_error_on_several_ranks_only() -> None:
    layout = plain(meta("w", 4, 2))
    with pytest.raises(MissingTPAttributes, match=r"'w' of full shape \[4, 2\]"):
        row_map(layout, "w", TPAttributes({}), 0, 2, {"w": 0})
    assert row_map(layout, "w", TPAttributes({}), 0, 1, {"w": 0}).local_shape == (4, 2)
    declared = plain(meta("w", 4, 2), replicated=True)
    assert row_map(declared, "w", TPAttributes({}), 1, 2, {"w": 0}).owned_elements(0) == 0


@pytest.mark.parametrize(
    ("layout", "attributes", "numbers", "error", "text"),
    [
        (plain(meta("x", 4)), ROW, {"x": 0}, MissingTPAttributes, "partition_dim 1, expected 0 to 0"),
        (plain(meta("x", 4)), COLUMN, {"y": 0}, PlanMismatch, "'x', which the plan does not name"),
        (plain(meta("x", 3, 2)), GLU, {"x": 0}, PlanMismatch, "parameter 'w': a dimension of 3"),
        (plain(meta("x", 4), replicated=True), COLUMN, {"x": 0}, PlanMismatch, "declared replicated"),
    ],
)
def test_maps_that_cannot_be_are_refused(
    layout: Layout, attributes: TPAttributes, numbers: dict[str, int], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        row_map(layout, "w", attributes, 0, 2, numbers)


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanMismatch, match=r"'b' .* cannot be fused with 'a'"):
        concat(meta("a", 2, 3), meta("b", 2, 4))
    with pytest.raises(PlanMismatch, match=r"torch.float16"):
        concat(meta("a", 2), meta("b", 2, dtype=torch.float16))
    with pytest.raises(PlanMismatch, match="3 query heads in 2 groups"):
        qkv(meta("q", 3), meta("k", 2), meta("v", 2), heads=3, groups=2, head_dim=1)
    with pytest.raises(PlanMismatch, match=r"'v' has shape \[3\], expected 2 heads of 1"):
        qkv(meta("q", 4), meta("k", 2), meta("v", 3), heads=4, groups=2, head_dim=1)
    with pytest.raises(PlanMismatch, match="padded to 3 rows, expected at least its own 4"):
        vocab(meta("embed", 4, 2), 3)


def test_an_export_that_misses_or_doubles_an_element_is_refused() -> None:
    only = meta("x", 4)
    first, second = maps_of(plain(only), COLUMN, 2)
    part = torch.zeros(2)
    with pytest.raises(PlanMismatch, match=r"element 2 .* told by 0 ranks"):
        exported([first], [part], (only,))
    with pytest.raises(PlanMismatch, match=r"element 2 .* told by 2 ranks"):
        exported([first, second, second], [part] * 3, (only,))
    with pytest.raises(PlanMismatch, match=r"'w' is torch.float32 \[3\]"):
        exported([first, second], [torch.zeros(3), part], (only,))
    with pytest.raises(PlanMismatch, match=r"'w' is torch.float64 \[2\]"):
        exported([first, second], [part.double(), part], (only,))


def test_building_from_the_wrong_tensors_is_refused() -> None:
    one = maps_of(concat(meta("a", 2), meta("b", 2)), WHOLE, 1)[0]
    with pytest.raises(PlanMismatch, match="2 checkpoint tensors, 1 were given"):
        local_tensor(one, [torch.zeros(2)])
    with pytest.raises(PlanMismatch, match=r"checkpoint tensor 1, found torch.float64"):
        local_tensor(one, [torch.zeros(2), torch.zeros(2).double()])
    with pytest.raises(PlanMismatch, match=r"at least 2 elements as its checkpoint tensor 0, found .*\[1\]"):
        local_tensor(one, [torch.zeros(1), torch.zeros(2)])


def test_live_parameters_must_match_their_layout_in_name_and_shape() -> None:
    layouts = {"w": plain(meta("w", 4, 2))}
    numbers = {"w": 0}
    live = COLUMN.stamp(torch.zeros(2, 2))
    assert row_maps(layouts, {"w": live}, 1, 2, numbers)["w"].row.tolist() == [2, 3]
    with pytest.raises(PlanMismatch, match=r"'w' has shape \[4, 1\] on rank 0, expected \[2, 2\]"):
        row_maps(layouts, {"w": COLUMN.stamp(torch.zeros(4, 1))}, 0, 2, numbers)
    with pytest.raises(PlanMismatch, match="'x' has no layout"):
        row_maps(layouts, {"w": live, "x": live}, 0, 2, numbers)
    with pytest.raises(PlanMismatch, match="'w' has no live tensor"):
        row_maps(layouts, {}, 0, 2, numbers)


def test_a_half_width_shard_without_attributes_never_passes_for_the_whole() -> None:
    full = torch.arange(24.0).reshape(4, 6)
    layouts, numbers = {"w": plain(meta("w", 4, 6))}, {"w": 0}
    shards = [{"w": split(full, 2, rank, 0)} for rank in range(2)]
    with pytest.raises(MissingTPAttributes, match=r"'w' of local shape \[2, 6\].*\[4, 6\]"):
        row_maps(layouts, shards[0], 0, 2, numbers)
    TPAttributes({"tensor_model_parallel": False, "partition_dim": -1}).stamp(shards[0]["w"])
    with pytest.raises(MissingTPAttributes, match=r"'w' of local shape \[2, 6\].*\[4, 6\]"):
        row_maps(layouts, shards[0], 0, 2, numbers)
    for shard in shards:
        COLUMN.stamp(shard["w"])
    maps = [row_maps(layouts, shard, rank, 2, numbers) for rank, shard in enumerate(shards)]
    assert torch.equal(export(maps, shards, (meta("w", 4, 6),))["w"], full)
