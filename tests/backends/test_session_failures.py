"""The receiver session when verbs fail or wait, when calls come from several threads, and in any order."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.buckets import Bucket
from weightsync.reference.errors import (
    StaleVersion,
    WeightSyncError,
)
from weightsync.reference.members import RankId
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.plain_calls import (
    begin,
    feed,
    make_session,
    random_checkpoint,
    recorded,
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


class Never:
    """What a hook that talks to somebody would wait for."""

    def __await__(self) -> Generator[None, None, None]:
        yield


class Calls:
    """Hooks that run something at a verb."""

    def __init__(self, verb: str, action: Callable[[], Any]) -> None:
        self.verb, self.action = verb, action

    async def before(self, verb: str) -> int:
        if verb == self.verb:
            found = self.action()
            if isinstance(found, Never):
                await found
        return 0

    async def after(self, verb: str, ordinal: int) -> None:
        pass


@pytest.mark.parametrize("receive", SETTINGS)
def test_a_write_that_fails_half_way_rolls_back(receive: str, sent: list[list[Bucket]]) -> None:
    failing: list[bool] = []

    def fail() -> None:
        if len(failing) == 2:
            failing.append(True)
            raise OSError("planted")
        if failing:
            failing.append(True)

    one = make_session(TINY, RankId("rollout", 0, 0), settings=SETTINGS[receive], hooks=Calls("apply", fail))
    take([one], sent[0])
    bits = one.target.snapshot_bits()
    failing.append(True)
    begin(one, sent[1])
    with pytest.raises(OSError, match="planted"):  # noqa: PT012 - which of the two depends on receive
        feed(one, sent[1])
        one.prepare(2)
    assert len(failing) == 3
    assert all(torch.equal(bits[name], now) for name, now in one.target.snapshot_bits().items())
    assert one.status().receiving is None
    assert one.status().may_generate


def test_a_verb_that_would_wait_is_an_error_and_rolls_back(sent: list[list[Bucket]]) -> None:
    one = make_session(TINY, RankId("rollout", 0, 0), hooks=Calls("apply", Never))
    begin(one, sent[0])
    feed(one, sent[0])
    with pytest.raises(WeightSyncError, match=r"prepare\(\) of rollout0.0 would have to wait"):
        one.prepare(1)
    assert one.status().receiving is None


def test_a_call_within_a_call_is_refused(sent: list[list[Bucket]]) -> None:
    found: list[str] = []

    def again() -> None:
        assert one.status().version == 0
        with pytest.raises(WeightSyncError) as error:
            one.abort(1)
        found.append(str(error.value))

    one = make_session(TINY, RankId("rollout", 0, 0), hooks=Calls("decode", again))
    take([one], sent[0])
    assert "abort() was called within receive() of rollout0.0" in found[0]


def test_calls_of_several_threads_take_turns(sent: list[list[Bucket]]) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go.wait(10)

    one = make_session(TINY, RankId("rollout", 0, 0), hooks=Calls("decode", hold))
    begin(one, sent[0])
    receiving = threading.Thread(target=feed, args=(one, sent[0][:1]))
    receiving.start()
    assert inside.wait(10)
    assert one.status().receiving == 1
    aborting = threading.Thread(target=one.abort, args=(1,))
    aborting.start()
    go.set()
    receiving.join(10)
    aborting.join(10)
    assert one.status().receiving is None


@pytest.fixture(scope="module")
def held(sent: list[list[Bucket]]) -> dict[int, dict[str, Tensor]]:
    """The bits of versions 1 and 2."""
    found, one = {}, make_session(TINY, RankId("rollout", 0, 0))
    for buckets in sent[:2]:
        version = take([one], buckets)
        found[version] = one.target.snapshot_bits()
    return found


@given(order=st.lists(st.sampled_from(["start", "feed", "prepare", "commit", "abort", "hello"]), max_size=12))
def test_any_order_of_calls_leaves_a_label_that_tells_the_bits(
    order: list[str], sent: list[list[Bucket]], held: dict[int, dict[str, Tensor]]
) -> None:
    one = make_session(TINY, RankId("rollout", 0, 0))
    take([one], sent[0])
    calls: dict[str, Callable[[], Any]] = {
        "start": lambda: one.start(2, 1, "delta"),
        "feed": lambda: feed(one, sent[1]),
        "prepare": lambda: one.prepare(2),
        "commit": lambda: one.commit(2),
        "abort": lambda: one.abort(2),
        "hello": lambda: one.hello(1, TINY.plan.fingerprint),
    }
    for name in order:
        with contextlib.suppress(StaleVersion):
            calls[name]()
        status, bits = one.status(), one.target.snapshot_bits()
        assert status.dirty is None
        assert status.may_generate == (not status.prepared)
        if status.may_generate:
            assert all(torch.equal(held[status.version][tensor], now) for tensor, now in bits.items())
    event(f"ends at version {one.status().version}")
