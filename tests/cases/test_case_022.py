"""Fault case 022: a worker that fails keeps its pinned buffer, and the next sync waits for it for ever."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.devices import CopyEvent, HostMemory
from weightsync.reference.errors import DeadlineExceeded, PlanMismatch
from weightsync.reference.params import TPAttributes, read, same_bits
from weightsync.reference.pinned_pool import PinnedPool, on_host
from weightsync.testing.stand_in import LateCopy, StandIn

LIMIT_S = 30.0


def three() -> dict[str, Tensor]:
    return {name: torch.full((4,), float(number)) for number, name in enumerate("abc")}


def pool_of(device: StandIn, count: int = 2, kind: type[PinnedPool] = PinnedPool) -> PinnedPool:
    return kind(count, 16, HostMemory(device, [].append))


@pytest.mark.parametrize("failing", ["abc", "a", "b", "c"])
@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_the_workers_error_reaches_the_caller_and_the_pool_is_whole(
    failing: str, error: type[Exception]
) -> None:
    """Fault case 022: every diff fails, or one of them; then the next sync works."""
    device = StandIn()
    pool = pool_of(device)

    def work(name: str, copy: Tensor) -> Tensor:
        if name in failing:
            raise error(f"diff of {name}")
        return copy.clone()

    with pytest.raises(error, match=f"diff of [{failing}]"):
        on_host(pool, device, three(), work, timeout_s=LIMIT_S)
    assert pool.free == 2
    found = on_host(pool, device, three(), lambda name, copy: copy.clone(), timeout_s=LIMIT_S)
    assert all(same_bits(found[name], tensor) for name, tensor in three().items())
    assert pool.free == 2


class FailsAtTheStart(StandIn):
    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        raise MemoryError("no stream")


class FailsAtTheEnd(StandIn):
    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        def fail() -> None:
            raise MemoryError("late")

        return LateCopy(fail)


@pytest.mark.parametrize("kind", [FailsAtTheStart, FailsAtTheEnd])
def test_a_copy_that_fails_gives_its_buffer_back(kind: type[StandIn]) -> None:
    """Fault case 022: also when no worker ever saw it."""
    device = kind()
    pool = pool_of(device)
    with pytest.raises(MemoryError):
        on_host(pool, device, three(), lambda name, copy: None, timeout_s=LIMIT_S)
    assert pool.free == 2


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    """Fault case 022: an oversize tensor takes no buffer with it."""
    device = StandIn()
    pool = pool_of(device)
    with pytest.raises(PlanMismatch, match="'b' has 20 bytes, the pool's buffers 16"):
        on_host(pool, device, {**three(), "b": torch.zeros(5)}, lambda name, copy: None, timeout_s=LIMIT_S)
    assert (pool.free, device.copies) == (2, [])
    with pytest.raises(PlanMismatch, match="a pool of 0 buffers"):
        pool_of(device, 0)


def test_a_buffer_that_never_comes_back_is_an_error_with_a_deadline() -> None:
    """Fault case 022: no wait is for ever, and what was lent comes back however its block ends."""
    pool = pool_of(StandIn(), 1)
    buffers = pool.lend(LIMIT_S)
    buffers.__enter__()
    with pytest.raises(DeadlineExceeded, match="one of 1 pinned buffers"):
        pool.take(0.0)
    assert not buffers.__exit__(KeyError, KeyError("the block failed"), None)  # not swallowed
    assert pool.free == 1


def test_copies_carry_attributes() -> None:
    """Fault case 022: a pooled copy is a hop like every other."""
    device = StandIn()
    shard = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0})
    params = {"a": shard.stamp(torch.zeros(2))}
    found = on_host(pool_of(device), device, params, lambda name, copy: read(copy), timeout_s=LIMIT_S)
    assert found == {"a": shard}


class KeepsTheBuffer(PinnedPool):
    """The fault: what a failing worker had does not come back."""

    def give_back(self, buffer: Tensor) -> None:
        """Drops it."""


def test_the_fault_itself_is_seen() -> None:
    """Fault case 022: the third tensor waits for a buffer that nobody gives back."""
    device = StandIn()
    pool = pool_of(device, kind=KeepsTheBuffer)
    with pytest.raises(DeadlineExceeded):
        on_host(pool, device, three(), lambda name, copy: None, timeout_s=0.01)
    assert pool.free == 0
