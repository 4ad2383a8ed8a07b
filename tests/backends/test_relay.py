"""The relay: the protocol's bits in sessions that are reached by calls, whatever call fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.backends.inprocess import InprocessWorld
from weightsync.backends.relay import CalledEngine, SessionRelay
from weightsync.backends.session import ReceiverSession
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.routes import Route, owned_routes
from weightsync.reference.source import Source
from weightsync.reference.trainer import Trainer
from weightsync.testing.history import History
from weightsync.testing.plain_calls import make_session, random_checkpoint
from weightsync.testing.tiny import tiny_deployment

TINY = tiny_deployment()
CALLS = ["status", "hello", "start", "receive", "prepare", "prove", "commit", "abort"]
HASTY = ProtocolSettings(connect_ns=250_000_000, update_ns=250_000_000)


class Reached:
    """The sessions of one rollout behind calls, of which chosen ones fail on the rollout's last rank."""

    def __init__(self, sessions: Sequence[ReceiverSession]) -> None:
        self.sessions = sessions
        self.fails: tuple[str, int, bool] = ("", 0, False)
        self.made: list[str] = []
        self.on = False
        self.threads: set[str] = set()
        self.violations: list[str] = []

    def __call__(self, method: str, *arguments: Any) -> list[Any]:
        self.made.append(method)
        self.threads.add(threading.current_thread().name)
        answers = []
        for session in self.sessions:
            name, left, late = self.fails
            hit = name == method and left > 0 and session is self.sessions[-1]
            if hit:
                self.fails = (name, left - 1, late)
            if hit and not late:
                raise OSError("the worker cannot be reached")
            answers.append(getattr(session, method)(*arguments))
            self.look()
            if hit:
                raise OSError("the worker's answer was lost")
        return answers

    def look(self) -> None:
        states = [session.status() for session in self.sessions]
        if self.on and not (
            all(one.may_generate for one in states) and len({one.version for one in states}) == 1
        ):
            self.violations.append(f"it generates with {states}")

    def pause(self) -> None:
        self.on = False

    def resume(self) -> None:
        self.on = True
        self.look()


class World:
    """A trainer of two ranks, and the rollouts' leaders as relays, on one loop."""

    def __init__(self, settings: ProtocolSettings) -> None:
        world = InprocessWorld()
        self.history = History(TINY)
        zeros = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in TINY.tensors}
        self.params = [TINY.shards(rank, zeros) for rank in range(len(TINY.trainers))]
        self.trainers = [
            Trainer(
                world.verbs(rank, Source(TINY.plan, rank.rank, self.params[rank.rank])),
                TINY.plan, TINY.trainers, self.refs(), settings, self.record if rank.rank == 0 else None,
                routes=self.routes() if settings.route == "owned" else None,
            )
            for rank in TINY.trainers
        ]  # fmt: skip
        self.reached = [
            Reached([make_session(TINY, rank, settings=settings) for rank in ref.ranks])
            for ref in TINY.rollouts
        ]
        self.relays = [
            SessionRelay(
                world.verbs(ref.leader, None, engine=CalledEngine(reached.pause, reached.resume)),
                TINY.plan.fingerprint, TINY.trainers[0], settings, reached,
            )
            for ref, reached in zip(TINY.rollouts, self.reached, strict=True)
        ]  # fmt: skip
        self.served = [asyncio.create_task(relay.run()) for relay in self.relays]

    def routes(self) -> tuple[Route, ...]:
        """Those of the relays: each takes what all of its sessions hold."""
        maps = {
            ref.leader: [m for rank in ref.ranks for m in TINY.rollout_maps(rank).values()]
            for ref in TINY.rollouts
        }
        return owned_routes(TINY.plan, maps)

    def refs(self) -> Any:
        """Each rollout is one rank to the protocol."""
        return [type(ref)(ref.number, ref.ranks[:1]) for ref in TINY.rollouts]

    def record(self, version: int, slot: int) -> None:
        self.history.record(version, self.params)

    async def push(self, state: dict[str, Tensor], settings: ProtocolSettings | None = None) -> Outcome:
        for trainer in self.trainers:
            trainer.settings = settings or ProtocolSettings()
        for rank, params in enumerate(self.params):
            for name, shard in TINY.shards(rank, state).items():
                params[name].data.copy_(shard.data)
        outcomes = await asyncio.gather(*(trainer.update() for trainer in self.trainers))
        return outcomes[0]

    async def close(self) -> None:
        await asyncio.gather(*(trainer.close() for trainer in self.trainers))
        await asyncio.gather(*self.served)
        for reached in self.reached:
            assert reached.violations == []

    def check(self, version: int) -> None:
        for reached in self.reached:
            assert reached.on
            for session in reached.sessions:
                assert session.status().version == version
                assert self.history.differences(version, session.me, session.target.weights) == []


@pytest.mark.parametrize("receive", ["stage", "stream"])
@pytest.mark.parametrize("verify_every", [0, 1, 2])
def test_sessions_behind_calls_hold_the_protocols_bits(receive: Any, verify_every: int) -> None:
    async def story() -> None:
        world = World(ProtocolSettings(receive=receive, verify_every=verify_every))
        for version, seed in enumerate([1, 2, 2, 3], start=1):
            outcome = await world.push(random_checkpoint(TINY, seed))
            assert outcome.committed, outcome.reason
            assert outcome.full == ((0, 1) if version == 1 else ())
            world.check(version)
        assert not {threading.current_thread().name} & world.reached[0].threads  # the loop was never blocked
        await world.close()

    asyncio.run(story())


def test_under_owned_routes_a_relay_is_sent_what_all_of_its_sessions_hold() -> None:
    async def story() -> None:
        world = World(ProtocolSettings(route="owned"))
        (route,) = world.trainers[0].routes
        assert route.is_whole
        for version, seed in enumerate([1, 2], start=1):
            outcome = await world.push(random_checkpoint(TINY, seed), ProtocolSettings(route="owned"))
            assert outcome.committed, outcome.reason
            world.check(version)
        await world.close()

    asyncio.run(story())


@pytest.mark.parametrize("method", CALLS)
@pytest.mark.parametrize(
    ("receive", "times", "late"),
    [("stage", 1, False), ("stage", 1, True), ("stage", 9, False), ("stream", 1, True)],
    ids=["a call is lost", "an answer is lost", "nine calls are lost", "an answer is lost, streaming"],
)
def test_whatever_call_fails_the_next_update_heals(receive: Any, method: str, times: int, late: bool) -> None:
    async def story() -> None:
        world = World(ProtocolSettings(receive=receive))
        assert (await world.push(random_checkpoint(TINY, 1))).committed
        world.reached[1].fails = (method, times, late)
        if method == "abort":
            world.reached[0].fails = ("prepare", 1, False)
        await world.push(random_checkpoint(TINY, 2), HASTY)
        await world.push(random_checkpoint(TINY, 3), HASTY)
        for reached in world.reached[:2]:
            reached.fails = ("", 0, False)
        healed = await world.push(random_checkpoint(TINY, 4))
        assert healed.committed, healed.reason
        if healed.members != (0, 1):  # one that did not answer hello takes part in the next
            healed = await world.push(random_checkpoint(TINY, 5))
        world.check(healed.version or 0)
        await world.close()

    asyncio.run(story())


def test_a_session_that_lost_its_weights_gets_a_full_update() -> None:
    async def story() -> None:
        world = World(ProtocolSettings())
        assert (await world.push(random_checkpoint(TINY, 1))).committed
        reached = world.reached[1]
        reached.sessions = [reached.sessions[0], make_session(TINY, TINY.rollouts[1].ranks[1])]
        reached.on = False  # its worker restarted
        assert not (await world.push(random_checkpoint(TINY, 2), HASTY)).committed
        healed = await world.push(random_checkpoint(TINY, 3))
        assert healed.committed, healed.reason
        assert healed.full == (1,)
        world.check(healed.version or 0)
        await world.close()

    asyncio.run(story())
