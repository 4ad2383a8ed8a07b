"""Ranks as processes: one run spawned by a launcher that hosts the store, and one under torchrun."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import subprocess
import sys
from pathlib import Path

from weightsync.backends.store import host_store
from weightsync.testing import spawned

LIMIT_S = 120


def test_a_run_of_spawned_processes_ends_with_every_bit(tmp_path: Path) -> None:
    store, secret = host_store(), secrets.token_bytes(32)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(
            target=spawned.live,
            args=(str(rank), "127.0.0.1", store.port, secret, str(tmp_path)),
            name=str(rank),
        )
        for rank in spawned.deployment().ranks
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        assert {process.name: process.exitcode for process in processes} == {p.name: 0 for p in processes}
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert spawned.problems(tmp_path) == []


def test_a_run_under_torchrun_ends_with_every_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command += [str(len(spawned.deployment().ranks)), "-m", "weightsync.testing.spawned", str(tmp_path)]
    environ = {**os.environ, "WEIGHTSYNC_SECRET": secrets.token_hex(32), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert spawned.problems(tmp_path) == []
