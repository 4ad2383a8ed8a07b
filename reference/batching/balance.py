"""Karmarkar-Karp: parts of nearly equal weight, an exact number of them, none empty."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from weightsync.reference.errors import BatchError

Part = tuple[int, tuple[int, ...]]
"""Weight of a part, and the numbers of its items."""


@dataclass(order=True, slots=True)
class _State:
    """A partial solution: parts in falling order of weight. The widest spread comes first, then the heaviest part."""

    key: tuple[int, int, int]
    parts: list[Part] = field(compare=False)


def balanced(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> tuple[tuple[int, ...], ...]:
    """Item numbers in ``parts`` parts whose weights differ little; a pure function of its arguments.

    The differencing method of Karmarkar and Karp (1982) for several parts: the two partial solutions that differ most
    are laid together, the heaviest parts of one with the lightest of the other, until one solution is left.

    Args:
        weights: of each item, 0 or more: tokens, or operations.
        parts: how many.
        equal_size: each part has as many items as the others.

    Returns:
        The parts, each in rising order, ordered by their first items. No part is empty.

    Raises:
        BatchError: there are fewer items than parts, ``equal_size`` does not divide, or a weight is negative.

    >>> balanced([8, 7, 6, 5, 4], 2)
    ((0, 2), (1, 3, 4))
    """
    count = len(weights)
    if parts < 1 or count < parts:
        raise BatchError(f"{count} items are to make {parts} parts; expected 1 to {count} parts, none empty")
    if equal_size and count % parts:
        raise BatchError(
            f"{count} items cannot make {parts} parts of equal size; expected a multiple of {parts}"
        )
    if min(weights) < 0:
        raise BatchError(
            f"the weight of item {list(weights).index(min(weights))} is {min(weights)}; expected 0 or more"
        )
    if equal_size:
        rising = sorted(range(count), key=lambda item: (weights[item], item))
        rounds = [rising[first : first + parts] for first in range(0, count, parts)]
    else:
        rounds = [[item] for item in range(count)]
    states = [
        _state(number, [(weights[item], (item,)) for item in one] + [(0, ())] * (parts - len(one)))
        for number, one in enumerate(rounds)
    ]
    heapq.heapify(states)
    serial = len(states)
    while len(states) > 1:
        wide, other = heapq.heappop(states), heapq.heappop(states)
        pairs = zip(wide.parts, reversed(other.parts), strict=True)
        heapq.heappush(states, _state(serial, [(a + b, x + y) for (a, x), (b, y) in pairs]))
        serial += 1
    return tuple(sorted(tuple(sorted(items)) for _, items in states[0].parts))


def _state(serial: int, parts: list[Part]) -> _State:
    # Among parts of one weight, those with items come first. So the empty parts of a solution stand last, meet parts
    # with items, and are filled as soon as there are enough items: also where weights are 0.
    ordered = sorted(parts, key=lambda part: (-part[0], -len(part[1]), part[1]))
    return _State((ordered[-1][0] - ordered[0][0], -ordered[0][0], serial), ordered)
