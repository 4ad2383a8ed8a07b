"""``route = "owned"`` through the whole protocol: on every backend the bits of ``"all"``, and fewer bytes; mutants."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.joining import Contents, Joined
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.params import int_view
from weightsync.reference.plan import TransferPlan
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.routes import Route
from weightsync.reference.source import Source
from weightsync.reference.steps import Step
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.testing.families import family_deployments
from weightsync.testing.memory import HostMemory
from weightsync.testing.scenario import RunResult, run_scenario
from weightsync.testing.tiny import tiny_deployment

EVEN = ModelShape(vocab=64, hidden=16, intermediate=32, layers=2, heads=8, kv_heads=4, head_dim=4)
FOUR = Deployment(
    EVEN, 2, (RolloutLayout(4, True), RolloutLayout(2, False), RolloutLayout(1, False)), 4096, 2, 4
)
TINY = tiny_deployment()
OWNED = ProtocolSettings(route="owned")


def received(result: RunResult) -> dict[str, int]:
    """Rollout rank -> bytes it received."""
    names = {str(rank): 0 for rank in result.ends}
    for span in result.trace.spans:
        if span.verb == "receive":
            names[span.rank] += span.nbytes
    return names


def expect_same(routed: RunResult, broadcast: RunResult) -> None:
    assert routed.problems() == broadcast.problems() == []
    assert [o.digest for o in routed.updates] == [o.digest for o in broadcast.updates]
    assert [o.counts for o in routed.updates] == [o.counts for o in broadcast.updates]
    for rank, weights in broadcast.weights.items():
        for name, tensor in weights.items():
            assert torch.equal(int_view(routed.weights[rank][name]), int_view(tensor)), (rank, name)


@lru_cache
def to_all(receive: Any) -> RunResult:
    return run_scenario("inprocess", FOUR, ProtocolSettings(receive=receive))


@pytest.mark.parametrize("receive", ["stage", "stream"])
@pytest.mark.parametrize("backend", ["inprocess", "gloo", "sim"])
def test_every_backend_brings_the_same_bits_in_fewer_bytes(backend: str, receive: Any) -> None:
    broadcast = to_all(receive)
    routed = run_scenario(backend, FOUR, ProtocolSettings(receive=receive, route="owned"))
    expect_same(routed, broadcast)
    whole, mine = received(broadcast), received(routed)
    assert len(set(whole.values())) == 1
    for rank, tp in ((str(rank), len(ref.ranks)) for ref in FOUR.rollouts for rank in ref.ranks):
        if tp == 1:
            assert mine[rank] == whole[rank]
        else:
            assert mine[rank] < whole[rank] * {2: 0.7, 4: 0.45}[tp]
    # Every group has a lead and the ranks of one route: each byte broadcast arrives once a rank.
    alone = {route.ranks for route in FOUR.owned_routes}
    assert sum(o.nbytes for o in routed.updates) == sum(mine[str(ranks[0])] for ranks in alone)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    deployment=family_deployments(max_ranks=4, max_tp=4),
    densities=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=2, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_family_on_any_ranks(deployment: Deployment, densities: list[float], seed: int) -> None:
    broadcast = run_scenario("inprocess", deployment, densities=densities, seed=seed)
    routed = run_scenario("inprocess", deployment, OWNED, densities=densities, seed=seed)
    expect_same(routed, broadcast)


# ---- mutants ---------------------------------------------------------------------------------------------------


class DropsTheLast(Source):
    """Leaves the last element of each narrowed piece out."""

    def narrow(self, joined: Joined, route: Route) -> Step[Joined]:
        found = yield from super().narrow(joined, route)
        return replace(found, contents=tuple(_without_last(one) for one in found.contents))


class KeepsCoordinates(Source):
    """Takes what a route's ranks hold, under its place in the checkpoint."""

    def narrow(self, joined: Joined, route: Route) -> Step[Joined]:
        found = yield from super().narrow(joined, route)
        contents = []
        for piece, whole, one in zip(joined.pieces, joined.contents, found.contents, strict=True):
            cut = route.holding.cuts[piece.tensor]
            if cut is not None and whole.positions is not None:
                held, _ = cut.place(whole.positions.to(torch.int64) + piece.base)
                one = replace(one, positions=whole.positions[held])
            contents.append(one)
        return replace(found, contents=tuple(contents))


class AnotherRoute(Source):
    """Sends each route what the next one holds."""

    def narrow(self, joined: Joined, route: Route) -> Step[Joined]:
        routes = [one for one in FOUR.owned_routes if not one.is_whole]
        other = routes[(route.number + 1) % len(routes)]
        return super().narrow(joined, other)


def _without_last(one: Contents) -> Contents:
    kept = slice(0, -1) if one.bits.numel() else slice(None)
    return Contents(None if one.positions is None else one.positions[kept], one.bits[kept])


@dataclass(frozen=True)
class Made(HostMemory):
    """Sources of another kind."""

    source: type[Source]

    def make_source(self, plan: TransferPlan, rank: int, params: Mapping[str, Tensor]) -> Source:
        return self.source(plan, rank, params)


@pytest.mark.parametrize("wrong", [DropsTheLast, KeepsCoordinates, AnotherRoute])
def test_a_wrong_narrowing_is_refused_or_seen_in_the_digest(wrong: type[Source]) -> None:
    result = run_scenario("inprocess", FOUR, OWNED, densities=(1.0, 0.1), memory=Made(wrong))
    assert not all(outcome.committed for outcome in result.updates)
    reason = next(outcome.reason for outcome in result.updates if not outcome.committed)
    assert "digest" in reason or "expected" in reason


@dataclass(frozen=True)
class Whole(HostMemory):
    """Targets of the other mode, whatever the settings say."""

    def make_target(
        self, deployment: Deployment, rank: RankId, weights: Mapping[str, Tensor], route: Any = "all"
    ) -> Target:
        other: Any = {"all": "owned", "owned": "all"}[route]
        return super().make_target(deployment, rank, weights, other)  # type: ignore[no-any-return]


def _drops_the_last_row(route: Route) -> Route:
    cuts = tuple(one and replace(one, rows=one.rows[:-1]) for one in route.holding.cuts)
    return replace(route, holding=replace(route.holding, cuts=cuts))


class DropsARow(Trainer):
    """Routes that end one row too early."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.routes = tuple(map(_drops_the_last_row, self.routes))


@pytest.mark.parametrize(
    "run",
    [
        lambda: run_scenario("inprocess", TINY, OWNED, densities=(1.0,), memory=Whole()),
        lambda: run_scenario("inprocess", TINY, densities=(1.0,), memory=Whole()),
        lambda: run_scenario("inprocess", FOUR, OWNED, densities=(1.0,), trainer=DropsARow),
    ],
    ids=["target takes all", "target takes owned", "a row too few"],
)
def test_sides_that_mean_other_slices_are_told_apart_before_a_byte_is_sent(
    run: Callable[[], RunResult],
) -> None:
    result = run()
    (outcome,) = result.updates
    assert not outcome.committed
    assert "slices with fingerprint" in outcome.reason
    assert "policy.route" in outcome.reason
    assert not [span for span in result.trace.spans if span.verb == "send"]
