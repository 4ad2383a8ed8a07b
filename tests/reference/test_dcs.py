"""The checkpoint-service broadcast: topology, buckets, stages, poison; and the bugs that real hardware found."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.dcs import (
    DcsTrainer,
    Member,
    Placed,
    Publication,
    Registry,
    TensorBucket,
    cut_buckets,
    topology,
)
from weightsync.reference.devices import CopyEvent
from weightsync.reference.errors import PlanMismatch, StaleVersion, WeightSyncError
from weightsync.reference.params import ParamMeta, TPAttributes, compare, read, same_bits
from weightsync.reference.tags import TaggedSnapshots
from weightsync.reference.verdict import Verdict, Vote
from weightsync.testing.stand_in import StandIn

SHARD = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})


# ---- who and where -------------------------------------------------------------------------------------------------


def test_engines_are_ordered_as_numbers_at_cumulative_offsets() -> None:
    registry = Registry()
    for rank, gpus in ((10, 1), (2, 4), (0, 2)):
        assert registry.register(Member("rollout", rank, gpus)) == f"rollout_{rank}"
    trainers = [Placed(rank, pp=rank // 2, tp=rank % 2) for rank in range(4)]
    first, second = topology(trainers, registry.of("rollout"))
    assert (first.name, first.sender, second.name, second.sender) == ("pp_0", 0, "pp_1", 2)
    assert dict(first.first) == {0: 1, 2: 3, 10: 7}
    assert first.world == 8


def test_global_ranks_are_source_then_forwards_then_references() -> None:
    registry = Registry()
    for role, count in (("actor", 1), ("actor_fwd", 2), ("reference", 2)):
        for rank in range(count):
            registry.register(Member(role, rank))  # type: ignore[arg-type]
    ranks = [registry.global_rank(r, n) for r, n in (("actor", 0), ("actor_fwd", 1), ("reference", 0))]  # type: ignore[arg-type]
    assert ranks == [0, 2, 3]
    registry.unregister("actor_fwd", 0)
    assert registry.global_rank("reference", 0) == 2


def test_a_wrong_registration_and_topology_are_refused() -> None:
    registry = Registry()
    registry.register(Member("rollout", 0, 2))
    registry.register(Member("rollout", 0, 2))
    for wrong in (Member("rollout", 0, 4), Member("rollout", 1, 0), Member("rollout", -1)):
        with pytest.raises(PlanMismatch, match="expected rank 0 or more"):
            registry.register(wrong)
    assert registry.of("rollout") == (Member("rollout", 0, 2),)
    with pytest.raises(PlanMismatch, match="not registered"):
        registry.unregister("reference", 0)
    with pytest.raises(PlanMismatch, match="no global rank"):
        registry.global_rank("rollout", 0)
    with pytest.raises(PlanMismatch, match="no engine"):
        topology([Placed(0)], [])
    with pytest.raises(PlanMismatch, match=r"stage 1 has senders \[\]"):
        topology([Placed(0), Placed(1, pp=1, tp=1)], [Member("rollout", 0)])


@given(
    sizes=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=12),
    limit=st.integers(1, 60),
    ep=st.integers(1, 4),
)
def test_each_tensor_travels_once_in_bounded_buckets(
    sizes: list[tuple[int, bool]], limit: int, ep: int
) -> None:
    metas = [ParamMeta(f"w{n}", torch.uint8, (size,)) for n, (size, _) in enumerate(sizes)]
    experts = {f"w{n}" for n, (_, expert) in enumerate(sizes) if expert}
    buckets = cut_buckets(metas, experts, limit, ep)
    order = [meta.name for meta in metas]
    sent = [name for bucket in buckets for name in bucket.names]
    assert sent == [n for n in order if n not in experts] + [n for n in order if n in experts]
    assert all(bucket.nbytes <= limit or len(bucket.names) == 1 for bucket in buckets)
    for one, after in pairwise(buckets):
        if one.expert == after.expert:
            factor = ep if one.expert else 1
            assert one.nbytes + factor * metas[order.index(after.names[0])].nbytes > limit


# ---- one publication -----------------------------------------------------------------------------------------------


class Job:
    """Two trainer ranks, engines that only listen."""

    def __init__(self, device: StandIn | None = None) -> None:
        self.device = device or StandIn()
        self.params = [{"a": self.on_device(1.0), "e": self.on_device(2.0)} for _ in range(2)]
        self.log: list[str] = []
        self.received: dict[str, Tensor] = {}
        self.fail: tuple[int, str] | None = None
        self.votes: dict[str, dict[str, Vote]] = {}
        self.turn = asyncio.Condition()
        self.ranks = [self.trainer(rank) for rank in range(2)]

    def on_device(self, value: float) -> Tensor:
        return SHARD.stamp(self.device.put(torch.tensor([value, float("nan")])))

    def trainer(self, rank: int) -> DcsTrainer:
        async def agree(stage: str, vote: Vote) -> Verdict:
            async with self.turn:
                votes = self.votes.setdefault(f"{self.ranks[0].tried}/{stage}", {})
                votes[f"trainer.{rank}"] = vote
                self.turn.notify_all()
                await self.turn.wait_for(lambda: len(votes) == 2)
            return Verdict(votes)

        async def control(what: str, version: int) -> None:
            self.log.append(what)
            if self.fail == (rank, what):
                raise OSError(f"engine 3 refuses {what}")

        async def send(bucket: TensorBucket, tensors: Mapping[str, Tensor]) -> None:
            for tensor in tensors.values():
                self.device.collective(tensor)
            if self.fail == (rank, "send"):
                raise OSError("the link is down")
            if rank == 0:
                self.log.append(f"send {','.join(bucket.names)}")
                self.received |= {name: tensor.clone() for name, tensor in tensors.items()}

        return DcsTrainer(
            lambda: self.params[rank], frozenset({"e"}), 64, self.device, agree, control if rank == 0 else None, send
        )  # fmt: skip

    def push(self, version: int, held: Mapping[str, Tensor] | None = None) -> list[Any]:
        made = [Publication(version) for _ in self.ranks]

        async def both() -> list[Any]:
            self.turn = asyncio.Condition()
            pushes = [rank.push(one, held) for rank, one in zip(self.ranks, made, strict=True)]
            return await asyncio.gather(*pushes, return_exceptions=True)

        return [(one.state, error) for one, error in zip(made, asyncio.run(both()), strict=True)]


def test_pause_flush_non_expert_expert_continue() -> None:
    job = Job()
    assert job.push(1) == [("committed", None)] * 2
    assert job.log == ["pause", "flush", "send a", "send e", "continue"]
    assert all(same_bits(job.received[name], tensor) for name, tensor in job.params[0].items())


@pytest.mark.parametrize("fail", [(0, "pause"), (0, "flush"), (0, "send"), (1, "send"), (0, "continue")])
def test_an_error_of_any_rank_reaches_all_and_poisons(fail: tuple[int, str]) -> None:
    job = Job()
    job.fail = fail
    for state, error in job.push(1):
        assert state == "poisoned"
        assert isinstance(error, WeightSyncError)
        assert f"trainer.{fail[0]}: OSError" in str(error)
    touched = fail[1] in ("send", "continue")
    assert (job.log[-1] == "continue") == (not touched or fail[1] == "continue")
    job.fail = None
    with pytest.raises(StaleVersion, match="expected a new one of a higher version"):
        raise job.push(1)[0][1]
    assert job.push(2) == [("committed", None)] * 2


# ---- the bugs that real hardware found -------------------------------------------------------------------------------


def snapshot(job: Job, late: bool = False) -> Mapping[str, Tensor]:
    """A host snapshot of rank 0, of which some attributes came after the first backup."""
    live = {name: TPAttributes({}).stamp(tensor.clone()) for name, tensor in job.params[0].items()}
    tags = TaggedSnapshots(lambda: live, {"actor": "host"}, job.device, "actor", [].append)
    if not late:
        SHARD.stamp(live["a"])
        SHARD.stamp(live["e"])
    tags.backup("actor")
    SHARD.stamp(live["a"])
    SHARD.stamp(live["e"])
    with tags.reading("actor", "the push") as held:
        return held


def test_bug_1_the_first_push_needs_nothing_that_a_later_one_makes() -> None:
    assert Job().push(1) == [("committed", None)] * 2


def test_bug_2_host_snapshots_are_staged_on_the_groups_device() -> None:
    job = Job()
    assert job.push(1, snapshot(job)) == [("committed", None)] * 2
    assert all(same_bits(job.received[name], tensor) for name, tensor in job.params[0].items())


@pytest.mark.parametrize("late", [False, True], ids=["bug 3", "bug 4"])
def test_bugs_3_and_4_a_snapshot_carries_attributes_also_those_that_came_late(late: bool) -> None:
    job = Job()
    held = snapshot(job, late)
    assert all(read(tensor) == SHARD for tensor in held.values())
    assert job.push(1, held) == [("committed", None)] * 2


def test_bugs_3_and_4_put_back_are_an_error_before_anything_is_paused() -> None:
    job = Job()
    bare = {name: torch.empty_like(t).copy_(t) for name, t in job.params[0].items()}
    assert compare(bare["a"], job.params[0]["a"]) != ()
    for state, error in job.push(1, bare):
        assert state == "poisoned"
        assert "after hop 'staging': tensor_model_parallel of parameter 'a' is absent" in str(error)
    assert job.log == []


class DropsOnTheWay(StandIn):
    """Bug 5 put back: the move to the device is a new tensor without attributes."""

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        TPAttributes({}).stamp(out)
        return super().copy(source, out)


def test_bug_5_put_back_is_an_error_on_every_rank() -> None:
    job = Job(DropsOnTheWay())
    held = {name: SHARD.stamp(tensor.clone()) for name, tensor in job.params[0].items()}
    for state, error in job.push(1, held):
        assert state == "poisoned"
        assert "staged on stand-in:0 is not what it was" in str(error)
    assert not any(line.startswith("send") for line in job.log)


def test_bug_2_put_back_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job()
    monkeypatch.setattr("weightsync.reference.dcs.stage", lambda device, params: dict(params))
    for _, error in job.push(1, snapshot(job)):
        assert "No backend type associated with device type cpu" in str(error)
