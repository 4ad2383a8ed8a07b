"""The protocol as a state machine keeps every promise, and the machine turns red on protocols that do not."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from weightsync.reference.deployment import RolloutLayout
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import Fault
from weightsync.testing.driven import DrivenRun, small_deployment
from weightsync.testing.stateful import SyncMachine, machine_settings
from weightsync.testing.states import examples
from weightsync.testing.tiny import MS, SETTINGS
from weightsync.testing.wrong_protocols import (
    CommitCountedTwice,
    LostForEver,
    MissingAgree,
    NestedTimeouts,
    NewTakenForOld,
    ResumedBeforeCommit,
    ReusedVersion,
    SlotParity,
)

FOUND = (
    ReusedVersion, SlotParity, NestedTimeouts, ResumedBeforeCommit, CommitCountedTwice, MissingAgree, LostForEver,
    NewTakenForOld,
)  # fmt: skip
"""Those that a few dozen examples find; the others want two faults at two awaits, which ``fuzz`` aims at."""


def test_the_protocol_keeps_every_promise() -> None:
    run_state_machine_as_test(SyncMachine, settings=machine_settings(examples(0.6).max_examples))


@pytest.mark.parametrize("layout", [RolloutLayout(2, False), RolloutLayout(2, True)])
@pytest.mark.parametrize("index", range(1, 20, 4))
def test_the_ranks_of_a_leader_that_died_unnoticed_end_with_the_run(
    layout: RolloutLayout, index: int
) -> None:
    """The trainer closes before anybody knows of the loss: its leader can pass nothing on."""
    run = DrivenRun(small_deployment(2, (layout,)), SETTINGS, detect_ns=40 * MS)
    run.push([Fault("rollout0.0", index, "kill")])
    assert run.close() == []


def test_a_silent_rollout_does_not_keep_another_from_coming_back() -> None:
    """The third one holds its lease and never answers; asking it must leave time to greet the first."""
    layout = RolloutLayout(2, True)
    run = DrivenRun(small_deployment(2, (layout,) * 3), SETTINGS, absent=(2,))
    first = run.deployment.rollouts[0]
    run.lose(first)
    assert run.push()[0].members == (1,)
    run.wait(900)
    run.start(first)
    run.wait(900)
    outcome = run.push()[0]
    assert (outcome.committed, outcome.members, outcome.full) == (True, (0, 1), (0,))
    assert run.close() == []


@pytest.mark.parametrize("wrong", FOUND, ids=lambda wrong: wrong.__name__)
def test_a_wrong_protocol_is_found(wrong: type[Trainer] | type[Rollout]) -> None:
    half = "trainer" if issubclass(wrong, Trainer) else "rollout"
    machine = type(f"With{wrong.__name__}", (SyncMachine,), {half: wrong})
    with pytest.raises((AssertionError, WeightSyncError)):
        run_state_machine_as_test(machine, settings=machine_settings(1000, fixed=True))
