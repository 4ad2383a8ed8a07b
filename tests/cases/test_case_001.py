"""Fault case 001: attributes dropped when a snapshot and then a send copy reallocate a parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.errors import AttributeMismatch
from weightsync.reference.grad_norm import RankGrads, grad_norm
from weightsync.reference.layouts import export, plain, row_map
from weightsync.reference.params import ParamMeta, TPAttributes, carry, fresh_copy, read, same_bits
from weightsync.reference.shards import join, split
from weightsync.reference.snapshot import SnapshotSlots
from weightsync.reference.steps import run
from weightsync.testing.copies import DROPPING
from weightsync.testing.tiny import tiny_deployment

MARKS = {
    "tensor_model_parallel": True,
    "partition_dim": 0,
    "partition_stride": 2,
    "parallel_mode": "column",
}
META = ParamMeta("w", torch.bfloat16, (8, 6))


def live_shards() -> tuple[Tensor, list[Tensor]]:
    full = torch.arange(48).reshape(8, 6).to(torch.bfloat16)
    shards = [Parameter(split(full, 2, rank, 0, stride=2)) for rank in range(2)]
    return full, [TPAttributes(MARKS).stamp(shard) for shard in shards]


@pytest.mark.parametrize("first", DROPPING)
def test_marks_reach_the_send_copy_through_any_two_reallocations(first: str) -> None:
    """Fault case 001: snapshot by one route, send copy by another."""
    _, (live, _) = live_shards()
    snapshot = carry(live, DROPPING[first](live))
    for second, route in DROPPING.items():
        sent = carry(snapshot, route(snapshot))
        for made in (snapshot, sent):
            assert made is not live
            assert dict(read(made).values) == MARKS, second


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


def hops(live: Mapping[str, Tensor]) -> dict[str, Mapping[str, Tensor]]:
    """Snapshot, fp32 master, and a move to a device that is not this one."""
    slots = SnapshotSlots({name: tensor.dtype for name, tensor in live.items()})
    run(slots.write(0, live))
    snapshot = slots.tensors(0)
    masters = {name: fresh_copy(tensor, dtype=torch.float32) for name, tensor in snapshot.items()}
    return {
        "snapshot": snapshot,
        "fp32 master": masters,
        "move": {name: fresh_copy(tensor, device="meta") for name, tensor in masters.items()},
    }


def test_every_parameter_of_a_model_keeps_its_marks_through_every_hop() -> None:
    """Fault case 001: two reallocations, each of which lost them; the ledger looks after each."""
    deployment = tiny_deployment()
    checkpoint = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
    for rank in range(deployment.tp):
        live = deployment.shards(rank, checkpoint)
        ledger, before = AttributeLedger(live), live
        for hop, params in hops(live).items():
            ledger.check(hop, params, moved_from=before)
            before = params


def test_marks_that_come_after_the_first_backup_reach_the_next_one() -> None:
    """Fault case 001: the embedding had none yet when its copy was allocated."""
    live = {"word_embeddings.weight": Parameter(torch.zeros(4, 6))}
    ledger = AttributeLedger(live)
    slots = SnapshotSlots({"word_embeddings.weight": torch.float32})
    run(slots.write(0, live))
    TPAttributes(MARKS).stamp(live["word_embeddings.weight"])
    assert {found.attribute for found in ledger.refresh(live)} == set(MARKS)
    with pytest.raises(AttributeMismatch, match="after hop 'first snapshot'"):
        ledger.check("first snapshot", slots.tensors(0))
    run(slots.write(0, live))
    ledger.check("second snapshot", slots.tensors(0))


@pytest.mark.parametrize("route", DROPPING)
def test_the_fault_itself_shows_in_every_reader_of_the_copies(route: str) -> None:
    """Fault case 001: nothing fails by itself; the norm is that of rank 0, and the ledger names the hop."""
    full, live = live_shards()
    grads = [torch.full(shard.shape, 2.0) for shard in live]
    bare = [DROPPING[route](shard) for shard in live]

    def norm(params: list[Tensor]) -> float:
        pairs = zip(params, grads, strict=True)
        return grad_norm([RankGrads({"w": pair}, rank) for rank, pair in enumerate(pairs)])

    assert norm(live) == 2 * math.sqrt(full.numel())
    assert norm(bare) == 2 * math.sqrt(full.numel() / 2)
    with pytest.raises(AttributeMismatch, match="after hop 'send': tensor_model_parallel"):
        AttributeLedger({"w": live[0]}).check("send", {"w": bare[0]})
    assert norm([carry(shard, copied) for shard, copied in zip(live, bare, strict=True)]) == norm(live)
