"""What batching asks of a data-parallel group: two reductions, passed in as functions of lists of integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightsync.reference.errors import BatchError

Reduce = Callable[[Sequence[int]], Sequence[int]]
"""Element by element over the ranks of a data-parallel group: equal lengths go in, the same comes back on all ranks.

Which reduction it is, the parameter says: ``max_reduce`` or ``sum_reduce``.
"""


def alone(values: Sequence[int]) -> list[int]:
    """Either reduction in a group of one rank."""
    return list(values)


def agreed_steps(steps: int, max_reduce: Reduce = alone) -> int:
    """The number of optimizer steps, which is the same on all data-parallel ranks.

    A rank with fewer of them would leave the loop while the others wait for it in a collective. A collective.

    Args:
        steps: this rank's.
        max_reduce: the maximum over the ranks.

    Raises:
        BatchError: the ranks differ; raised on all of them.
    """
    most, least = max_reduce([steps, -steps])
    if most != -least:
        raise BatchError(
            f"the ranks of a data-parallel group have {-least} to {most} optimizer steps; expected as many on each, so "
            "share the samples of a step out evenly"
        )
    return most
