"""A whole run in one process: every rank on the caller's loop, with faults where a test wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from weightsync.backends.inprocess import InprocessWorld
from weightsync.reference.buckets import Bucket
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.layouts import RowMap, plain, row_map
from weightsync.reference.members import Group, RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, TPAttributes, int_view
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.testing.history import History

WRITING = ("apply", "rollback", "commit", "pause", "resume")
UNUSED = ModelShape(vocab=1, hidden=1, intermediate=1, layers=1, heads=1, kv_heads=1, head_dim=1)


@dataclass(frozen=True)
class WholeTensors(Deployment):
    """A deployment of a few tensors that every rank holds whole: the smallest there is. Its model is unused.

    Attributes:
        metas: the tensors, in wire order.
    """

    metas: tuple[ParamMeta, ...] = ()

    @classmethod
    def of(
        cls, tensors: Mapping[str, Tensor], rollouts: int = 1, bucket_bytes: int = 1 << 20
    ) -> WholeTensors:
        """One trainer rank and ``rollouts`` rollouts of one rank each, for tensors like these."""
        metas = tuple(ParamMeta.of(name, tensor) for name, tensor in tensors.items())
        return cls(UNUSED, 1, (RolloutLayout(1, False),) * rollouts, bucket_bytes, metas=metas)

    @cached_property
    def tensors(self) -> tuple[ParamMeta, ...]:
        """The tensors in wire order."""
        return self.metas

    @cached_property
    def attributes(self) -> tuple[dict[str, TPAttributes], ...]:
        """Nothing is cut."""
        return ({meta.name: TPAttributes({}) for meta in self.metas},)

    @cached_property
    def trainer_maps(self) -> tuple[dict[str, RowMap], ...]:
        """The one trainer rank's maps."""
        return (self._maps(),)

    def rollout_maps(self, rank: RankId) -> dict[str, RowMap]:
        """Name -> map of one rollout rank."""
        return self._maps()

    def aliases(self, rank: RankId | None = None) -> dict[str, str]:
        """Nothing is tied."""
        return {}

    def _maps(self) -> dict[str, RowMap]:
        numbers = {meta.name: number for number, meta in enumerate(self.metas)}
        return {
            meta.name: row_map(plain(meta, replicated=True), meta.name, TPAttributes({}), 0, 1, numbers)
            for meta in self.metas
        }


@dataclass
class Generating:
    """A rollout's engine that only knows whether it generates; implements ``reference.rank.Engine``."""

    on: bool = False

    async def pause(self) -> None:
        """Stop."""
        self.on = False

    async def resume(self) -> None:
        """Go on."""
        self.on = True


@dataclass
class Planted:
    """One fault to come: some calls of one verb of one rank fail.

    Attributes:
        rank: name of the rank.
        verb: name of the verb.
        nth: the first call that fails, counted from 1 since it was planted.
        times: how many calls in a row fail.
        late: fail after the verb took effect, not before.
        error: what is raised.
        wait: awaited before it is raised.
        seen: calls since it was planted.
    """

    rank: str
    verb: str
    nth: int = 1
    times: int = 1
    late: bool = False
    error: Exception = field(default_factory=lambda: OSError("planted"))
    wait: Callable[[], Awaitable[None]] | None = None
    seen: int = 0

    def hits(self) -> bool:
        """Count one call; True when it is to fail."""
        self.seen += 1
        return self.nth <= self.seen < self.nth + self.times

    async def fail(self) -> None:
        """Raise, in its time."""
        if self.wait is not None:
            await self.wait()
        raise self.error


class InprocessRun:
    """Every rank of a deployment on the running loop; enter it, ``set`` parameters, ``push``, look.

    Before every verb of a rollout rank, and after those that write, it checks that a rollout that generates
    holds exactly the bits that its label says; ``violations`` lists where it did not.

    Args:
        deployment: who holds what.
        settings: of the protocol.
        trainer, rollout: the protocol's two halves; a wrong protocol is a subclass of one.

    Attributes:
        trainers, rollouts: the halves, by rank.
        targets: the rollout ranks' bytes.
        engines: per rollout, whether it generates.
        history: every version that left the trainer.
        buckets: a copy of every bucket sent, in order.
        planted: faults to come; add to it.
        violations: broken promises, one sentence each.
        closes_trainers: False when somebody else closes them before the run is left.
    """

    def __init__(
        self,
        deployment: Deployment,
        *,
        settings: ProtocolSettings | None = None,
        trainer: type[Trainer] = Trainer,
        rollout: type[Rollout] = Rollout,
    ) -> None:
        self.deployment = deployment
        self.settings = settings or ProtocolSettings()
        self.history = History(deployment)
        self.buckets: list[Bucket] = []
        self.planted: list[Planted] = []
        self.violations: list[str] = []
        zeros = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
        self.params = [deployment.shards(rank, zeros) for rank in range(len(deployment.trainers))]
        self.trainers: dict[RankId, Trainer] = {}
        self.rollouts: dict[RankId, Rollout] = {}
        self.targets: dict[RankId, Target] = {}
        self.engines: dict[int, Generating] = {}
        self.closes_trainers = True
        self._kinds = (trainer, rollout)
        self._served: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        world, deployment = InprocessWorld(), self.deployment
        make_trainer, make_rollout = self._kinds
        for rank in deployment.trainers:
            verbs = world.verbs(
                rank, Source(deployment.plan, rank.rank, self.params[rank.rank]), hooks=Watch(self, str(rank))
            )
            verbs.fabric = Recorded(verbs.fabric, self.buckets)
            told = self._record if rank == deployment.trainers[0] else None
            routes = deployment.routes(self.settings.route)
            self.trainers[rank] = make_trainer(
                verbs, deployment.plan, deployment.trainers, deployment.rollouts, self.settings, told,
                routes=routes,
            )  # fmt: skip
        for ref in deployment.rollouts:
            self.engines[ref.number] = Generating()
            for rank in ref.ranks:
                self.targets[rank] = Target(
                    deployment.tensors,
                    deployment.rollout_maps(rank),
                    deployment.blank(rank),
                    deployment.aliases(rank),
                    self.settings.route,
                )
                engine = self.engines[ref.number] if rank == ref.leader else None
                verbs = world.verbs(rank, self.targets[rank], engine=engine, hooks=Watch(self, str(rank)))
                self.rollouts[rank] = make_rollout(
                    verbs, deployment.plan.fingerprint, ref.ranks, deployment.trainers[0], self.settings
                )
        self._served = [asyncio.create_task(rollout.run()) for rollout in self.rollouts.values()]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            if self.closes_trainers:
                await asyncio.gather(*(trainer.close() for trainer in self.trainers.values()))
            await asyncio.gather(*self._served)
        for task in self._served:
            task.cancel()

    @property
    def lead(self) -> Trainer:
        """The trainer's lead."""
        return self.trainers[self.deployment.trainers[0]]

    def plant(self, rank: str, verb: str, **how: Any) -> Planted:
        """Add a fault to come; see ``Planted``."""
        self.planted.append(Planted(rank, verb, **how))
        return self.planted[-1]

    def set(self, checkpoint: Mapping[str, Tensor]) -> None:
        """Write every trainer rank's shards of ``checkpoint`` into its live parameters, bit for bit."""
        for rank, params in enumerate(self.params):
            for name, shard in self.deployment.shards(rank, checkpoint).items():
                int_view(params[name].data).copy_(int_view(shard.data))

    async def push(self) -> Outcome:
        """One update on every trainer rank; the lead's outcome. The first rank's error is raised."""
        outcomes = await asyncio.gather(*(trainer.update() for trainer in self.trainers.values()))
        return outcomes[0]

    def differences(self, rank: RankId, version: int | None = None) -> list[str]:
        """Where a rollout rank's weights are not those of ``version``, or of its own label."""
        label = self.rollouts[rank].version if version is None else version
        return self.history.differences(label, rank, self.targets[rank].weights)

    def look(self) -> None:
        """Check now that every rollout that generates holds what its label says, on all ranks."""
        for ref in self.deployment.rollouts:
            label = self.rollouts[ref.leader].version
            for rank in ref.ranks if self.engines[ref.number].on else ():
                for difference in self.differences(rank, label):
                    self.violations.append(f"{rank} generates under label {label}: {difference}")

    def _record(self, version: int, slot: int) -> None:
        self.history.record(version, self.params)


class Watch:
    """Looks, and makes planted faults happen, around every verb of one rank; ``reference.rank.Hooks``."""

    def __init__(self, run: InprocessRun, rank: str) -> None:
        self.run = run
        self.rank = rank
        self._late: dict[int, Planted] = {}
        self._count = 0

    async def before(self, verb: str) -> int:
        """See ``reference.rank.Hooks``."""
        if not self.rank.startswith("trainer"):  # whose verbs write no weights
            self.run.look()
        self._count += 1
        for planted in list(self.run.planted):
            if planted.rank == self.rank and planted.verb == verb and planted.hits():
                if not planted.late:
                    await planted.fail()
                self._late[self._count] = planted
        return self._count

    async def after(self, verb: str, ordinal: int) -> None:
        """See ``reference.rank.Hooks``."""
        if verb in WRITING:
            self.run.look()
        planted = self._late.pop(ordinal, None)
        if planted is not None:
            await planted.fail()


class Recorded:
    """A fabric that remembers what was sent; everything else is the inner fabric's."""

    def __init__(self, inner: Any, buckets: list[Bucket]) -> None:
        self._inner = inner
        self._buckets = buckets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, group: Group, bucket: Bucket, deadline_ns: int) -> None:
        """Remember a copy, then send."""
        self._buckets.append(bucket.copy())
        await self._inner.send(group, bucket, deadline_ns)
