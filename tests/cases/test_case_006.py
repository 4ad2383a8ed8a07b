"""Fault case 006: rows that only pad the vocabulary are exported as if they were tokens."""

from __future__ import annotations

import torch

from weightsync.reference.layouts import RowMap, export, plain, row_map, vocab
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.shards import split

TP = 4
COLUMN = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})
METAS = (
    ParamMeta("embed", torch.float32, (10, 1)),
    ParamMeta("head", torch.float32, (10, 1)),
    ParamMeta("score", torch.float32, (3, 1)),
)
LAYOUTS = {
    "embed": vocab(METAS[0], 16),
    "head": vocab(METAS[1], 16),
    "score": plain(METAS[2], replicated=True),
}


def rank_maps(rank: int) -> dict[str, RowMap]:
    numbers = {meta.name: number for number, meta in enumerate(METAS)}
    return {
        name: row_map(layout, name, TPAttributes({}) if layout.replicated else COLUMN, rank, TP, numbers)
        for name, layout in LAYOUTS.items()
    }


def test_padding_is_cut_off_each_matrix_and_a_small_head_is_left_alone() -> None:
    """Fault case 006: ten tokens padded to sixteen rows over four ranks."""
    embed = torch.arange(16.0).reshape(16, 1)
    score = torch.tensor([[7.0], [8.0], [9.0]])
    params = [
        {"embed": split(embed, TP, rank, 0), "head": split(embed + 100, TP, rank, 0), "score": score}
        for rank in range(TP)
    ]
    full = export([rank_maps(rank) for rank in range(TP)], params, METAS)
    assert torch.equal(full["embed"], embed[:10])
    assert torch.equal(full["head"], embed[:10] + 100)
    assert torch.equal(full["score"], score)


def test_the_last_rank_holds_only_padding_and_still_has_a_map() -> None:
    """Fault case 006: every rank joins, also with nothing to tell."""
    maps = [rank_maps(rank)["embed"] for rank in range(TP)]
    assert [one.owned_elements(0) for one in maps] == [4, 4, 2, 0]
    assert [one.local_shape for one in maps] == [(4, 1)] * TP


def test_a_change_in_padded_rows_only_gives_no_positions() -> None:
    """Fault case 006: an optimizer may move padding; nothing of it, and no position beyond, travels."""
    for rank, padded in ((2, [2, 3]), (3, [0, 1, 2, 3])):
        output, _ = rank_maps(rank)["head"].to_checkpoint(torch.tensor(padded))
        assert output.eq(-1).all()
    for rank in range(TP):
        output, flat = rank_maps(rank)["head"].to_checkpoint(torch.arange(4))
        assert flat[output >= 0].lt(10).all()
