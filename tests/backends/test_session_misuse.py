"""Misuse of the receiver session: calls out of order, twice or damaged lose nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weightsync.backends.session import ReceiverSession
from weightsync.reference.buckets import Bucket, Heading, abort_bucket
from weightsync.reference.errors import (
    PatchMismatch,
    PlanMismatch,
    StaleVersion,
    UpdateAborted,
)
from weightsync.reference.members import RankId
from weightsync.reference.params import same_bits
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.inprocess_run import WholeTensors
from weightsync.testing.plain_calls import (
    begin,
    feed,
    make_session,
    random_checkpoint,
    recorded,
    renumbered,
    take,
)
from weightsync.testing.tiny import tiny_deployment

TINY = tiny_deployment()
SETTINGS = {receive: ProtocolSettings(receive=receive) for receive in ("stage", "stream")}


def checkpoint(seed: int) -> dict[str, Tensor]:
    return random_checkpoint(TINY, seed)


@pytest.fixture(scope="module")
def sent() -> list[list[Bucket]]:
    return recorded(TINY, [checkpoint(1), checkpoint(2), checkpoint(3)])[1]


@pytest.fixture
def one(sent: list[list[Bucket]]) -> ReceiverSession:
    """A session that holds version 1."""
    found = make_session(TINY, RankId("rollout", 0, 0))
    take([found], sent[0])
    return found


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda s, b: s.receive(b[1][0].header.pack(), b[1][0].payload), StaleVersion, "expected start"),
        (lambda s, b: s.prepare(2), StaleVersion, "in progress is none"),
        (lambda s, b: s.prove(2, [0]), StaleVersion, "in progress is none"),
        (lambda s, b: s.commit(2), StaleVersion, "in progress is none"),
        (lambda s, b: s.start(1), StaleVersion, "tried before"),
        (lambda s, b: s.start(3, 2, "delta"), StaleVersion, "holds 1"),
        (lambda s, b: s.start(2, 1, "full"), PlanMismatch, "'full' on 0"),
        (lambda s, b: s.start(2, 1, "half"), PlanMismatch, "kind 'half'"),
        (lambda s, b: s.hello(0, TINY.plan.fingerprint), StaleVersion, "epoch 0 is over"),
        (lambda s, b: s.hello(2, 5), PlanMismatch, "fingerprint 5"),
    ],
)
def test_a_call_out_of_order_is_refused_and_changes_nothing(
    one: ReceiverSession,
    sent: list[list[Bucket]],
    call: Callable[[ReceiverSession, list[list[Bucket]]], None],
    error: type[Exception],
    says: str,
) -> None:
    before, bits = one.status(), one.target.snapshot_bits()
    with pytest.raises(error, match=says):
        call(one, sent)
    assert one.status() == before
    assert all(torch.equal(bits[name], now) for name, now in one.target.snapshot_bits().items())
    assert take([one], sent[1]) == 2


def test_prepare_waits_for_the_trailer_and_commit_for_prepare(
    one: ReceiverSession, sent: list[list[Bucket]]
) -> None:
    begin(one, sent[1])
    feed(one, sent[1][:-1])
    with pytest.raises(StaleVersion, match="no trailer"):
        one.prepare(2)
    feed(one, sent[1][-1:])
    with pytest.raises(StaleVersion, match="not prepared"):
        one.commit(2)
    with pytest.raises(StaleVersion, match="not prepared"):
        one.prove(2, [0])
    assert one.prepare(2) == one.prepare(2)
    assert not one.status().may_generate
    one.commit(2)
    one.commit(2)
    assert one.status().version == 2


@pytest.mark.parametrize("receive", SETTINGS)
def test_damaged_early_and_repeated_buckets_cost_nothing(receive: str, sent: list[list[Bucket]]) -> None:
    one = make_session(TINY, RankId("rollout", 0, 0), settings=SETTINGS[receive])
    version = begin(one, sent[0])
    for bucket, later in zip(sent[0], [*sent[0][1:], None], strict=True):
        flipped = bucket.payload.clone()
        flipped[-1] ^= 1
        with pytest.raises(PatchMismatch, match="checksum"):
            one.receive(bucket.header.pack(), flipped)
        with pytest.raises(PatchMismatch, match="announces"):
            one.receive(bucket.header.pack(), bucket.payload[:-1])
        with pytest.raises(PatchMismatch, match="starts with"):
            one.receive(b"XXXX" + bucket.header.pack()[4:], bucket.payload)
        if later is not None:
            with pytest.raises(PatchMismatch, match="sequence"):
                one.receive(later.header.pack(), later.payload)
        first = one.receive(bucket.header.pack(), bytes(bucket.payload.numpy()))
        assert one.receive(bucket.header.pack(), bucket.payload) == first == (later is None)
    one.prepare(version)
    one.commit(version)
    with pytest.raises(StaleVersion, match="expected start"):
        one.receive(sent[0][-1].header.pack(), sent[0][-1].payload)


def test_buckets_of_another_version_are_refused(one: ReceiverSession, sent: list[list[Bucket]]) -> None:
    begin(one, sent[1])
    with pytest.raises(StaleVersion, match="of version 3, expected 2"):
        feed(one, sent[2][:1])
    feed(one, sent[1])
    with pytest.raises(StaleVersion, match="after the trailer"):
        feed(one, sent[2][:1])
    one.prepare(2)
    one.commit(2)


def test_the_payload_may_be_overwritten_once_receive_returns(
    one: ReceiverSession, sent: list[list[Bucket]]
) -> None:
    begin(one, sent[1])
    buffer = torch.empty(max(bucket.payload.numel() for bucket in sent[1]), dtype=torch.uint8)
    for bucket in sent[1]:
        payload = buffer[: bucket.payload.numel()].copy_(bucket.payload)
        one.receive(bucket.header.pack(), payload)
        buffer.fill_(255)
    one.prepare(2)
    one.commit(2)


def test_the_senders_abort_rolls_back(one: ReceiverSession, sent: list[list[Bucket]]) -> None:
    bits = one.target.snapshot_bits()
    begin(one, sent[1])
    feed(one, sent[1][:1])
    abort = abort_bucket(Heading("delta", 1, 1, 2).at(1), "out of memory")
    with pytest.raises(UpdateAborted, match="out of memory"):
        feed(one, [abort])
    assert one.status().receiving is None
    assert all(torch.equal(bits[name], now) for name, now in one.target.snapshot_bits().items())
    with pytest.raises(StaleVersion, match="tried before"):
        one.start(2, 1, "delta")


def test_a_wrong_digest_is_never_committed_and_a_full_update_heals_it() -> None:
    states = [{"w": torch.tensor([1.0, 2, 3, 4, 5, 6])}, {"w": torch.tensor([1.0, 2, 3, 4, 5, 7])}]
    deployment = WholeTensors.of(states[0])
    _, (full, delta) = recorded(deployment, states)
    one = make_session(deployment, RankId("rollout", 0, 0), settings=ProtocolSettings(verify_every=1))
    take([one], full)
    one.target.weights["w"][0] = 9  # not the protocol's write
    begin(one, delta)
    feed(one, delta)
    with pytest.raises(PatchMismatch, match="the trainer's is"):
        one.prepare(2)
    with pytest.raises(StaleVersion):
        one.commit(2)
    status = one.status()
    assert status.version == 1
    assert "digest in version 2" in (status.dirty or "")
    assert not status.may_generate
    with pytest.raises(StaleVersion, match="full update"):
        one.start(3, 1, "delta")
    take([one], renumbered(full, 3))
    assert one.status().may_generate
    assert same_bits(one.target.weights["w"], states[0]["w"])


def test_two_ranks_commit_only_what_all_their_shares_prove(sent: list[list[Bucket]]) -> None:
    sessions = [make_session(TINY, rank) for rank in TINY.rollouts[1].ranks]
    for one in sessions:
        begin(one, sent[0])
        feed(one, sent[0])
    shares = [one.prepare(1) for one in sessions]
    with pytest.raises(StaleVersion, match="not proved"):
        sessions[0].commit(1)
    for wrong in ([shares[0]], shares[::-1], [shares[0] + 1, shares[1]]):
        with pytest.raises(PlanMismatch, match="digest shares"):
            sessions[0].prove(1, wrong)
    with pytest.raises(PatchMismatch, match="the trainer's is"):
        sessions[0].prove(1, [shares[0], shares[1] + 1])
    sessions[1].prove(1, shares)
    sessions[1].prove(1, shares)
    assert sessions[0].status().dirty is not None
    assert sessions[1].abort(1)
    assert not any(one.status().may_generate for one in sessions)


def test_a_full_update_that_is_given_up_leaves_the_rank_dirty(
    one: ReceiverSession, sent: list[list[Bucket]]
) -> None:
    one.start(7)
    assert one.abort(7)  # nothing was written yet
    assert one.status().may_generate
    one.start(8)
    feed(one, renumbered(sent[0], 8))
    one.prepare(8)
    assert one.abort(8)
    assert not one.abort(8)
    status = one.status()
    assert (status.version, status.may_generate) == (1, False)
    assert "full update 8" in (status.dirty or "")


def test_a_committed_version_is_not_aborted(one: ReceiverSession) -> None:
    assert not one.abort(1)
    assert one.status().may_generate
