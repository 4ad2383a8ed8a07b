"""Any family, any trainer, any rollouts, through the whole protocol in process; and wrong tables, each seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.families import Experts, Qwen3Moe
from weightsync.reference.modules import Placed
from weightsync.reference.parallel import TrainerLayout, TrainerRank
from weightsync.reference.tables import Tables
from weightsync.testing.families import family_deployments
from weightsync.testing.scenario import checkpoints, run_scenario

MOE = Qwen3Moe(
    vocab=6, hidden=3, expert_intermediate=2, experts=4, layers=2, heads=2, kv_heads=1, head_dim=2, tied=True
)
EXPERTS_OVER_TWO = Deployment(
    MOE, TrainerLayout(tp=2, pp=2, ep=2, etp=1), (RolloutLayout(2, True, ep=2), RolloutLayout(2, False)),
    512, 2, 4,
)  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    deployment=family_deployments(max_ranks=6, max_tp=3),
    densities=st.lists(st.sampled_from([0.0, 0.05, 0.5, 1.0]), min_size=2, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_rank_holds_its_part_and_the_digest_is_that_of_the_dense_state(
    deployment: Deployment, densities: list[float], seed: int
) -> None:
    found = run_scenario("inprocess", deployment, densities=densities, seed=seed)
    assert found.problems() == []  # every rank holds what Deployment.weights says of the export
    found.check_digests(checkpoints(deployment, densities, seed))
    verbs = found.verbs()
    gathers = {verbs[str(rank)]["gather"] for rank in deployment.trainers}
    assert len(gathers) == 1  # as many collectives on every trainer rank, whatever it holds


def test_experts_on_other_ranks_and_stages_arrive() -> None:
    assert run_scenario("inprocess", EXPERTS_OVER_TWO).problems() == []


@dataclass(frozen=True)
class OtherExperts(Experts):
    """Experts whose ids are counted wrongly on the trainer."""

    wrong: Callable[[TrainerRank], TrainerRank] = lambda at: at

    def trainer(self, at: TrainerRank):  # type: ignore[no-untyped-def]
        return super().trainer(self.wrong(at))


@dataclass(frozen=True)
class OtherMoe(Qwen3Moe):
    """A table with other experts."""

    wrong: Callable[[TrainerRank], TrainerRank] = lambda at: at

    def modules(self) -> tuple[Placed, ...]:
        found = []
        for placed in super().modules():
            module = placed.module
            if isinstance(module, Experts):
                sizes = (module.hidden, module.intermediate, module.count, module.form, module.dtype)
                module = OtherExperts(*sizes, self.wrong)
            found.append(replace(placed, module=module))
        return tuple(found)


def with_experts(wrong: Callable[[TrainerRank], TrainerRank]) -> Deployment:
    sizes = {name: getattr(MOE, name) for name in MOE.__dataclass_fields__}
    return replace(EXPERTS_OVER_TWO, model=OtherMoe(**sizes, wrong=wrong))


def test_local_expert_ids_taken_for_global_ones_are_found_before_anything_moves() -> None:
    with pytest.raises(PlanMismatch, match=r"experts\.0\.gate_proj.weight' has 6 elements told .*expected 3"):
        _ = with_experts(lambda at: replace(at, ep_rank=0)).plan


def test_experts_in_another_order_on_the_trainer_are_found_by_live_shapes_or_bits() -> None:
    swapped = with_experts(lambda at: replace(at, ep_rank=1 - at.ep_rank))
    right = EXPERTS_OVER_TWO
    state = checkpoints(right, (1.0,), 3)[0]
    exported = swapped.export([right.shards(rank.rank, state) for rank in right.trainers])
    differing = [name for name in state if not exported[name].equal(state[name])]
    assert differing
    assert all(".experts." in name for name in differing)


@dataclass(frozen=True)
class SpeakingReplicas(Deployment):
    """A trainer whose expert replicas all speak."""

    @cached_property
    def _tables(self) -> Tables:
        return _Speaking(self.model)


class _Speaking(Tables):
    def trainer(self, at: TrainerRank):  # type: ignore[no-untyped-def]
        return super().trainer(replace(at, expert_speaks=True))


def test_expert_replicas_that_speak_are_refused() -> None:
    replicated = TrainerLayout(tp=2, pp=1, ep=2, etp=1, dp=2)
    assert Deployment(MOE, replicated, (RolloutLayout(1, True),), 512, 2, 4).plan
    with pytest.raises(PlanMismatch, match="experts"):
        _ = SpeakingReplicas(MOE, replicated, (RolloutLayout(1, True),), 512, 2, 4).plan
