"""Snapshots are copies, whole or refused; baselines move on acknowledgement only."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from weightsync.reference.errors import PlanMismatch, StaleVersion
from weightsync.reference.params import TPAttributes, compare, int_view, read, same_bits
from weightsync.reference.snapshot import BaselineSlots, SnapshotSlots
from weightsync.reference.steps import Touched, run
from weightsync.testing.strategies import named_tensors, tp_attributes


def slots_for(params: dict[str, Tensor]) -> SnapshotSlots:
    return SnapshotSlots({name: tensor.dtype for name, tensor in params.items()})


def overwrite(params: dict[str, Tensor]) -> None:
    for tensor in params.values():
        bits = tensor.detach().view(int_view(tensor[..., :0] if tensor.ndim else tensor).dtype)
        bits.bitwise_not_()


@given(params=named_tensors(), slot=st.integers(0, 1))
def test_a_snapshot_is_bit_exact_and_no_later_step_changes_it(params: dict[str, Tensor], slot: int) -> None:
    before = {name: tensor.detach().clone() for name, tensor in params.items()}
    slots = slots_for(params)
    assert run(slots.write(slot, params)) == sum(tensor.nbytes for tensor in params.values())
    overwrite(params)
    held = slots.tensors(slot)
    assert list(held) == list(params)
    for name, tensor in before.items():
        assert same_bits(held[name], tensor)
        assert held[name].is_contiguous()


@given(attributes=st.lists(tp_attributes(), min_size=2, max_size=2))
def test_attributes_are_refreshed_at_every_copy(attributes: list[TPAttributes]) -> None:
    """Also when a name was lost, or came late."""
    live = torch.nn.Parameter(torch.ones(2, 3))
    slots = slots_for({"w": live})
    for attribute in attributes:
        attribute.stamp(live)
        run(slots.write(0, {"w": live}))
        held = slots.tensors(0)["w"]
        assert compare(live, held) == ()
        assert read(held) == attribute
        assert not held.requires_grad


def test_the_two_slots_are_independent_and_reuse_their_memory() -> None:
    live = torch.tensor([1.0, 2.0])
    slots = slots_for({"w": live})
    run(slots.write(0, {"w": live}))
    address = slots.tensors(0)["w"].data_ptr()
    live.add_(1)
    run(slots.write(1, {"w": live}))
    assert slots.tensors(0)["w"].tolist() == [1.0, 2.0]
    assert slots.tensors(1)["w"].tolist() == [2.0, 3.0]
    run(slots.write(0, {"w": live}))
    assert slots.tensors(0)["w"].data_ptr() == address
    assert slots.tensors(0)["w"].tolist() == [2.0, 3.0]


@pytest.mark.parametrize("shapes", [[(4,)], [(2, 2), (4,)], [(), (4,), (4,)], [(1, 8)]], ids=str)
def test_a_writer_that_races_with_the_copy_is_seen(shapes: list[tuple[int, ...]]) -> None:
    """Bytes move on both sides of the pause, so that old and new bits end up in one snapshot."""
    params = {f"w{number}": torch.zeros(shape) for number, shape in enumerate(shapes)}
    slots = slots_for(params)
    step = slots.write(0, params)
    touched = next(step)
    assert touched == Touched(sum(p.nbytes for p in params.values()), reads=("live",), writes=("slot0",))
    for tensor in params.values():
        tensor.fill_(1.0)
    with pytest.raises(StopIteration):
        next(step)
    found = torch.cat([tensor.reshape(-1) for tensor in slots.tensors(0).values()])
    assert set(found.tolist()) == {0.0, 1.0}


def test_a_slot_whose_copy_was_abandoned_is_torn_until_the_next_whole_one() -> None:
    live = {"w": torch.zeros(4)}
    slots = slots_for(live)
    with pytest.raises(StaleVersion, match="snapshot slot 1 holds no whole snapshot"):
        slots.tensors(1)
    run(slots.write(1, live))
    step = slots.write(1, live)
    next(step)
    step.close()
    with pytest.raises(StaleVersion, match="snapshot into it first"):
        slots.tensors(1)
    run(slots.write(1, live))
    assert same_bits(slots.tensors(1)["w"], live["w"])


def test_a_cast_happens_once_in_the_copy() -> None:
    live = torch.tensor([1.0, 1.01])
    slots = SnapshotSlots({"w": torch.bfloat16})
    run(slots.write(0, {"w": live}))
    assert same_bits(slots.tensors(0)["w"], live.to(torch.bfloat16))


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "parameter 'w' is not among the live parameters"),
        ({"w": torch.zeros(2, dtype=torch.int32)}, "'w' is torch.int32, its plan says torch.float32"),
        ({"w": torch.zeros(3)}, r"'w' has shape \[3\], its snapshot \[2\]"),
    ],
    ids=["missing", "dtype", "shape"],
)
def test_parameters_that_no_longer_fit_are_refused(params: dict[str, Tensor], said: str) -> None:
    slots = SnapshotSlots({"w": torch.float32})
    run(slots.write(0, {"w": torch.zeros(2)}))
    with pytest.raises(PlanMismatch, match=said):
        run(slots.write(0, params))


def test_a_third_slot_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="snapshot slot 2 does not exist, expected 0 or 1"):
        run(SnapshotSlots({}).write(2, {}))
    with pytest.raises(PlanMismatch, match="snapshot slot -1 does not exist"):
        BaselineSlots().hold(-1, 1, 1)


class BaselineMachine(RuleBasedStateMachine):
    """Pushes that succeed, fail, or are torn, against a model that remembers everything."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = BaselineSlots()
        self.version = 0
        self.held: dict[int, tuple[int, int]] = {}
        self.acknowledged: int | None = None

    @rule(digest=st.integers(-5, 5), outcome=st.sampled_from(["torn", "failed", "committed"]))
    def push(self, digest: int, outcome: str) -> None:
        slot = self.slots.free()
        assert slot != self.acknowledged
        self.slots.invalidate(slot)
        self.held.pop(slot, None)
        if outcome == "torn":
            return
        self.version += 1
        self.slots.hold(slot, self.version, digest)
        self.held[slot] = (self.version, digest)
        if outcome == "committed":
            self.slots.acknowledge(slot)
            self.acknowledged = slot

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def reconnect(self, data: st.DataObject) -> None:
        """Receivers report what they hold: perhaps a version whose commit was never acknowledged."""
        slot = data.draw(st.none() | st.sampled_from(sorted(self.held)))
        self.slots.acknowledge(slot)
        self.acknowledged = slot

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.slots.acknowledged == self.acknowledged
        assert self.slots.free() != self.acknowledged
        for slot, (version, digest) in self.held.items():
            assert self.slots.find(version, digest) == slot
            assert self.slots.find(version, digest + 1) is None
            assert (self.slots.version(slot), self.slots.digest(slot)) == (version, digest)
        for slot in {0, 1} - set(self.held):
            with pytest.raises(StaleVersion, match="holds no version"):
                self.slots.version(slot)
            with pytest.raises(StaleVersion, match="holds no version to acknowledge"):
                self.slots.acknowledge(slot)


TestBaselineSlots = BaselineMachine.TestCase


def test_the_acknowledged_baseline_cannot_be_given_up() -> None:
    slots = BaselineSlots()
    slots.hold(0, 4, 9)
    slots.acknowledge(0)
    with pytest.raises(StaleVersion, match=r"slot 0 holds the acknowledged baseline.*snapshot into free\(\)"):
        slots.invalidate(0)
    assert slots.find(4, 9) == 0
