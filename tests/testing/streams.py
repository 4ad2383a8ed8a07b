"""A device that copies late, for tests of staging on a machine without one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

POISON = 0xAB
"""What a dropped host buffer is overwritten with."""


class LateStream:
    """A stand-in stream: queued copies happen in ``run``, and a host buffer that was dropped before holds poison.

    Attributes:
        done: how many of the queued copies have happened.
    """

    pins = True

    def __init__(self) -> None:
        self._queue: list[tuple[bytearray, Tensor]] = []
        self._memory: dict[int, bytearray] = {}
        self.done = 0

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Host memory that this stream, like pinned memory's allocator, reuses once the tensor is dropped."""
        memory = bytearray(max(1, prod(shape) * dtype.itemsize))
        buffer = (
            torch.frombuffer(memory, dtype=torch.uint8)[: prod(shape) * dtype.itemsize]
            .view(dtype)
            .view(tuple(shape))
        )
        self._memory[buffer.data_ptr()] = memory
        weakref.finalize(buffer, _poison, memory)
        return buffer

    def copied(self, host: Tensor, *, non_blocking: bool) -> Tensor:
        """A device tensor that is zero until the copy has happened."""
        if not non_blocking:
            return host.clone()
        device = torch.zeros_like(host)
        self._queue.append((self._memory[host.data_ptr()], device))
        return device

    def run(self, copies: int | None = None) -> None:
        """Let the next copies, or all, happen."""
        end = len(self._queue) if copies is None else self.done + copies
        for memory, device in self._queue[self.done : end]:
            flat = torch.frombuffer(memory, dtype=torch.uint8)[: device.nbytes]
            device.copy_(flat.view(device.dtype).view(device.shape))
        self.done = min(end, len(self._queue))

    def mark(self) -> int:
        """How many copies are queued."""
        return len(self._queue)

    def passed(self, mark: int) -> bool:
        """True when so many have happened."""
        return self.done >= mark

    def wait(self, mark: int) -> None:
        """Let them happen."""
        self.run(max(0, mark - self.done))


def _poison(memory: bytearray) -> None:
    memory[:] = bytes([POISON]) * len(memory)
