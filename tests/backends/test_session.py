"""The receiver session: the protocol's bits by plain calls, and no misuse loses anything."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor

from weightsync.reference.digest import combine
from weightsync.reference.errors import StaleVersion
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.inprocess_run import WholeTensors
from weightsync.testing.plain_calls import (
    begin,
    feed,
    make_session,
    random_checkpoint,
    recorded,
    take,
)
from weightsync.testing.strategies import updates
from weightsync.testing.tiny import tiny_deployment

TINY = tiny_deployment()
SETTINGS = {receive: ProtocolSettings(receive=receive) for receive in ("stage", "stream")}


def checkpoint(seed: int) -> dict[str, Tensor]:
    return random_checkpoint(TINY, seed)


@pytest.mark.parametrize("receive", SETTINGS)
@pytest.mark.parametrize("rollout", [0, 1], ids=["one rank", "two ranks"])
def test_plain_calls_give_the_bits_of_the_protocol(receive: str, rollout: int) -> None:
    states = [checkpoint(1), checkpoint(2), checkpoint(2), checkpoint(3)]
    run, sent = recorded(TINY, states)
    ranks = TINY.rollouts[rollout].ranks
    sessions = [make_session(TINY, rank, settings=SETTINGS[receive]) for rank in ranks]
    for number, buckets in enumerate(sent, start=1):
        assert take(sessions, buckets) == number
        for one in sessions:
            assert run.history.differences(number, one.me, one.target.weights) == []
            assert one.status().version == number
            assert one.status().may_generate
    for one in sessions:
        for name, weight in run.targets[one.me].weights.items():
            assert same_bits(weight, one.target.weights[name])


def test_the_digest_it_reports_is_the_protocols() -> None:
    run, sent = recorded(TINY, [checkpoint(1), checkpoint(2)])
    sessions = [make_session(TINY, rank) for rank in TINY.rollouts[1].ranks]
    for buckets in sent:
        take(sessions, buckets)
    reports = [one.hello(2, TINY.plan.fingerprint) for one in sessions]
    assert {report["version"] for report in reports} == {2}
    assert combine(report["digest"] for report in reports) == run.lead.slots.digest(
        run.lead.slots.acknowledged or 0
    )


@given(update=updates(dtype=torch.bfloat16, shape=(7,)))
def test_a_delta_arrives_or_leaves_no_trace(update: Any) -> None:
    deployment = WholeTensors.of({"w": update.old}, bucket_bytes=128)
    _, (full, delta) = recorded(deployment, [{"w": update.old}, {"w": update.new}])
    one = make_session(deployment, RankId("rollout", 0, 0))
    take([one], full)
    begin(one, delta)
    feed(one, delta)
    one.prepare(2)
    assert same_bits(one.target.weights["w"], update.new)
    assert one.abort(2)
    assert same_bits(one.target.weights["w"], update.old)
    assert one.status().version == 1
    assert one.status().may_generate


def test_an_update_without_a_change_is_a_trailer_only() -> None:
    _, (full, empty) = recorded(TINY, [checkpoint(1), checkpoint(1)])
    one = make_session(TINY, RankId("rollout", 0, 0))
    take([one], full)
    assert len(empty) == 1
    assert take([one], empty) == 2


def test_a_recount_reads_every_element_between_updates() -> None:
    states = [{"w": torch.arange(4.0)}, {"w": torch.arange(4.0) + 1}]
    deployment = WholeTensors.of(states[0])
    _, (full, delta) = recorded(deployment, states)
    one = make_session(deployment, RankId("rollout", 0, 0))
    take([one], full)
    before = one.recount()
    int_view(one.target.weights["w"])[1] ^= 1
    assert one.recount() != before
    int_view(one.target.weights["w"])[1] ^= 1
    begin(one, delta)
    with pytest.raises(StaleVersion, match="while version 2 is in progress"):
        one.recount()
