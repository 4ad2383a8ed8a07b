"""One deployment pushed through several updates on any backend, without faults, and what it left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.digest import state_digest
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.trace import Trace
from weightsync.reference.trainer import Trainer
from weightsync.testing.history import History
from weightsync.testing.memory import LIVE, WEIGHTS, HostMemory, Memory
from weightsync.testing.worlds import Program, World, world_of

DENSITIES = (1.0, 0.1, 0.0, 0.6)
"""An update of everything, of little, of nothing, and of most."""


@dataclass(frozen=True, slots=True)
class RolloutEnd:
    """How one rollout rank ended.

    Attributes:
        version: its label.
        dirty: None, or why it may hold anything else.
        generating: True while requests may read the weights; None but on the leader.
    """

    version: int
    dirty: str | None
    generating: bool | None


@dataclass(frozen=True)
class RunResult:
    """What one run left behind.

    Attributes:
        backend: where it ran.
        deployment: who held what.
        outcomes: per trainer rank, its updates.
        ends: per rollout rank, how it ended.
        weights: per rollout rank, runtime name -> the tensor it held at the end.
        trace: the spans of all ranks.
        history: what each version was.
    """

    backend: str
    deployment: Deployment
    outcomes: Mapping[RankId, Sequence[Outcome]]
    ends: Mapping[RankId, RolloutEnd]
    weights: Mapping[RankId, Mapping[str, Tensor]]
    trace: Trace
    history: History

    def check_digests(self, states: Iterable[Mapping[str, Tensor]]) -> None:
        """Assert that each update's digest is that of its dense state, by checkpoint name, counted from nothing."""
        for outcome, state in zip(self.updates, states, strict=True):
            named = ((meta, state[meta.name]) for meta in self.deployment.tensors)
            assert outcome.digest == state_digest(named), outcome

    @property
    def updates(self) -> Sequence[Outcome]:
        """The updates as the lead saw them, which alone counts the bytes."""
        return self.outcomes[self.deployment.trainers[0]]

    def verbs(self) -> dict[str, Counter[str]]:
        """Per rank, the multiset of its verbs."""
        return {str(rank): self.trace.verbs(str(rank)) for rank in self.deployment.ranks}

    def problems(self) -> list[str]:
        """One sentence for each thing that a run without faults must not show; empty when all is well."""
        found = [f"update {o.update} did not commit: {o.reason}" for o in self.updates if not o.committed]
        last = self.updates[-1].version
        for rank, end in self.ends.items():
            if (end.version, end.dirty) != (last, None):
                found.append(
                    f"{rank} ended at version {end.version} ({end.dirty or 'clean'}), expected {last}"
                )
            if end.generating is False:
                found.append(f"{rank} does not generate at the end")
            differences = self.history.differences(end.version, rank, self.weights[rank])
            found += [f"{rank} at version {end.version}: {difference}" for difference in differences]
        return found + [f"version {version} was used twice" for version in self.history.reused]


def run_scenario(
    backend: str | World,
    deployment: Deployment,
    settings: ProtocolSettings | None = None,
    *,
    densities: Sequence[float] = DENSITIES,
    seed: int = 0,
    trainer: type[Trainer] = Trainer,
    rollout: type[Rollout] = Rollout,
    memory: Memory | None = None,
) -> RunResult:
    """Run one update per density on a backend, and return what is left.

    Args:
        backend: name of a backend, or a world that was not run yet.
        deployment: who holds what.
        settings: of the protocol.
        densities: share of the elements whose bits change before each update; the first starts from zeros.
        seed: draws the weights.
        trainer: the trainer's half.
        rollout: the rollout's half.
        memory: makes each rank's bytes and reads them; host memory by default.

    Raises:
        BackendUnavailable: the backend is not here.
        WeightSyncError: a rank hangs.
        Exception: what a rank ended with.
    """
    world = world_of(backend)() if isinstance(backend, str) else backend
    settings, memory = settings or ProtocolSettings(), memory or HostMemory()
    states = checkpoints(deployment, densities, seed)
    blank = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
    history = History(deployment)
    holdings: dict[RankId, Any] = {}
    for rank in deployment.trainers:
        shards = deployment.shards(rank.rank, blank)
        holdings[rank] = memory.make_source(deployment.plan, rank.rank, shards)

    def record(version: int, _: int) -> None:
        live = [
            {name: memory.peek(holdings[rank], LIVE, name) for name in deployment.trainer_maps[rank.rank]}
            for rank in deployment.trainers
        ]
        history.record(version, live)

    async def train(verbs: Verbs) -> list[Outcome]:
        told = record if verbs.me == deployment.trainers[0] else None
        half = trainer(
            verbs,
            deployment.plan,
            deployment.trainers,
            deployment.rollouts,
            settings,
            told,
            routes=deployment.routes(settings.route),
        )
        outcomes = []
        for state in states:
            for name, tensor in deployment.shards(verbs.me.rank, state).items():
                memory.poke(holdings[verbs.me], LIVE, name, tensor)
            outcomes.append(await half.update())
        await half.close()
        return outcomes

    async def serve(verbs: Verbs) -> Rollout:
        ranks = deployment.rollouts[verbs.me.rollout].ranks
        half = rollout(verbs, deployment.plan.fingerprint, ranks, deployment.trainers[0], settings)
        await half.run()
        return half

    programs: dict[RankId, Program] = dict.fromkeys(deployment.trainers, train)
    for ref in deployment.rollouts:
        for rank in ref.ranks:
            holdings[rank] = memory.make_target(deployment, rank, deployment.blank(rank), settings.route)
            programs[rank] = serve
    engines = {ref.leader: world.engine(ref.ranks) for ref in deployment.rollouts}
    results = world.run(programs, holdings, engines)
    for rank, result in results.items():
        if isinstance(result, Exception):
            result.add_note(f"on {rank}")
            raise result
    ends, weights = {}, {}
    for rank in (rank for ref in deployment.rollouts for rank in ref.ranks):
        half, engine = results[rank], engines.get(rank)
        ends[rank] = RolloutEnd(half.version, half.dirty, engine.generating if engine is not None else None)
        weights[rank] = {n: memory.peek(holdings[rank], WEIGHTS, n) for n in deployment.rollout_maps(rank)}
    outcomes = {rank: results[rank] for rank in deployment.trainers}
    name = backend if isinstance(backend, str) else type(backend).__name__
    return RunResult(name, deployment, outcomes, ends, weights, world.trace, history)


def checkpoints(deployment: Deployment, densities: Sequence[float], seed: int) -> list[dict[str, Tensor]]:
    """The whole checkpoint before each update: arbitrary bits, a share of which changes each time."""
    stream = torch.Generator().manual_seed(seed)
    state = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
    states = []
    for density in densities:
        state = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            chosen = torch.rand(tensor.numel(), generator=stream) < density
            flips = torch.randint(
                1, 256, (tensor.numel(), tensor.itemsize), dtype=torch.uint8, generator=stream
            )
            int_view(tensor)[chosen] ^= flips.view(int_view(tensor).dtype).reshape(-1)[chosen]
        states.append(state)
    return states
