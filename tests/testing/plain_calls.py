"""Updates as plain data: the buckets that the protocol sent, and sessions that take them in by calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weightsync.backends.session import ReceiverSession
from weightsync.reference.buckets import Bucket, seal
from weightsync.reference.deployment import Deployment
from weightsync.reference.members import RankId
from weightsync.reference.protocol import DELTA, FULL
from weightsync.reference.target import Target
from weightsync.testing.inprocess_run import InprocessRun
from weightsync.testing.strategies import special_bits


def random_checkpoint(deployment: Deployment, seed: int) -> dict[str, Tensor]:
    """Random bf16 bits for every tensor, three in ten of them NaNs, infinities, zeros and the like."""
    stream = torch.Generator().manual_seed(seed)
    found = {}
    for meta in deployment.tensors:
        bits = torch.randint(-(1 << 15), 1 << 15, (meta.numel,), generator=stream).to(torch.int16)
        special = torch.tensor(special_bits(meta.dtype), dtype=torch.int16)
        drawn = special[torch.randint(0, len(special), (meta.numel,), generator=stream)]
        bits = torch.where(torch.rand(meta.numel, generator=stream) < 0.3, drawn, bits)
        found[meta.name] = bits.view(meta.dtype).reshape(meta.shape)
    return found


def recorded(
    deployment: Deployment, states: Sequence[Mapping[str, Tensor]]
) -> tuple[InprocessRun, list[list[Bucket]]]:
    """A run of the protocol that pushed each checkpoint of ``states``, and each update's buckets."""

    async def run() -> tuple[InprocessRun, list[list[Bucket]]]:
        found = []
        async with InprocessRun(deployment) as world:
            for state in states:
                world.set(state)
                before = len(world.buckets)
                outcome = await world.push()
                if not outcome.committed:
                    raise AssertionError(f"an update without faults did not commit: {outcome.reason}")
                found.append(world.buckets[before:])
        return world, found

    return asyncio.run(run())


def renumbered(buckets: Sequence[Bucket], version: int) -> list[Bucket]:
    """The same update under another number."""
    return [
        seal(replace(one.header.heading, version=version), one.header.ranges, one.payload) for one in buckets
    ]


def make_session(deployment: Deployment, rank: RankId, **options: Any) -> ReceiverSession:
    """A session of one rollout rank, with weights of its own, all zero."""
    target = Target(
        deployment.tensors, deployment.rollout_maps(rank), deployment.blank(rank), deployment.aliases(rank)
    )
    world = deployment.layouts[rank.rollout].tp
    return ReceiverSession(target, deployment.plan.fingerprint, rank=rank, world=world, **options)


def begin(session: ReceiverSession, buckets: Sequence[Bucket]) -> int:
    """Greet a session and start the update that ``buckets`` are of; its version."""
    heading = buckets[0].header.heading
    session.hello(heading.epoch, session.fingerprint)
    session.start(heading.version, heading.base, DELTA if heading.base else FULL)
    return heading.version


def feed(session: ReceiverSession, buckets: Sequence[Bucket]) -> list[bool]:
    """Hand buckets to a session; its answers."""
    return [session.receive(bucket.header.pack(), bucket.payload) for bucket in buckets]


def take(sessions: Sequence[ReceiverSession], buckets: Sequence[Bucket]) -> int:
    """One whole update on every rank of a rollout, from start to commit; its version."""
    version = 0
    for session in sessions:
        version = begin(session, buckets)
        if feed(session, buckets) != [False] * (len(buckets) - 1) + [True]:
            raise AssertionError(
                f"{session.me} did not take the last of {len(buckets)} buckets for the trailer"
            )
    shares = [session.prepare(version) for session in sessions]
    for session in sessions:
        session.prove(version, shares)
        session.commit(version)
    return version
