"""A few pinned buffers that many tensors pass through on their way to host workers; a buffer always comes back."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor

from weightsync.reference.devices import CopyEvent, Device, HostMemory
from weightsync.reference.errors import DeadlineExceeded, PlanMismatch
from weightsync.reference.params import carry

T = TypeVar("T")


class PinnedPool:
    """Equal host buffers, lent one at a time; any thread may lend.

    Args:
        count: how many buffers; at least 1.
        nbytes: bytes of each.
        memory: where they come from.
    """

    def __init__(self, count: int, nbytes: int, memory: HostMemory) -> None:
        if count < 1 or nbytes < 0:
            raise PlanMismatch(
                f"a pool of {count} buffers of {nbytes} bytes, expected one buffer or more of no negative size"
            )
        self.count = count
        self.nbytes = nbytes
        self._free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(count):
            self._free.put(memory.allocate(nbytes)[0])

    @property
    def free(self) -> int:
        """Buffers that nobody has."""
        return self._free.qsize()

    def take(self, timeout_s: float) -> Tensor:
        """A buffer, uint8 (nbytes,), to be given back. DeadlineExceeded when none comes back in time."""
        try:
            return self._free.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(
                f"the wait of {timeout_s} s for one of {self.count} pinned buffers"
            ) from None

    def give_back(self, buffer: Tensor) -> None:
        """Return a buffer that ``take`` gave; once."""
        self._free.put(buffer)

    @contextmanager
    def lend(self, timeout_s: float) -> Iterator[Tensor]:
        """A buffer for the length of the block, which is given back however the block ends."""
        buffer = self.take(timeout_s)
        try:
            yield buffer
        finally:
            self.give_back(buffer)


def on_host(
    pool: PinnedPool,
    device: Device,
    tensors: Mapping[str, Tensor],
    work: Callable[[str, Tensor], T],
    *,
    timeout_s: float,
) -> dict[str, T]:
    """What ``work`` makes of each tensor's host copy, by name; copies and workers overlap, a buffer per worker.

    A worker reads its copy only once the copy's event is over, and gives its buffer back also when it fails. The
    tensors may be written once this returns or raises: no copy is under way then.

    Args:
        pool: the buffers; as many workers run.
        device: where the tensors are.
        tensors: what to copy; each fits a buffer.
        work: called on a worker's thread; its tensor carries attributes, and is a buffer's, so it keeps no view.
        timeout_s: how long to wait for a buffer.

    Raises:
        Exception: what the first worker or copy to fail, in the order of the tensors, raised.
        PlanMismatch: a tensor does not fit a buffer. Nothing was copied.
        DeadlineExceeded: no buffer came back in time.
    """
    for name, tensor in tensors.items():
        if tensor.nbytes > pool.nbytes:
            raise PlanMismatch(
                f"parameter {name!r} has {tensor.nbytes} bytes, the pool's buffers {pool.nbytes}, expected it to "
                "fit; make larger buffers"
            )

    def finish(name: str, copy: Tensor, event: CopyEvent, buffer: Tensor) -> T:
        try:
            event.wait()
            return work(name, copy)
        finally:
            pool.give_back(buffer)

    running: dict[str, Future[T]] = {}
    with ThreadPoolExecutor(pool.count) as workers:
        for name, tensor in tensors.items():
            if any(one.done() and one.exception() is not None for one in running.values()):
                break
            buffer = pool.take(timeout_s)
            try:
                copy = carry(tensor, buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape))
                event = device.copy(tensor, copy)
            except BaseException:
                pool.give_back(buffer)
                raise
            running[name] = workers.submit(finish, name, copy, event, buffer)
    return {name: one.result() for name, one in running.items()}
