"""Fault case 024: host tensors are handed to a device's communicator, with the peers already waiting."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from weightsync.reference.devices import CopyEvent, TorchDevice, stage
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.params import TPAttributes, compare, fresh_copy, same_bits
from weightsync.reference.tags import TaggedSnapshots
from weightsync.testing.stand_in import LateCopy, StandIn
from weightsync.testing.strategies import named_tensors

SHARD = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2})
ODD = torch.tensor([float("nan"), -0.0, float("inf")], dtype=torch.bfloat16)


def group(device: StandIn) -> dict[str, Tensor]:
    """a on the host, b on the device, c a snapshot on the host."""
    live = {"c": SHARD.stamp(ODD.clone())}
    tags = TaggedSnapshots(lambda: live, {"actor": "host"}, device, "actor", [].append)
    tags.backup("actor")
    with tags.reading("actor", "test") as held:
        return {"a": SHARD.stamp(ODD.clone()), "b": SHARD.stamp(device.put(ODD)), "c": held["c"]}


def enter(device: StandIn, params: dict[str, Tensor], entered: list[str], staging: bool = True) -> None:
    """What a rank does: stage everything, then enter the collectives one by one."""
    staged = stage(device, params) if staging else params
    for name, tensor in staged.items():
        entered.append(name)
        device.collective(tensor)


def test_everything_is_staged_with_its_bits_dtype_and_attributes() -> None:
    """Fault case 024: the three parameters of the case."""
    device, entered = StandIn(), []
    params = group(device)
    staged = stage(device, params)
    for name, tensor in params.items():
        assert device.holds(staged[name])
        assert same_bits(staged[name], ODD)
        assert compare(staged[name], tensor) == ()
    assert staged["b"] is params["b"]
    enter(device, params, entered)
    assert entered == ["a", "b", "c"]


@given(params=named_tensors())
def test_tensors_of_any_kind_are_staged_bit_for_bit(params: dict[str, Tensor]) -> None:
    """Fault case 024: strided, aliased, empty and scalar tensors."""
    device = StandIn()
    staged = stage(device, params)
    assert all(same_bits(staged[name], tensor) for name, tensor in params.items())
    assert all(device.holds(tensor) for tensor in staged.values())


@pytest.mark.parametrize("capacity", [6, 7, 11])
def test_what_cannot_be_staged_is_an_error_before_any_rank_enters(capacity: int) -> None:
    """Fault case 024: the device has no room for all of them."""
    device, entered = StandIn(capacity), []
    params = {"a": ODD.clone(), "c": ODD.clone()}
    with pytest.raises(WeightSyncError, match=r"parameter '[ac]' of shape \[3\] .* cannot be staged"):
        enter(device, params, entered)
    assert entered == []


def test_the_reference_device_stages_nothing_that_is_there() -> None:
    """Fault case 024: on a host the group's device is the host."""
    params = {"a": ODD.clone()}
    assert stage(TorchDevice("cpu"), params)["a"] is params["a"]


class LosesAttributes(StandIn):
    """The fault of the founding document: the move to the device makes a new tensor that carries nothing."""

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        TPAttributes({}).stamp(out)
        return super().copy(source, out)


class FailsLate(StandIn):
    """A device whose copies fail when they are waited for."""

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        def fail() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        return LateCopy(fail)


@pytest.mark.parametrize("kind", [LosesAttributes, FailsLate])
def test_a_copy_that_went_wrong_is_an_error_before_any_rank_enters(kind: type[StandIn]) -> None:
    """Fault case 024: the third and fifth of the real bugs."""
    device, entered = kind(), []
    with pytest.raises(WeightSyncError, match="parameter 'a'"):
        enter(device, {"a": SHARD.stamp(ODD.clone())}, entered)
    assert entered == []


def test_the_fault_itself_is_seen() -> None:
    """Fault case 024: without staging the communicator refuses, and the rank has entered by then."""
    device, entered = StandIn(), []
    with pytest.raises(WeightSyncError, match="No backend type associated with device type cpu"):
        enter(device, group(device), entered, staging=False)
    assert entered == ["a"]
    assert not device.holds(fresh_copy(ODD))
