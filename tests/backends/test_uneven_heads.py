"""Any heads on any TP sizes, through the whole protocol in process; and wrong ways to hold replicas, each seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.rowmap import RowMap
from weightsync.reference.target import Target
from weightsync.testing.memory import HostMemory
from weightsync.testing.scenario import checkpoints, run_scenario
from weightsync.testing.strategies import deployments

NINE_TO_THREE = Deployment(
    ModelShape(vocab=6, hidden=3, intermediate=6, layers=1, heads=9, kv_heads=3, head_dim=2),
    2, (RolloutLayout(2, True),), 256, 3, 4,
)  # fmt: skip


@settings(max_examples=20)
@given(
    deployment=deployments(),
    densities=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_holds_its_part_and_the_digest_is_that_of_the_dense_state(
    deployment: Deployment, densities: list[float], seed: int
) -> None:
    found = run_scenario("inprocess", deployment, densities=densities, seed=seed)
    assert found.problems() == []  # every rank holds what Deployment.weights says of the export
    found.check_digests(checkpoints(deployment, densities, seed))


@dataclass(frozen=True)
class OtherReplicas(HostMemory):
    """Rollout ranks that treat the rows which another rank speaks for differently."""

    change: Callable[[RowMap], RowMap]

    def make_target(
        self, deployment: Deployment, rank: RankId, weights: Mapping[str, Tensor], route: Any = "all"
    ) -> Any:
        maps = deployment.rollout_maps(rank)
        changed = {name: self.change(one) if "qkv" in name else one for name, one in maps.items()}
        return Target(deployment.tensors, changed, weights, deployment.aliases(rank), route)


def test_replicas_that_count_twice_are_found_by_the_digest() -> None:
    twice = OtherReplicas(lambda one: replace(one, owned=torch.ones_like(one.owned)))
    found = run_scenario("inprocess", NINE_TO_THREE, memory=twice, densities=(1.0,))
    assert not found.updates[0].committed
    assert "digest" in (found.updates[0].reason or "")


def test_replicas_that_are_not_written_are_found_by_their_bits() -> None:
    unwritten = OtherReplicas(lambda one: replace(one, tensor=one.tensor.where(one.owned, -1)))
    found = run_scenario("inprocess", NINE_TO_THREE, memory=unwritten, densities=(1.0,))
    assert found.updates[0].committed  # a digest counts each element once: it knows nothing of replicas
    assert [problem.split(":")[0] for problem in found.problems()] == ["rollout0.1 at version 1"]
