"""Ranks as processes: one small run over gloo whose every rank writes down what it ended with.

``python -m weightsync.testing.spawned FOLDER`` is one rank of it under torchrun.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from weightsync.backends.gloo import GlooWorld
from weightsync.backends.store import connect_store
from weightsync.backends.torchrun import torchrun_world
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.protocol import ProtocolSettings
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.testing.history import History
from weightsync.testing.memory import overwrite
from weightsync.testing.scenario import checkpoints

DENSITIES = (1.0, 0.3, 0.1)
SECOND_NS = 1_000_000_000
SETTINGS = ProtocolSettings(
    connect_ns=60 * SECOND_NS, update_ns=60 * SECOND_NS, lease_ns=60 * SECOND_NS, patience_ns=300 * SECOND_NS
)
"""Generous: a busy machine may take long to import torch."""

RANK_LEASE_NS = 30 * SECOND_NS


def deployment() -> Deployment:
    """TP 2 trainer and one fused TP 1 rollout."""
    model = ModelShape(vocab=13, hidden=8, intermediate=8, layers=1, heads=4, kv_heads=2, head_dim=2)
    return Deployment(model, 2, (RolloutLayout(1, True),), 512, trainer_multiple=8, rollout_multiple=4)


def live(name: str, hostname: str, port: int, secret: bytes, folder: str) -> None:
    """One whole rank, from its import to its end; the target of a spawned process.

    Args:
        name: of the rank.
        hostname: where the launcher's store is.
        port: its port.
        secret: of the run.
        folder: where the rank writes what it ended with.
    """
    store = connect_store(hostname, port)
    world = GlooWorld(store, deployment().ranks, secret=secret, lease_ns=RANK_LEASE_NS)
    _take_part(RankId.parse(name), world, Path(folder))


def main() -> None:
    """One whole rank under torchrun; the folder is the only argument."""
    me, world = torchrun_world(deployment().ranks, os.environ, lease_ns=RANK_LEASE_NS)
    _take_part(me, world, Path(sys.argv[1]))


def problems(folder: Path) -> list[str]:
    """What is wrong with what the ranks wrote down; empty when every bit is right."""
    run = deployment()
    history, found = History(run), []
    for version, state in enumerate(checkpoints(run, DENSITIES, seed=0), start=1):
        history.record(version, [run.shards(rank, state) for rank in range(len(run.trainers))])
    for rank in run.ranks:
        written = folder / f"{rank}.json"
        if not written.exists():
            found.append(f"{rank} wrote nothing")
            continue
        said = json.loads(written.read_text())
        if said["left"]:
            found.append(f"{rank} left threads behind: {said['left']}")
        if said["version"] != len(DENSITIES):
            found.append(f"{rank} ended with version {said['version']}: {said['why']}")
        if rank.role == "rollout":
            weights = load_file(folder / f"{rank}.safetensors")
            found += [f"{rank}: {text}" for text in history.differences(len(DENSITIES), rank, weights)]
    return found


def _take_part(me: RankId, world: GlooWorld, folder: Path) -> None:
    torch.set_num_threads(1)
    version, why = asyncio.run(_train(me, world) if me.role == "trainer" else _serve(me, world, folder))
    left = world.close()
    (folder / f"{me}.json").write_text(json.dumps({"version": version, "why": why, "left": left}))


async def _train(me: RankId, world: GlooWorld) -> tuple[int | None, str]:
    run = deployment()
    states = checkpoints(run, DENSITIES, seed=0)
    params = run.shards(me.rank, {name: torch.zeros_like(tensor) for name, tensor in states[0].items()})
    verbs = world.verbs(me, Source(run.plan, me.rank, params))
    trainer = Trainer(verbs, run.plan, run.trainers, run.rollouts, SETTINGS)
    for state in states:
        overwrite(params, run.shards(me.rank, state))
        outcome = await trainer.update()
    await trainer.close()
    return outcome.version, outcome.reason


async def _serve(me: RankId, world: GlooWorld, folder: Path) -> tuple[int | None, str]:
    run = deployment()
    weights = run.blank(me)
    verbs = world.verbs(me, Target(run.tensors, run.rollout_maps(me), weights, run.aliases(me)))
    ranks = run.rollouts[me.rollout].ranks
    rollout = Rollout(verbs, run.plan.fingerprint, ranks, run.trainers[0], SETTINGS)
    await rollout.run()
    save_file(weights, folder / f"{me}.safetensors")
    return rollout.version, rollout.dirty or ""


if __name__ == "__main__":
    main()
