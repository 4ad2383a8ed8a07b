"""When a rollout rank ends: a follower's leader may still need it after the trainer said bye."""

from __future__ import annotations

import asyncio
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.reference.control import Request
from weightsync.reference.errors import PeerLost
from weightsync.reference.members import RankId
from weightsync.reference.rollout import Rollout
from weightsync.testing.tiny import SETTINGS

LEADER, FOLLOWER = RankId.parse("rollout0.0"), RankId.parse("rollout0.1")
TRAINER = RankId.parse("trainer.0")


class Heard(Rollout):
    """Answers nothing; keeps what it was asked for before it left, and why it left."""

    def __init__(self, me: RankId, events: list[Any]) -> None:
        async def serve(_: int | None, watched: RankId) -> Request:
            event = events.pop(0)
            if isinstance(event, PeerLost):
                raise event
            return event

        verbs: Any = SimpleNamespace(me=me, serve=serve, disclose=lambda _: None)
        super().__init__(verbs, 1, (LEADER, FOLLOWER), TRAINER, SETTINGS)
        self.asked: list[str] = []
        self.why = ""

    async def answer(self, request: Request) -> None:
        """Remember it."""
        self.asked.append(request.op)

    async def leave(self, why: str) -> None:
        """Remember why."""
        self.why = why


def said(source: RankId, op: str = "bye") -> Request:
    return Request(str(source), op, {}, None, None)


@pytest.mark.parametrize("first", [LEADER, TRAINER], ids=str)
def test_a_follower_serves_until_both_said_bye(first: RankId) -> None:
    second = TRAINER if first == LEADER else LEADER
    events = [said(first), said(LEADER, "rollback"), said(second), said(LEADER, "never")]
    follower = Heard(FOLLOWER, events)
    asyncio.run(follower.run())
    assert follower.asked == ["rollback"]
    assert follower.why == "its trainer said bye"
    assert [event.op for event in events] == ["never"]


@pytest.mark.parametrize(("bye", "gone"), list(permutations([LEADER, TRAINER], 2)), ids=str)
def test_a_follower_leaves_when_the_other_one_is_lost(bye: RankId, gone: RankId) -> None:
    follower = Heard(FOLLOWER, [said(bye), PeerLost(str(gone), "serve")])
    asyncio.run(follower.run())
    assert str(gone) in follower.why


def test_a_leader_leaves_at_the_trainers_bye() -> None:
    leader = Heard(LEADER, [said(LEADER, "status"), said(TRAINER)])
    asyncio.run(leader.run())
    assert leader.asked == ["status"]
    assert leader.why == "its trainer said bye"
