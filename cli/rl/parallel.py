"""Tensor parallelism: a group's collectives, and the autograd functions that Megatron's layers are made of.

Every sum gathers the parts and adds them in rank order, so that all ranks hold the same bits afterwards, and so does
every backend; a ring would add in an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.autograd import Function

from weightsync.backends.store import Store, prefixed

Map = Callable[[Tensor], Tensor]

HOST = "127.0.0.1"
"""Where ranks of a group reach each other; all of a run are on one host."""

WAIT = timedelta(minutes=5)
"""How long a collective waits for a peer; a peer whose process ended is noticed at once."""


class TensorParallel:
    """One rank's place in a tensor-parallel group.

    Args:
        rank: this rank, from 0.
        size: ranks in the group.
        group: a ``ProcessGroup`` of ``size`` ranks; None for a group of one.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None) -> None:
        self.rank = rank
        self.size = size
        self._group = group

    @classmethod
    def over_gloo(cls, store: Store, prefix: str, rank: int, size: int) -> TensorParallel:
        """A group of one host that meets under ``prefix`` on ``store``, which nobody used before.

        Blocks until all are there; raises RuntimeError when one does not come within ``WAIT``.
        """
        if size == 1:
            return cls()
        gloo: Any = distributed.ProcessGroupGloo  # its type stubs lack the options
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=HOST)]  # by address, so that no name is looked up
        options._timeout = WAIT
        return cls(rank, size, gloo(prefixed(store, [prefix]), rank, size, options))

    def all_gather(self, part: Tensor) -> list[Tensor]:
        """Every rank's ``part``, of one shape and dtype on all of them, in rank order; new storage."""
        part = part.detach().contiguous()
        if self.size == 1:
            return [part.clone()]
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self._group.allgather([parts], [part]).wait()
        return parts

    def sum(self, part: Tensor) -> Tensor:
        """The sum over ranks, in rank order: equal bits on all of them; new storage."""
        total, *others = self.all_gather(part)
        for other in others:
            total += other
        return total

    def max(self, part: Tensor) -> Tensor:
        """The element-wise maximum over ranks; new storage."""
        return torch.stack(self.all_gather(part)).amax(0)

    def gather_bytes(self, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor] | None:
        """At rank 0: per rank its tensors' bytes one after the other, (sizes[rank],) uint8; None elsewhere.

        ``sizes`` are the byte counts of every rank, known to all of them.
        """
        mine = torch.cat([tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors])
        if self.size == 1:
            return [mine]
        longest = max(sizes)
        padded = torch.nn.functional.pad(mine, (0, longest - len(mine)))
        outputs = [[torch.empty_like(padded) for _ in range(self.size)]] if self.rank == 0 else []
        options = distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather(outputs, [padded], options).wait()
        if self.rank != 0:
            return None
        return [part[:size] for part, size in zip(outputs[0], sizes, strict=True)]

    def close(self) -> None:
        """Leave the group: whoever waits for this rank in it fails at once. Of no use afterwards."""
        self._group = None

    # ---- differentiable -----------------------------------------------------------------------------------

    def enter(self, x: Tensor) -> Tensor:
        """``x``, the same on all ranks, on its way into partial work; its gradient is summed over ranks.

        Megatron's ``_CopyToModelParallelRegion``.
        """
        return x if self.size == 1 else _both_ways(x, _same, self.sum)

    def leave(self, part: Tensor) -> Tensor:
        """The sum over ranks of partial results; the gradient, the same on all ranks, goes back as it is.

        Megatron's ``_ReduceFromModelParallelRegion``.
        """
        return part if self.size == 1 else _both_ways(part, self.sum, _same)

    def all_rows(self, part: Tensor) -> Tensor:
        """Every rank's rows, equally many on each, in rank order; gradients are summed, and each gets its part."""
        first, end = self.rank * len(part), (self.rank + 1) * len(part)
        return _both_ways(
            part, lambda rows: torch.cat(self.all_gather(rows)), lambda grad: self.sum(grad)[first:end]
        )


class _BothWays(Function):
    """One map forward, another one for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def _both_ways(x: Tensor, there: Map, back: Map) -> Tensor:
    result: Tensor = _BothWays.apply(x, there, back)  # type: ignore[no-untyped-call]
    return result


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def shared_rows(weight: Tensor, first: int, rows: int, tp: TensorParallel) -> Tensor:
    """``weight``, rows ``first`` on of a parameter of ``rows`` rows, some of which other ranks hold as well.

    Its gradient is summed over whoever holds a row, so that replicas stay equal, bit for bit.
    """

    def over_holders(grad: Tensor) -> Tensor:
        whole = grad.new_zeros(rows, *grad.shape[1:])
        whole[first : first + len(grad)] = grad
        return tp.sum(whole)[first : first + len(grad)]

    return _both_ways(weight, _same, over_holders)
