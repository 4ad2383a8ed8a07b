"""Where ranks stand: Megatron's order of TP, CP, DP and PP, and the experts' own; vLLM's experts."""

from __future__ import annotations

import pytest
from hypothesis import given

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.parallel import RolloutLayout, TrainerLayout
from weightsync.testing.families import trainer_layouts


def test_ranks_are_numbered_as_megatron_does() -> None:
    """TP 2, CP 2, DP 2, PP 2: tp, then cp, then dp, then pp; experts EP 4 with expert-TP 1, two replicas."""
    layout = TrainerLayout(tp=2, pp=2, ep=4, etp=1, dp=2, cp=2)
    assert layout.world == 16
    places = [layout.at(rank, 1) for rank in range(16)]
    assert [place.tp_rank for place in places] == [0, 1] * 8
    assert [place.stage for place in places] == [0] * 8 + [1] * 8
    assert [place.speaks for place in places] == ([True] * 2 + [False] * 6) * 2
    assert [place.ep_rank for place in places] == [0, 1, 2, 3] * 4
    assert [place.etp_rank for place in places] == [0] * 16
    assert [place.expert_speaks for place in places] == ([True] * 4 + [False] * 4) * 2
    assert [list(place.experts(8)) for place in places[:4]] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_expert_tp_runs_faster_than_ep() -> None:
    places = [TrainerLayout(tp=1, ep=2, etp=2, dp=4).at(rank, 1) for rank in range(4)]
    assert [(place.ep_rank, place.etp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [place.speaks for place in places] == [True, False, False, False]
    assert all(place.expert_speaks for place in places)


def test_what_is_left_out_is_filled_in_as_megatron_does_and_with_the_fewest_replicas() -> None:
    assert TrainerLayout(tp=2).expert_tp == 2
    assert TrainerLayout(tp=2, ep=2).replicas == 2
    assert TrainerLayout(tp=2, ep=2, etp=1).replicas == 1
    assert TrainerLayout(tp=1, ep=4, cp=2).replicas == 2
    assert TrainerLayout(2).pure_tp
    assert not TrainerLayout(2, pp=2).pure_tp
    assert not TrainerLayout(2, etp=1).pure_tp


@given(layout=trainer_layouts())
def test_each_part_has_one_speaker_on_each_stage(layout: TrainerLayout) -> None:
    places = [layout.at(rank, 1) for rank in range(layout.world)]
    dense = [(place.stage, place.tp_rank) for place in places if place.speaks]
    experts = [(place.stage, place.ep_rank, place.etp_rank) for place in places if place.expert_speaks]
    assert sorted(dense) == [(stage, tp) for stage in range(layout.pp) for tp in range(layout.tp)]
    assert sorted(experts) == [
        (stage, ep, etp)
        for stage in range(layout.pp)
        for ep in range(layout.ep)
        for etp in range(layout.expert_tp)
    ]


def test_layers_are_shared_out_equally_or_as_told() -> None:
    assert TrainerLayout(pp=2).layers(6) == (3, 3)
    assert TrainerLayout(pp=3, stages=(1, 4, 0)).layers(5) == (1, 4, 0)


def test_a_rollouts_experts_are_runs_and_the_earlier_ranks_hold_one_more() -> None:
    held = [list(RolloutLayout(4, True, 4).at(rank, 1).experts(6)) for rank in range(4)]
    assert held == [[0, 1], [2, 3], [4], [5]]
    places = [RolloutLayout(4, True, 2).at(rank, 1) for rank in range(4)]
    assert [(place.ep_rank, place.etp_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places[0].expert_tp == 2


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: TrainerLayout(tp=0), "trainer tp is 0, expected 1 or more"),
        (lambda: TrainerLayout(tp=2, ep=4, dp=1), "is 2 ranks a stage, expected a multiple of etp 2 .* ep 4"),
        (lambda: TrainerLayout(pp=2, stages=(3,)), r"stages are \[3\], expected 2 numbers of layers"),
        (lambda: TrainerLayout(pp=2).layers(5), "5 decoder layers do not divide in 2 pipeline stages"),
        (lambda: TrainerLayout(pp=2, stages=(1, 1)).layers(5), "hold 2 decoder layers, the model has 5"),
        (lambda: TrainerLayout().at(1, 1), "rank 1 is outside of a world of 1"),
        (lambda: TrainerLayout(ep=2).at(0, 1).experts(3), "3 experts do not divide in 2 expert-parallel"),
        (lambda: RolloutLayout(4, True, 3).at(0, 1), "rollout ep 3 does not divide tp 4"),
        (lambda: RolloutLayout(1, True).at(1, 1), "rollout rank 1 is outside of a world of 1"),
    ],
)
def test_layouts_that_cannot_be_are_refused(make: object, said: str) -> None:
    with pytest.raises(PlanMismatch, match=said):
        make()  # type: ignore[operator]
