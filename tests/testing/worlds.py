"""One way to run ranks on every backend: a program per rank in, its value or its error out."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from importlib import import_module
from typing import Any, TypeAlias

from weightsync.backends.inprocess import InprocessWorld
from weightsync.reference.errors import BackendUnavailable, UnsupportedCapability, WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.rank import Engine, Hooks, Verbs
from weightsync.reference.trace import Trace
from weightsync.sim.backend import SimCluster, SimEngine
from weightsync.sim.clock import SimTask
from weightsync.sim.hardware import load_profile
from weightsync.sim.world import SimWorld

Program: TypeAlias = Callable[[Verbs], Coroutine[Any, Any, Any]]
"""What one rank does, given its verbs."""

LIMIT_S = 60
"""After this many seconds of the machine's clock a run that should have ended counts as hung."""

SIM_LIMIT_NS = 10**15
LEASE_NS = 500_000_000


class Generation:
    """An engine without requests: remembers whether it generates, and how often it was told to.

    Attributes:
        running: True while requests may read the weights.
        calls: ``pause`` and ``resume``, in the order in which they came.
    """

    def __init__(self) -> None:
        self.running = False
        self.calls: list[str] = []

    async def pause(self) -> None:
        """See ``reference.rank.Engine.pause``."""
        self.running = False
        self.calls.append("pause")

    async def resume(self) -> None:
        """See ``reference.rank.Engine.resume``."""
        self.running = True
        self.calls.append("resume")

    @property
    def generating(self) -> bool:
        """True while requests may read the weights."""
        return self.running


class World(ABC):
    """The ranks of one backend, for one run.

    Args:
        change: changes each rank's verbs before its program starts; how a test plants a wrong backend.
        hooks: per rank, what sees its verbs.
        trace: where the spans of all ranks go; a new one by default.
    """

    def __init__(
        self,
        change: Callable[[Verbs], None] | None = None,
        *,
        hooks: Mapping[RankId, Hooks] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.change = change
        self.hooks = dict(hooks or {})
        self.trace = trace if trace is not None else Trace()

    @abstractmethod
    def run(
        self,
        programs: Mapping[RankId, Program],
        holdings: Mapping[RankId, Any] | None = None,
        engines: Mapping[RankId, Engine] | None = None,
    ) -> dict[RankId, Any]:
        """Run every program to its end, side by side; to be called once.

        Args:
            programs: what each rank does.
            holdings: each rank's bytes, a ``Source`` or a ``Target``; they stay the caller's.
            engines: what generates, per leader of a rollout.

        Returns:
            What each program returned, or the Exception it ended with; nothing for a rank that was killed.

        Raises:
            WeightSyncError: a program hangs.
        """

    def kill(self, rank: RankId) -> None:
        """Stop a rank for good, from within any program of the run; its peers hear of it as the backend says.

        Raises:
            UnsupportedCapability: this world cannot; tests that need it are skipped.
        """
        raise UnsupportedCapability(
            f"{type(self).__name__} cannot kill {rank}; override kill to test lost ranks"
        )

    def engine(self, ranks: Sequence[RankId]) -> Any:
        """What generates on one rollout of the next run, for ``engines``."""
        return Generation()


class InprocessRanks(World):
    """All ranks on one asyncio loop, over ``backends.inprocess`` or a backend derived from it."""

    def make_shared(self) -> InprocessWorld:
        """What the ranks of a run share; override it to test a backend derived from ``inprocess``."""
        return InprocessWorld()

    def run(
        self,
        programs: Mapping[RankId, Program],
        holdings: Mapping[RankId, Any] | None = None,
        engines: Mapping[RankId, Engine] | None = None,
    ) -> dict[RankId, Any]:
        """See ``World.run``."""
        loop = asyncio.new_event_loop()
        self.shared = self.make_shared()
        self.verbs: dict[RankId, Verbs] = {}
        self.killed: list[RankId] = []
        try:
            return loop.run_until_complete(self._run(programs, holdings or {}, engines or {}))
        finally:
            for verbs in self.verbs.values():
                verbs.clock.close()  # type: ignore[attr-defined]
            loop.close()

    def kill(self, rank: RankId) -> None:
        """Freeze the rank; its groups break and its lease ends at once."""
        self.verbs[rank].clock.kill()  # type: ignore[attr-defined]
        self.killed.append(rank)
        self.shared.controls.pop(str(rank))
        self.shared.meetings.lost(rank)
        for control in self.shared.controls.values():
            control.lost(str(rank))
        self.ends[rank].set_result(None)

    async def _run(
        self,
        programs: Mapping[RankId, Program],
        holdings: Mapping[RankId, Any],
        engines: Mapping[RankId, Engine],
    ) -> dict[RankId, Any]:
        for rank in programs:
            self.verbs[rank] = self.shared.verbs(
                rank,
                holdings.get(rank),
                engine=engines.get(rank),
                trace=self.trace,
                hooks=self.hooks.get(rank),
            )
            if self.change is not None:
                self.change(self.verbs[rank])
        self.ends: dict[RankId, asyncio.Future[Any]] = {
            rank: asyncio.get_running_loop().create_future() for rank in programs
        }
        for rank, program in programs.items():
            self.verbs[rank].spawn(_report(program(self.verbs[rank]), self.ends[rank].set_result), "main")
        done, _ = await asyncio.wait(self.ends.values(), timeout=LIMIT_S)
        results = {
            rank: end.result() for rank, end in self.ends.items() if end in done and rank not in self.killed
        }
        refuse_hung([rank for rank, end in self.ends.items() if end not in done], results)
        return results


class SimRanks(World):
    """All ranks on the simulated cluster of ``profile``, with real bytes.

    Attributes:
        cluster: the cluster of the run; its ledger knows the races.
    """

    def __init__(self, *args: Any, profile: str = "laptop", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cluster = SimCluster(SimWorld(), load_profile(profile), lease_ns=LEASE_NS)

    def run(
        self,
        programs: Mapping[RankId, Program],
        holdings: Mapping[RankId, Any] | None = None,
        engines: Mapping[RankId, Engine] | None = None,
    ) -> dict[RankId, Any]:
        """See ``World.run``."""
        holdings, engines = holdings or {}, engines or {}
        results: dict[RankId, Any] = {}
        tasks: dict[RankId, SimTask] = {}
        with self.cluster.world as world:
            every = {
                rank: self.cluster.verbs(
                    rank,
                    holdings.get(rank),
                    engine=engines.get(rank),
                    trace=self.trace,
                    hooks=self.hooks.get(rank),
                )
                for rank in programs
            }
            for rank, verbs in every.items():
                if self.change is not None:
                    self.change(verbs)
                end = lambda result, rank=rank: results.__setitem__(rank, result)  # noqa: E731
                tasks[rank] = self.cluster.clocks[str(rank)].spawn(
                    _report(programs[rank](verbs), end), "main"
                )
            hung = world.run(list(tasks.values()), limit_ns=SIM_LIMIT_NS)
            refuse_hung([rank for rank, task in tasks.items() if task in hung], results)
        return results

    def kill(self, rank: RankId) -> None:
        """Freeze the rank; its groups break at once, its lease ends after ``LEASE_NS``."""
        self.cluster.kill(str(rank))

    def engine(self, ranks: Sequence[RankId]) -> Any:
        """An engine whose reads stand in the ledger."""
        return SimEngine(self.cluster, ranks)


WORLDS: Mapping[str, type[World] | str] = {
    "inprocess": InprocessRanks,
    "sim": SimRanks,
    "gloo": "weightsync.testing.ranks:GlooRanks",
}
"""Backend -> its world, or the module that holds one and is imported on demand."""


def world_names() -> tuple[str, ...]:
    """Names of the backends that ``world_of`` knows."""
    return tuple(WORLDS)


def world_of(name: str) -> type[World]:
    """The world of a backend.

    Raises:
        BackendUnavailable: the name is unknown, or the backend cannot be imported here, and why.
    """
    found = WORLDS.get(name)
    if found is None:
        raise BackendUnavailable(f"backend {name!r} has no world; expected one of {', '.join(WORLDS)}")
    if not isinstance(found, str):
        return found
    module, _, kind = found.partition(":")
    try:
        world: type[World] = getattr(import_module(module), kind)
    except ImportError as error:
        raise BackendUnavailable(f"backend {name!r} is not here: {error}; install what it needs") from error
    return world


async def _report(program: Coroutine[Any, Any, Any], end: Callable[[Any], None]) -> None:
    """Hand over what a program came to."""
    try:
        result = await program
    except (Exception, asyncio.CancelledError) as error:
        result = error
    with contextlib.suppress(asyncio.InvalidStateError):  # the rank was killed at its last await
        end(result)


def refuse_hung(ranks: Sequence[RankId], results: Mapping[RankId, Any]) -> None:
    """Raise WeightSyncError when programs hang, with what the others ended with, which is often the cause."""
    if ranks:
        causes = [
            f"{rank} ended with {end!r}" for rank, end in results.items() if isinstance(end, BaseException)
        ]
        raise WeightSyncError(
            f"{', '.join(map(str, ranks))} did not end, expected every program to; give each await a deadline"
            + "".join(f"; {cause}" for cause in causes)
        )
