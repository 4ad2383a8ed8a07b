"""Ranks that torchrun started: who this process is, and the world it takes part in, from the environment passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from weightsync.backends.gloo import GlooWorld
from weightsync.backends.store import connect_store
from weightsync.reference.errors import PlanMismatch, WeightSyncError
from weightsync.reference.members import RankId

SECRET = "WEIGHTSYNC_SECRET"
"""Environment variable with the run's secret; export it before torchrun, which hands it to every rank."""


def rank_of(world_rank: int, ranks: Sequence[RankId]) -> RankId:
    """Who process ``world_rank`` is: ``ranks`` in order, the trainer's first, as ``Deployment.ranks`` lists them."""
    if not 0 <= world_rank < len(ranks):
        raise PlanMismatch(
            f"process {world_rank} has no rank, since the deployment has {len(ranks)}; start {len(ranks)} processes"
        )
    return ranks[world_rank]


def torchrun_world(
    ranks: Sequence[RankId], environ: Mapping[str, str], **settings: Any
) -> tuple[RankId, GlooWorld]:
    """This process's rank, and its world over the store that torchrun's agent hosts.

    Args:
        ranks: every rank of the run, ``Deployment.ranks``.
        environ: ``os.environ`` of a process that torchrun started.
        settings: further arguments of ``GlooWorld``: ``hostname``, ``lease_ns`` and so on.

    Raises:
        PlanMismatch: torchrun started another number of processes.
        WeightSyncError: the environment is not torchrun's, or there is no secret.
    """
    lacking = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if name not in environ]
    if lacking:
        raise WeightSyncError(f"{', '.join(lacking)} not set; start this program with torchrun")
    if SECRET not in environ:
        raise WeightSyncError(f"{SECRET} not set; export a long random one, the same for every host")
    if int(environ["WORLD_SIZE"]) != len(ranks):
        raise PlanMismatch(
            f"torchrun started {environ['WORLD_SIZE']} processes for {len(ranks)} ranks; "
            f"give --nproc-per-node and --nnodes a product of {len(ranks)}"
        )
    me = rank_of(int(environ["RANK"]), ranks)
    store = connect_store(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]))
    run = environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    settings = {"secret": environ[SECRET].encode(), "prefix": f"weightsync/{run}/{restart}", **settings}
    return me, GlooWorld(store, ranks, **settings)
