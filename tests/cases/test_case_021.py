"""Fault case 021: the host copy of device data is read before the copy has finished."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import Tensor

from weightsync.reference.devices import CopyEvent, HostMemory
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.pinned_pool import PinnedPool, on_host
from weightsync.reference.tags import TaggedSnapshots
from weightsync.testing.stand_in import LateCopy, StandIn

RIGHT = torch.arange(8)


class Threaded(StandIn):
    """A device whose copies are made by a thread of their own that comes late, as a stream does."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.random = random.Random(seed)

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        turn = threading.Event()

        def move() -> None:
            turn.wait(self.random.random() / 500)  # nobody sets it: a delay that the reader does not know
            int_view(out).copy_(int_view(source))

        thread = threading.Thread(target=move)
        thread.start()
        event = LateCopy(thread.join)
        self.copies.append(event)
        return event


@pytest.mark.parametrize("device", [StandIn(), Threaded()], ids=["at the wait", "in a thread"])
def test_a_reader_that_starts_at_once_waits_for_the_copy(device: StandIn) -> None:
    """Fault case 021: eight numbers, read right after the backup was started."""
    live = {"w": device.put(RIGHT)}
    tags = TaggedSnapshots(lambda: live, {"actor": "host"}, device, "actor", [].append)
    tags.backup("actor", wait=False)
    with tags.reading("actor", "the push") as held:
        assert same_bits(held["w"], RIGHT)


def test_with_two_hundred_random_delays_it_is_never_zeros_or_a_mix() -> None:
    """Fault case 021: the next backup starts before anybody waited for the one before."""
    device = Threaded(1)
    live = {"w": device.put(RIGHT)}
    tags = TaggedSnapshots(lambda: live, {"actor": "host", "ref": "host"}, device, "actor", [].append)
    for number in range(200):
        tags.settle()
        live["w"].copy_(RIGHT + number)
        tags.backup("actor", wait=False)
        if number % 3 == 0:
            tags.backup("actor", wait=False)  # a second copy into the same memory
        if number % 2:
            tags.copy("actor", "ref")  # a second hop before any wait
        with tags.reading("ref" if number % 2 else "actor", "the push") as held:
            assert same_bits(held["w"], RIGHT + number)


def test_workers_on_pooled_buffers_wait_for_their_own_copy() -> None:
    """Fault case 021: buffers are used again and again, so what is read early is another tensor's."""
    device = Threaded(2)
    params = {f"w{number}": device.put(RIGHT + number) for number in range(50)}
    pool = PinnedPool(2, 64, HostMemory(device, [].append))
    found = on_host(pool, device, params, lambda name, copy: copy.clone(), timeout_s=30.0)
    assert all(same_bits(found[name], tensor) for name, tensor in params.items())


class ReadsAtOnce(StandIn):
    """The fault: a copy whose event is over before the copy is."""

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        super().copy(source, out)
        return LateCopy(lambda: None)


def test_the_fault_itself_is_seen() -> None:
    """Fault case 021: without the wait the reader gets what stood there before."""
    device = ReadsAtOnce()
    live = {"w": device.put(RIGHT)}
    tags = TaggedSnapshots(lambda: live, {"actor": "host"}, device, "actor", [].append)
    tags.backup("actor")
    with tags.reading("actor", "the push") as held:
        assert not same_bits(held["w"], RIGHT)
