"""A stand-in for an accelerator, on the CPU: memory of its own, pinned memory that can fail, copies that end late."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weightsync.reference.devices import CopyEvent
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.params import int_view


class LateCopy:
    """A copy whose bytes move when it is waited for, and at no earlier time: the slowest device there is."""

    def __init__(self, move: Callable[[], object]) -> None:
        self._move: Callable[[], object] | None = move

    def wait(self) -> None:
        """Move the bytes, once."""
        move, self._move = self._move, None
        if move is not None:
            move()


class StandIn:
    """A device whose memory is host memory that it remembers; implements ``reference.devices.Device``.

    Args:
        capacity: bytes that it has; None for any number.
        pinnable: bytes of host memory that can be pinned; None for any number.

    Attributes:
        copies: every copy that was started, in order.
    """

    def __init__(self, capacity: int | None = None, pinnable: int | None = None) -> None:
        self.name = "stand-in:0"
        self.pins = True
        self.copies: list[LateCopy] = []
        self._free = capacity
        self._pinnable = pinnable
        self._memories: list[Tensor] = []

    def empty(self, nbytes: int) -> Tensor:
        """New memory; RuntimeError beyond the capacity."""
        if self._free is not None:
            if nbytes > self._free:
                raise RuntimeError(f"out of memory: {nbytes} bytes asked for, {self._free} free")
            self._free -= nbytes
        memory = torch.full((max(1, nbytes),), 0xA5, dtype=torch.uint8)
        self._memories.append(memory)
        return memory[:nbytes]

    def pinned(self, nbytes: int) -> Tensor:
        """New host memory; RuntimeError beyond what can be pinned."""
        if self._pinnable is not None and nbytes > self._pinnable:
            raise RuntimeError("CUDA error: out of memory")
        return torch.full((nbytes,), 0x5A, dtype=torch.uint8)

    def holds(self, tensor: Tensor) -> bool:
        """True for views of memory that it gave out."""
        found = tensor.untyped_storage().data_ptr()
        return any(memory.untyped_storage().data_ptr() == found for memory in self._memories)

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        """A copy that takes place when it is waited for."""
        copy = LateCopy(lambda: int_view(out).copy_(int_view(source)))
        self.copies.append(copy)
        return copy

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` on this device."""
        memory = self.empty(tensor.nbytes)
        moved = memory.view(tensor.dtype).view(tensor.shape)
        int_view(moved).copy_(int_view(tensor))
        return moved

    def collective(self, tensor: Tensor) -> None:
        """What its communicator says to a tensor of another device."""
        if not self.holds(tensor):
            raise WeightSyncError("No backend type associated with device type cpu")
