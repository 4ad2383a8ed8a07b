"""The protocol as a state machine keeps every promise, and the machine turns red on protocols that do not."""

from __future__ import annotations

import pytest
from hypothesis.stateful import run_state_machine_as_test

from weightsync.reference.errors import WeightSyncError
from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.testing.stateful import SyncMachine, machine_settings
from weightsync.testing.states import examples
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


@pytest.mark.parametrize("wrong", FOUND, ids=lambda wrong: wrong.__name__)
def test_a_wrong_protocol_is_found(wrong: type[Trainer] | type[Rollout]) -> None:
    half = "trainer" if issubclass(wrong, Trainer) else "rollout"
    machine = type(f"With{wrong.__name__}", (SyncMachine,), {half: wrong})
    with pytest.raises((AssertionError, WeightSyncError)):
        run_state_machine_as_test(machine, settings=machine_settings(200, fixed=True))
