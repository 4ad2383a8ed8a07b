"""The RL job over gloo loses a process in the middle, and every step still gets all of its samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from weightsync.backends.store import host_store
from weightsync.cli.launch import Processes, collect
from weightsync.cli.rank_run import Errand
from weightsync.cli.scenario_files import load
from weightsync.cli.workload import deployment, prepare

SMALL = (
    "model.shape.hidden_size=32",
    "model.shape.intermediate_size=48",
    "model.shape.num_hidden_layers=1",
    "workload.rl.prompts=6",
    "workload.rl.samples=4",
    "workload.steps=6",
    "policy.lease_ms=3000",
    "policy.update_ms=30000",
)


def test_a_killed_follower_leaves_its_questions_to_the_other_rollout(tmp_path: Path) -> None:
    scenario = load("tiny-hybrid", SMALL)
    store = host_store()
    errand = Errand(scenario, tmp_path, prepare(scenario, tmp_path))
    with Processes(errand, deployment(scenario).ranks, store) as processes:
        victim = next(rank for rank in processes.ranks if str(rank) == "rollout1.1")

        def kill(done: int) -> None:
            if done == 2:
                os.kill(processes.running[victim].pid, signal.SIGKILL)

        processes.watch(kill)
    record = collect(errand, processes.alive_at_end)
    steps = [step for step in record.trainers[0].curve if "reward" in step]
    assert [step["samples"] for step in steps] == [24] * 5
    # Samples of an older version are drawn only where the update before the step was given up.
    stale = {outcome.update + 1 for outcome in record.outcomes if not outcome.committed}
    assert {step["step"] for step in steps if step["mismatch"] > 1e-4} <= stale
    assert len(stale) <= 1
    assert record.outcomes[-1].committed
    assert 0 in record.outcomes[-1].members
    assert all(audit.check.ok for audit in record.audits)
