"""Ranks as threads over real gloo groups and a real store, each on an asyncio loop of its own."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.backends.gloo import GlooWorld
from weightsync.backends.store import Store, local_store
from weightsync.reference.members import RankId
from weightsync.reference.rank import Engine
from weightsync.testing.worlds import LIMIT_S, Program, World, refuse_hung

LEASE_NS = 2_000_000_000


class GlooRanks(World):
    """One thread per rank, over ``backends.gloo``.

    Args:
        store: what the ranks meet through; by default a store within the process, whose connections cost nothing.
        prefix: of every key; runs that share a store need different ones.
        lease_ns: how long after a kill the control plane of the others knows of it.
        limit_s: after so long a run that should have ended counts as hung.

    Attributes:
        worlds: each rank's backend, while the run lasts.
        left_over: names of threads that still ran when their rank had been closed.
    """

    def __init__(
        self,
        *args: Any,
        store: Store | None = None,
        prefix: str = "weightsync",
        lease_ns: int = LEASE_NS,
        limit_s: float = LIMIT_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.store = store if store is not None else local_store()
        self.prefix = prefix
        self.lease_ns = lease_ns
        self.limit_s = limit_s
        self.worlds: dict[RankId, GlooWorld] = {}
        self.killed: set[RankId] = set()
        self.left_over: list[str] = []
        self._secret = secrets.token_bytes(32)
        self._results: dict[RankId, Any] = {}
        self._running = 0
        self._lock = threading.Lock()
        self._all_ended = threading.Event()

    def run(
        self,
        programs: Mapping[RankId, Program],
        holdings: Mapping[RankId, Any] | None = None,
        engines: Mapping[RankId, Engine] | None = None,
    ) -> dict[RankId, Any]:
        """See ``World.run``. No rank is closed before all have ended."""
        holdings, engines = holdings or {}, engines or {}
        self._running = len(programs)
        threads = {
            rank: threading.Thread(
                target=self._live,
                args=(rank, tuple(programs), program, holdings.get(rank), engines.get(rank)),
                name=str(rank),
                daemon=True,
            )
            for rank, program in programs.items()
        }
        for thread in threads.values():
            thread.start()
        self._all_ended.wait(self.limit_s)
        hung = [rank for rank in programs if rank not in self._results and rank not in self.killed]
        for rank in hung:
            if rank in self.worlds:
                self.worlds[rank].kill(rank)
        self._all_ended.set()
        for thread in threads.values():
            thread.join(LIMIT_S)
        refuse_hung(hung, self._results)
        return {rank: self._results[rank] for rank in programs if rank in self._results}

    def kill(self, rank: RankId) -> None:
        """Freeze the rank; its groups break when what it has under way ended, its lease ends after ``lease_ns``."""
        self.killed.add(rank)
        self._results.pop(rank, None)
        self.worlds[rank].kill(rank)

    def _live(
        self, rank: RankId, ranks: Sequence[RankId], program: Program, holding: Any, engine: Engine | None
    ) -> None:
        clock = AsyncioClock(rank_name=str(rank))
        world = GlooWorld(self.store, ranks, secret=self._secret, prefix=self.prefix, lease_ns=self.lease_ns)
        self.worlds[rank] = world
        try:
            verbs = world.verbs(
                rank, holding, engine=engine, trace=self.trace, hooks=self.hooks.get(rank), clock=clock
            )
            if self.change is not None:
                self.change(verbs)
            task = clock.spawn(program(verbs), "main")
            clock.run([task])
            if task.done() and rank not in self.killed:
                self._results[rank] = task.error or task.result()
        except BaseException as error:
            self._results[rank] = error
        finally:
            with self._lock:
                self._running -= 1
                if not self._running:
                    self._all_ended.set()
            self._all_ended.wait(self.limit_s)
            self.left_over += world.close()
            clock.close()
