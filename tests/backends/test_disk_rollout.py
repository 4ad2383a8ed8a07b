"""A rollout rank that pulls: a step from a folder as buckets that its target takes, proves and can roll back."""

from __future__ import annotations

import numpy as np
import pytest

from weightsync.backends.disk import update_buckets
from weightsync.backends.disk.squash import Change, change_to
from weightsync.reference.digest import state_digest
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.headers import DELTA, FULL, NO_BASE, Heading
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import Update, deliver
from weightsync.testing.disk_states import State, metas, states
from weightsync.testing.inprocess_run import WholeTensors

STATES = states(4)
HEADING = Heading(DELTA, epoch=1, base=1, version=2)


def changes(old: State, new: State) -> list[Change]:
    def bits(state: State, name: str) -> np.ndarray:
        flat = int_view(state[name]).numpy()
        return flat.view(f"u{flat.itemsize}")

    every = (change_to(meta, bits(old, meta.name), bits(new, meta.name)) for meta in metas(old))
    return [change for change in every if change is not None]


@pytest.mark.parametrize(("before", "after"), [(0, 1), (1, 2), (0, 3), (3, 0)])
def test_a_step_reaches_the_weights_bit_for_bit_and_is_undone(before: int, after: int) -> None:
    old, new = STATES[before], STATES[after]
    deployment = WholeTensors.of(old)
    weights = {name: tensor.clone() for name, tensor in old.items()}
    target = Target(deployment.tensors, deployment.rollout_maps(RankId("rollout", 0, 0)), weights)
    digest = state_digest((meta, new[meta.name]) for meta in metas(new))
    buckets = list(update_buckets(changes(old, new), deployment.tensors, HEADING, digest))
    update = Update(2, 1, buckets, digest)
    deliver(target, update)
    assert all(same_bits(weights[name], tensor) for name, tensor in new.items())
    assert run(target.digest()) == run(target.digest(afresh=True)) == digest
    run(target.rollback())
    assert all(same_bits(weights[name], tensor) for name, tensor in old.items())


def test_what_is_no_delta_of_the_plan_is_refused() -> None:
    step = changes(STATES[0], STATES[1])
    with pytest.raises(PatchMismatch, match="expected 'delta'"):
        list(update_buckets(step, metas(STATES[0]), Heading(FULL, 1, NO_BASE, 2), 0))
    with pytest.raises(PatchMismatch, match=r"'a\.weight' is changed but not in the plan"):
        list(update_buckets(step, metas(STATES[0])[1:], HEADING, 0))
