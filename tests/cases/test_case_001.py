"""Fault case 001: attributes dropped when a snapshot and then a send copy reallocate a parameter."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference.layouts import export, plain, row_map
from weightsync.reference.params import ParamMeta, TPAttributes, carry, fresh_copy, read, same_bits
from weightsync.reference.shards import join, split

MARKS = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 2,
    "parallel_mode": "column",
}
META = ParamMeta("w", torch.bfloat16, (8, 6))
DROPPING: dict[str, Callable[[Tensor], Tensor]] = {
    "empty_like": lambda t: torch.empty_like(t).copy_(t.detach()),
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "deepcopy": lambda t: deepcopy(Parameter(t.data)),
    "Parameter": lambda t: Parameter(t.data),
    "float32": lambda t: t.to(torch.float32),
    "meta": lambda t: t.to("meta"),
}


def live_shards() -> tuple[Tensor, list[Tensor]]:
    full = torch.arange(48).reshape(8, 6).to(torch.bfloat16)
    shards = [Parameter(split(full, 2, rank, 0, stride=2)) for rank in range(2)]
    return full, [TPAttributes(MARKS).stamp(shard) for shard in shards]


@pytest.mark.parametrize("second", DROPPING)
@pytest.mark.parametrize("first", DROPPING)
def test_marks_reach_the_send_copy_through_any_two_reallocations(first: str, second: str) -> None:
    """Fault case 001: snapshot by one route, send copy by another."""
    _, (live, _) = live_shards()
    snapshot = carry(live, DROPPING[first](live))
    sent = carry(snapshot, DROPPING[second](snapshot))
    for made in (snapshot, sent):
        assert made is not live
        assert dict(read(made).values) == MARKS


@pytest.mark.parametrize("route", DROPPING)
def test_no_marks_are_invented_for_a_tensor_without_any(route: str) -> None:
    """Fault case 001: filling in defaults would turn a loud loss into a silent one."""
    bare = Parameter(torch.zeros(4, 6, dtype=torch.bfloat16))
    assert dict(read(carry(bare, DROPPING[route](bare))).values) == {}
    assert dict(read(fresh_copy(bare)).values) == {}


def test_gathering_from_copies_gives_what_gathering_from_live_parameters_gives() -> None:
    """Fault case 001: the copy says how it is cut, so nobody takes a shard for the whole."""
    full, live = live_shards()
    sent = [fresh_copy(fresh_copy(shard), device="cpu") for shard in live]
    with torch.no_grad():
        for shard in live:
            shard.zero_()
    maps = [row_map(plain(META), "w", read(shard), rank, 2, {"w": 0}) for rank, shard in enumerate(sent)]
    gathered = export([{"w": one} for one in maps], [{"w": shard} for shard in sent], (META,))["w"]
    assert same_bits(gathered, full)
    assert same_bits(join(sent, read(sent[0]).partition_dim, read(sent[0]).partition_stride), full)
