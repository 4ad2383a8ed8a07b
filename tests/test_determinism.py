"""The simulated clock: one seed, one trace; another seed, other spans. And no backend adds or drops a verb."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.scenario import RunResult, run_scenario
from weightsync.testing.tiny import tiny_deployment
from weightsync.testing.worlds import SimRanks

RECEIVE = pytest.mark.parametrize("receive", ["stage", "stream"])
ELSEWHERE = """
from weightsync.testing.tiny import tiny_deployment
from weightsync.testing.scenario import run_scenario
print(run_scenario("sim", tiny_deployment()).trace.spans)
"""


def run(backend: str, receive: str = "stage", seed: int = 0) -> RunResult:
    return run_scenario(backend, tiny_deployment(), ProtocolSettings(receive=receive), seed=seed)


@RECEIVE
def test_one_seed_gives_one_trace(receive: str) -> None:
    first, second = run("sim", receive), run("sim", receive)
    assert first.trace.spans == second.trace.spans
    assert first.outcomes == second.outcomes


@RECEIVE
def test_another_seed_gives_other_spans_of_the_same_verbs(receive: str) -> None:
    first, second = run("sim", receive), run("sim", receive, seed=1)
    assert first.trace.spans != second.trace.spans
    assert {rank: set(verbs) for rank, verbs in first.verbs().items()} == {
        rank: set(verbs) for rank, verbs in second.verbs().items()
    }


def test_a_trace_does_not_depend_on_the_process() -> None:
    """Neither on its hash seed, nor on what was simulated before."""
    found = subprocess.run(
        [sys.executable, "-c", ELSEWHERE],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout == f"{run('sim').trace.spans}\n"


@RECEIVE
def test_a_run_without_faults_has_the_same_verbs_in_process_and_simulated(receive: str) -> None:
    real, simulated = run("inprocess", receive), run("sim", receive)
    assert real.problems() == simulated.problems() == []
    for rank, verbs in real.verbs().items():
        assert simulated.verbs()[rank] == verbs, f"verbs of {rank}"


@RECEIVE
def test_a_run_without_faults_has_no_race(receive: str) -> None:
    """Generation among the readers: nobody reads weights while they are written."""
    world = SimRanks()
    run_scenario(world, tiny_deployment(), ProtocolSettings(receive=receive))
    assert world.cluster.ledger.races == []
