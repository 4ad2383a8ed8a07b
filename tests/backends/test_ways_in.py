"""Both ways in at once, over gloo: a facade per trainer rank, sessions behind a relay, each in its own thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch.distributed import HashStore

from weightsync.backends.facade import TrainerFacade
from weightsync.backends.gloo import GlooWorld
from weightsync.backends.relay import CalledEngine, SessionRelay
from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.params import int_view
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Source
from weightsync.reference.trainer import Trainer
from weightsync.testing.history import History
from weightsync.testing.plain_calls import make_session, random_checkpoint
from weightsync.testing.tiny import tiny_deployment

TINY = tiny_deployment()
SEEN = RolloutRef(1, TINY.rollouts[1].ranks[:1])  # two workers, one rank to the protocol
RANKS = (*TINY.trainers, *SEEN.ranks)
SETTINGS = ProtocolSettings()


@asynccontextmanager
async def joined(store: Any, me: RankId, local: Any, engine: Any = None) -> AsyncIterator[Verbs]:
    """The verbs of one rank that takes part in the run until this is left."""
    world = GlooWorld(store, RANKS, secret=b"sixteen bytes or more")
    try:
        yield world.verbs(me, local, engine=engine)
    finally:
        assert await asyncio.to_thread(world.close) == ()


def test_facades_and_sessions_meet_over_gloo() -> None:
    store, history, events = HashStore(), History(TINY), []
    zeros = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in TINY.tensors}
    params = [TINY.shards(rank, zeros) for rank in range(len(TINY.trainers))]
    sessions = [make_session(TINY, rank) for rank in TINY.rollouts[1].ranks]
    before = set(threading.enumerate())

    def call_all(method: str, *arguments: Any) -> list[Any]:
        return [getattr(session, method)(*arguments) for session in sessions]

    async def serve() -> None:
        engine = CalledEngine(lambda: events.append("pause"), lambda: events.append("resume"))
        async with joined(store, SEEN.leader, None, engine) as verbs:
            await SessionRelay(verbs, TINY.plan.fingerprint, TINY.trainers[0], SETTINGS, call_all).run()

    def make_facade(rank: RankId) -> TrainerFacade:
        @asynccontextmanager
        async def build() -> AsyncIterator[Trainer]:
            async with joined(store, rank, Source(TINY.plan, rank.rank, params[rank.rank])) as verbs:
                told = (lambda version, slot: history.record(version, params)) if rank.rank == 0 else None
                yield Trainer(verbs, TINY.plan, TINY.trainers, [SEEN], SETTINGS, told)

        return TrainerFacade(build, name=str(rank))

    with ThreadPoolExecutor(3) as pool:
        serving = pool.submit(lambda: asyncio.run(serve()))
        facades = [make_facade(rank) for rank in TINY.trainers]
        for version, seed in enumerate([1, 2, 2, 3], start=1):
            for rank, shards in enumerate(params):
                for name, new in TINY.shards(rank, random_checkpoint(TINY, seed)).items():
                    int_view(shards[name].data).copy_(int_view(new.data))
            outcomes = list(pool.map(lambda facade: facade.push(), facades))
            assert [(one.version, one.committed, one.reason) for one in outcomes] == [(version, True, "")] * 2
            for session in sessions:
                assert history.differences(version, session.me, session.target.weights) == []
                assert session.status().may_generate
        list(pool.map(lambda facade: facade.close(), facades))
        serving.result(20)
    assert events == ["resume", *["pause", "resume"] * 3]
    assert set(threading.enumerate()) - before == set()
