"""A routed update: every rank is sent what it holds, nothing else, and ends with the bits of the broadcast one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.reference.buckets import END_BYTES, HEADER_BYTES, TABLE_ENTRY_BYTES
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.digest import combine
from weightsync.reference.encoding import ALIGNMENT
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view
from weightsync.reference.routes import Route, choose_routes, one_route, owned_routes
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import deliver, make_update
from weightsync.testing.families import family_deployments
from weightsync.testing.memory import overwrite
from weightsync.testing.routing import held_positions, received
from weightsync.testing.scenario import checkpoints

EVEN = ModelShape(vocab=64, hidden=8, intermediate=16, layers=2, heads=8, kv_heads=4, head_dim=4, tied=False)


class Both:
    """One deployment, its sources, and per rollout rank a target of each mode."""

    def __init__(self, deployment: Deployment, seed: int, densities: list[float]) -> None:
        self.deployment = deployment
        self.states = checkpoints(deployment, densities, seed)
        self.params = [deployment.shards(rank, self.states[0]) for rank in range(len(deployment.trainers))]
        self.sources = [Source(deployment.plan, rank, live) for rank, live in enumerate(self.params)]
        self.ranks = [rank for ref in deployment.rollouts for rank in ref.ranks]
        self.whole, self.owned = (
            {rank: self.target(rank, way) for rank in self.ranks} for way in ("all", "owned")
        )

    def target(self, rank: RankId, route: str) -> Target:
        deployment = self.deployment
        maps, blank = deployment.rollout_maps(rank), deployment.blank(rank)
        return Target(deployment.tensors, maps, blank, deployment.aliases(rank), route)  # type: ignore[arg-type]

    def train(self, number: int) -> None:
        for rank, live in enumerate(self.params):
            overwrite(live, self.deployment.shards(rank, self.states[number]))

    def update(self, number: int, route: Route | None):  # type: ignore[no-untyped-def]
        more = {} if number == 0 else {"base_slot": 1 - number % 2, "base": number}
        return make_update(
            self.deployment.plan, self.sources, slot=number % 2, version=number + 1, route=route, **more
        )


@settings(max_examples=12, deadline=None)
@given(
    deployment=family_deployments(max_ranks=4, max_tp=4),
    seed=st.integers(0, 2**32 - 1),
    density=st.sampled_from([0.0, 0.05, 0.3, 0.9]),
)
def test_routed_is_broadcast_bit_for_bit_and_names_what_a_rank_holds_and_nothing_else(
    deployment: Deployment, seed: int, density: float
) -> None:
    both = Both(deployment, seed, [1.0, density])
    tensors, plan = deployment.tensors, deployment.plan
    for number in range(2):
        both.train(number)
        broadcast = both.update(number, None)
        for target in both.whole.values():
            deliver(target, broadcast)
            run(target.commit())
        dense = {plan.pieces[n].tensor for group in plan.groups(broadcast.counts) for n, d in
                 zip(group.pieces, group.dense, strict=True) if d}  # fmt: skip
        for route in deployment.owned_routes:
            routed = both.update(number, route)
            assert routed.digest == broadcast.digest
            for rank in route.ranks:
                target = both.owned[rank]
                assert target.fingerprint == route.holding.fingerprint
                held = held_positions(tensors, deployment.rollout_maps(rank).values())
                assert [meta.numel for meta in route.holding.tensors] == [one.numel() for one in held]
                came = received(target.holding, held, routed.buckets[:-1])
                for tensor, meta in enumerate(tensors):
                    new, old = (int_view(both.states[n][meta.name]) for n in (number, number - 1))
                    mine = held[tensor]
                    due = mine if number == 0 or tensor in dense else mine[new[mine] != old[mine]]
                    at, bits = came.get(tensor, (mine[:0], new[:0]))
                    assert torch.equal(at, due)
                    assert torch.equal(bits, new[due])
                deliver(target, routed)
                run(target.commit())
                for name, bits in target.snapshot_bits().items():
                    assert torch.equal(bits, int_view(both.whole[rank].weights[name])), (rank, name)
        for ref in deployment.rollouts:
            for targets in (both.whole, both.owned):
                assert combine(run(targets[rank].digest()) for rank in ref.ranks) == broadcast.digest


@settings(max_examples=10, deadline=None)
@given(deployment=family_deployments(max_ranks=2, max_tp=4), again=st.integers(1, 3))
def test_ranks_share_a_route_exactly_when_they_hold_the_same(deployment: Deployment, again: int) -> None:
    deployment = replace(deployment, layouts=deployment.layouts * again)
    held = {
        rank: [tuple(one.tolist()) for one in
               held_positions(deployment.tensors, deployment.rollout_maps(rank).values())]
        for ref in deployment.rollouts for rank in ref.ranks
    }  # fmt: skip
    together = {rank: route.number for route in deployment.owned_routes for rank in route.ranks}
    assert set(together) == set(held)
    for one in held:
        for other in held:
            assert (together[one] == together[other]) == (held[one] == held[other]), (one, other)


@pytest.mark.parametrize("fused", [False, True])
def test_bytes_received_shrink_with_tp(fused: bool) -> None:
    """Of an evenly cut model: a quarter of what is cut, all of what is replicated, and the buckets' own bytes."""
    deployment = Deployment(EVEN, 2, (RolloutLayout(1, fused), RolloutLayout(4, fused)), 2048, 2, 4)
    both = Both(deployment, 0, [1.0, 0.1])
    whole = sum(meta.nbytes for meta in deployment.tensors)
    ranks = deployment.rollouts[1].ranks
    held = {
        rank: held_positions(deployment.tensors, deployment.rollout_maps(rank).values()) for rank in ranks
    }
    replicated = sum(
        meta.nbytes
        for number, meta in enumerate(deployment.tensors)
        if all(held[rank][number].numel() == meta.numel for rank in ranks)
    )
    assert 0 < replicated < whole // 20
    for number in range(2):
        both.train(number)
        alone = both.update(number, None)
        for route in deployment.owned_routes[1:]:
            update = both.update(number, route)
            nbytes = sum(bucket.nbytes for bucket in update.buckets)
            entries = sum(bucket.header.ranges for bucket in update.buckets)
            overhead = (
                HEADER_BYTES * (len(update.buckets) - 1)
                + END_BYTES
                + entries * (TABLE_ENTRY_BYTES + ALIGNMENT - 1)
            )
            if number == 0:
                assert route.holding.nbytes == (whole - replicated) // 4 + replicated
                assert nbytes <= (whole - replicated) // 4 + replicated + overhead
            else:
                nnz = sum(
                    at.numel()
                    for at, _ in received(route.holding, held[route.ranks[0]], update.buckets[:-1]).values()
                )
                assert nbytes <= nnz * (EVEN.dtype.itemsize + 4) + overhead
            assert nbytes < sum(bucket.nbytes for bucket in alone.buckets) * 0.55


def test_routes_reach_every_rank_once_or_are_refused() -> None:
    deployment = Deployment(EVEN, 2, (RolloutLayout(2, True),), 2048, 2, 4)
    plan, ranks = deployment.plan, deployment.rollouts[0].ranks
    owned = deployment.owned_routes
    assert choose_routes(plan, "owned", owned, ranks) == owned
    (everybody,) = choose_routes(plan, "all", None, ranks)
    assert everybody.is_whole
    assert everybody.ranks == ranks
    assert everybody.holding.fingerprint == plan.fingerprint
    with pytest.raises(PlanMismatch, match=r"rollout0\.1 is on 0 routes, expected exactly one"):
        choose_routes(plan, "owned", owned[:1], ranks)
    with pytest.raises(PlanMismatch, match=r"rollout0\.0 is on 2 routes"):
        choose_routes(plan, "owned", (*owned, owned[0]), ranks)
    with pytest.raises(PlanMismatch, match="route is 'owned', and of routes none were given"):
        choose_routes(plan, "owned", None, ranks)
    with pytest.raises(PlanMismatch, match="route is 'all', and of routes 2 owned ones were given"):
        choose_routes(plan, "all", owned, ranks)


def test_a_rollout_of_one_rank_gets_whole_tensors_in_checkpoint_coordinates() -> None:
    deployment = Deployment(EVEN, 2, (RolloutLayout(1, True), RolloutLayout(1, False)), 2048, 2, 4)
    (route,) = deployment.owned_routes
    assert route.is_whole
    (other,) = one_route(deployment.plan, route.ranks)
    assert route.pieces == other.pieces == deployment.plan.pieces


def test_estimated_counts_of_routes_that_share_a_tensor_add_up() -> None:
    deployment = Deployment(EVEN, 2, (RolloutLayout(4, True),), 2048, 2, 4)
    plan = deployment.plan
    for factor in (1, 3, 7):
        counts = [piece.count * factor // 31 for piece in plan.pieces]
        for group in plan.groups(counts):
            joined = [counts[number] for number in group.pieces]
            each = [route.estimate(group, joined) for route in deployment.owned_routes]
            for index, number in enumerate(group.pieces):
                shares = [route.pieces[number].count for route in deployment.owned_routes]
                assert all(mine[index] <= share for mine, share in zip(each, shares, strict=True))
                if sum(shares) == plan.pieces[number].count and not group.dense[index]:
                    assert sum(mine[index] for mine in each) == joined[index]


def test_maps_of_other_columns_take_the_whole_tensor() -> None:
    """Two parameters that hold other columns of one tensor: the slice is all of it, and the maps are as they were."""
    deployment = Deployment(EVEN, 2, (RolloutLayout(2, False),), 2048, 2, 4)
    first, second = deployment.rollouts[0].ranks
    name = "model.layers.0.mlp.down_proj.weight"
    maps = [deployment.rollout_maps(rank)[name] for rank in (first, second)]
    (number,) = maps[0].outputs
    assert maps[0].column != maps[1].column
    (route,) = owned_routes(deployment.plan, {first: maps})
    assert route.holding.cuts[number] is None
    assert all(meta.numel == 0 for n, meta in enumerate(route.holding.tensors) if n != number)
