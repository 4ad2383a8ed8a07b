"""Each way in which an update can fail, on every backend: what the rollouts hold then, and that the next one heals."""

from __future__ import annotations

import pytest

from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.failing import SETTINGS, FailingRun, Wrong, streaming

BACKENDS = pytest.mark.parametrize("backend", ["inprocess", "sim", "gloo"])
BOTH_WAYS = pytest.mark.parametrize("settings", [SETTINGS, streaming()], ids=["stage", "stream"])

ROLLED_BACK = {
    "before the payload": Wrong("trainer.0", 2, "gather"),
    "in the middle of the payload": Wrong("trainer.0", 2, "send", 2),
    "one trainer rank alone, in its source": Wrong("trainer.1", 2, "diff"),
    "one trainer rank alone, in a collective": Wrong("trainer.1", 2, "gather", 2),
    "a receiver refuses": Wrong("rollout1.0", 2, "decode", 2),
    "a follower refuses": Wrong("rollout1.1", 2, "validate"),
    "a receiver fails while it writes": Wrong("rollout1.0", 2, "apply", 2),
    "a follower fails while it writes": Wrong("rollout1.1", 2, "apply", 2, "fail-after"),
}
"""Deltas that fail: everybody is back at the old version, and nobody needs a full update."""


@BACKENDS
@BOTH_WAYS
@pytest.mark.parametrize("what", ROLLED_BACK)
def test_a_failed_delta_leaves_the_old_version_generating(
    backend: str, settings: ProtocolSettings, what: str
) -> None:
    run = FailingRun(backend, ROLLED_BACK[what], settings=settings, updates=3).run()
    assert run.hooks is not None
    assert run.hooks.hits == 1
    assert [outcome.committed for outcome in run.outcomes] == [True, False, True]
    assert [outcome.full for outcome in run.outcomes] == [(0, 1), (), ()]
    assert [outcome.version for outcome in run.outcomes][2] in (2, 3), (
        "2 where it failed before it had a number"
    )
    assert run.torn == []
    assert all(end is None for end in run.ends.values())


@BACKENDS
def test_a_receiver_that_is_too_slow_ends_the_update_by_its_deadline_and_rolls_back(backend: str) -> None:
    run = FailingRun(backend, Wrong("rollout1.0", 2, "apply", 1, "stall"), updates=3).run()
    assert [outcome.committed for outcome in run.outcomes] == [True, False, True]
    assert run.outcomes[2].full == ()
    assert run.torn == []


@BACKENDS
def test_a_receiver_that_never_joins_ends_the_update_and_is_in_the_next(backend: str) -> None:
    run = FailingRun(backend, Wrong("rollout1.0", 1, "connect", 1, "stall"), updates=3).run()
    assert [outcome.committed for outcome in run.outcomes] == [False, True, True]
    assert run.outcomes[1].full == (0, 1)
    assert run.torn == []


@BACKENDS
@BOTH_WAYS
def test_a_receiver_that_dies_while_it_writes_is_left_out(backend: str, settings: ProtocolSettings) -> None:
    run = FailingRun(backend, Wrong("rollout1.0", 2, "apply", 2, "kill"), settings=settings, updates=4).run()
    assert not run.outcomes[1].committed
    last = run.outcomes[-1]
    assert (last.committed, last.members, last.full, last.gone) == (True, (0,), (), (1,))
    assert run.torn == []


@BACKENDS
@pytest.mark.parametrize("nth", [5, 6])
def test_a_commit_whose_reply_is_lost_is_asked_for_again(backend: str, nth: int) -> None:
    run = FailingRun(backend, Wrong("trainer.0", 2, "call", nth, "fail-after"), updates=3).run()
    assert run.hooks is not None
    assert run.hooks.hits == 1
    assert [(outcome.version, outcome.committed, outcome.full) for outcome in run.outcomes] == [
        (1, True, (0, 1)), (2, True, ()), (3, True, ()),
    ]  # fmt: skip
    assert run.torn == []
