"""``python -m weightsync.cli.rank_main ERRAND RANK``: one rank's process, started and ended by the launcher.

The secret comes in the environment, since a command line can be read by others. The launcher holds the other end
of stdin: when that closes, the launcher is gone, and so is this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from pathlib import Path

import torch

from weightsync.backends.gloo import GlooWorld
from weightsync.backends.store import connect_store
from weightsync.backends.torchrun import SECRET
from weightsync.cli import logs
from weightsync.cli.parts import MS
from weightsync.cli.rank_run import PREFIX, Errand, rank_run
from weightsync.cli.scenario import check
from weightsync.cli.telling import Wire
from weightsync.cli.workload import deployment
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId

GRACE_NS = 300_000_000_000
"""How long a rank may take to come up: importing takes seconds, on a busy machine minutes."""


def main(errand_file: str, name: str) -> int:
    """Run one rank to its end; 0 when it did its part, 1 with a sentence on stderr when it could not."""
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    wire = Wire(sys.stdout)
    logs.through(wire.say)
    told = json.loads(Path(errand_file).read_text(encoding="utf-8"))
    scenario = check(told["scenario"], "scenario")
    folder = told["checkpoint"]
    errand = Errand(scenario, Path(told["scratch"]), None if folder is None else Path(folder))
    try:
        store = connect_store(told["host"], told["port"])
        world = GlooWorld(
            store,
            deployment(scenario).ranks,
            prefix=PREFIX,
            secret=os.environ[SECRET].encode(),
            lease_ns=scenario.policy.lease_ms * MS,
            grace_ns=GRACE_NS,
        )
        rank_run(RankId.parse(name), world, errand, wire.done, wire.status).run()
    except WeightSyncError as error:
        print(error, file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _end_with_launcher() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads in which gloo still waits for a lost peer must not hold the process up
