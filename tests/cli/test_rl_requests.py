"""Samples over the desk: dealt to whoever holds weights, dealt again when someone fails, each of them once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.backends.store import host_store
from weightsync.cli.desk import GONE, Desk
from weightsync.cli.rl.requests import GENERATE, SAMPLES, LeadSamples, PeerSamples
from weightsync.cli.rl.sampling import Samples
from weightsync.cli.rl.task import Questions
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.params import same_bits

SHAPE = ModelShape(
    vocab=12, hidden=8, intermediate=8, layers=1, heads=2, kv_heads=2, head_dim=4, tied=True, qk_norm=True
)
SAMPLES_EACH = 2


def layout(rollouts: int) -> Deployment:
    return Deployment(SHAPE, 2, tuple(RolloutLayout(2, True) for _ in range(rollouts)), 1 << 20, 2, 4)


def questions(count: int) -> Questions:
    return Questions(torch.arange(count)[:, None], ("0",) * count)


def answered(ask: Mapping[str, Any], off: int = 0) -> dict[str, Any]:
    """What a rollout says whose answer to prompt n is n."""
    tokens = torch.tensor(ask["questions"]).repeat_interleave(SAMPLES_EACH, dim=0) + off
    return Samples(ask["first"], tokens, tokens.float(), ask["step"]).to_json()


@dataclass
class FakeDesk:
    """The lead's desk with rollouts behind it, which answer, refuse or are gone, as ``fates`` says per request."""

    fates: list[Mapping[int, str]]
    asked: list[dict[int, Mapping[str, Any]]] = field(default_factory=list)
    handed_on: list[tuple[list[str], Mapping[str, Any]]] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    def tell(self, peers: Iterable[object], op: str, **body: Any) -> None:
        names = [str(peer) for peer in peers]
        if op == SAMPLES:
            self.handed_on.append((names, body["samples"]))
            return
        assert op == GENERATE
        json.dumps(body)
        if not self.asked or body["request"] != next(iter(self.asked[-1].values()))["request"]:
            self.asked.append({})
        (name,) = names
        self.asked[-1][RankId.parse(name).rollout] = body

    def hear_all(self, peers: Iterable[object], op: str) -> dict[str, Mapping[str, Any]]:
        numbers = {RankId.parse(str(peer)).rollout for peer in peers}
        assert numbers == set(self.asked[-1])
        heard = {}
        for number in numbers:
            ask = self.asked[-1][number]
            assert op == f"{SAMPLES} {ask['request']}"
            fate = self.fates[len(self.asked) - 1].get(number, "answers")
            if fate == "is gone":
                self.gone.add(number)
            if number in self.gone:
                continue
            samples = None if fate == "refuses" else answered(ask)
            heard[f"rollout{number}.0"] = {"samples": samples, "reason": "no room"}
        return heard


def lead(desk: FakeDesk, rollouts: int, epoch: Callable[[], int] = lambda: 7) -> LeadSamples:
    return LeadSamples(cast(Desk, desk), layout(rollouts), SAMPLES_EACH, 1, epoch)


FATES = st.dictionaries(st.integers(0, 3), st.sampled_from(["refuses", "is gone"]), max_size=4)


@given(st.integers(1, 4), st.integers(1, 7), st.lists(FATES, max_size=3))
def test_every_sample_is_there_once_while_a_rollout_is_left(
    rollouts: int, prompts: int, fates: list[Mapping[int, str]]
) -> None:
    desk = FakeDesk([*fates, *({} for _ in range(20))])
    source = lead(desk, rollouts)
    source.committed(range(rollouts))
    able = set(range(rollouts))
    samples, said = None, ""
    try:
        samples = source(5, questions(prompts))
    except WeightSyncError as error:
        said = str(error)
    assert (samples is None) == ("no rollout is left to sample for step 5" in said) == (not source.able)
    if samples is not None:
        assert samples.tokens.view(-1).tolist() == [n for n in range(prompts) for _ in range(SAMPLES_EACH)]
        assert desk.handed_on == [(["trainer.1"], samples.to_json())]
    requests = [ask["request"] for round_ in desk.asked for ask in round_.values()]
    assert len(set(requests)) == len(desk.asked)
    for round_, fate in zip(desk.asked, desk.fates, strict=False):
        assert set(round_) <= able
        assert all(ask["questions"] for ask in round_.values())
        able -= {number for number in round_ if number in fate}
    assert able == source.able


def test_one_that_failed_is_asked_again_once_it_committed_and_meets_under_a_new_name() -> None:
    epoch, desk = [3], FakeDesk([{1: "refuses"}, {}, {}, {}])
    source = lead(desk, 2, lambda: epoch[0])
    source.committed([0, 1])
    source(1, questions(4))
    source(2, questions(4))
    assert [set(asked) for asked in desk.asked] == [{0, 1}, {0}, {0}]
    source.committed([0, 1])
    epoch[0] = 4
    source(3, questions(4))
    assert set(desk.asked[-1]) == {0, 1}
    names = [asked[0]["group"] for asked in desk.asked]
    assert names == ["tp/rollout0/3.0", "tp/rollout0/3.1", "tp/rollout0/3.1", "tp/rollout0/4.1"]


def test_when_nobody_is_left_the_step_and_the_reasons_are_named() -> None:
    source = lead(FakeDesk([{0: "refuses"}, {1: "is gone"}, {}]), 2)
    with pytest.raises(WeightSyncError, match=r"step 1 \(none was ever updated\)"):
        source(1, questions(2))
    source.committed([0, 1])
    with pytest.raises(
        WeightSyncError, match=r"sample for step 9 \(rollout 0 says: no room; rollout 1 is gone\); expected"
    ):
        source(9, questions(2))


# ---- the real desk -----------------------------------------------------------------------------------------------


def test_answers_to_an_old_request_are_not_taken_and_the_gone_are_not_awaited() -> None:
    store = host_store()
    mine, peer = Desk(store, "t", "trainer.0"), Desk(store, "t", "trainer.1")
    rollouts = [Desk(store, "t", f"rollout{number}.0") for number in range(3)]
    launcher = Desk(store, "t", "launcher")

    def answer(number: int, request: int, share: list[int], off: int = 0) -> None:
        ask = {"questions": [[n] for n in share], "first": share[0] * SAMPLES_EACH, "step": request}
        rollouts[number].tell(["trainer.0"], f"{SAMPLES} {request}", samples=answered(ask, off), reason="")

    source = LeadSamples(mine, layout(3), SAMPLES_EACH, 1, lambda: 0)
    source.committed(range(3))
    answer(0, 1, [0, 1])
    answer(0, 1, [0, 1], off=50)  # a second answer to the same request
    launcher.tell(["trainer.0"], GONE, rank="rollout2.0", again=False)
    answer(1, 1, [2, 3])
    answer(1, 2, [5])
    answer(0, 2, [4])
    assert source(1, questions(6)).tokens.view(-1).tolist() == [n for n in range(6) for _ in range(2)]
    assert source.able == {0, 1}
    asked = [rollouts[0].hear() for _ in range(2)]
    assert [(word["request"], word["questions"]) for word in asked] == [(1, [[0], [1]]), (2, [[4]])]
    answer(0, 1, [0, 1, 2], off=50)
    answer(0, 3, [0, 1, 2])
    answer(1, 3, [3, 4, 5])
    second = source(2, questions(6))
    assert second.tokens.view(-1).tolist() == [n for n in range(6) for _ in range(2)]
    handed = PeerSamples(peer)
    handed(1, questions(6))
    assert same_bits(handed(2, questions(6)).tokens, second.tokens)
