"""Which versions to read, in which order, to get from what a reader holds to what it wants. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping

from weightsync.backends.disk.index import Index
from weightsync.reference.errors import StaleVersion
from weightsync.reference.protocol import FULL


def cheapest_chain(
    indexes: Mapping[int, Index], target: int, version: int = 0, digest: int | None = None
) -> tuple[Index, ...]:
    """The chain of fewest bytes that leads to ``target``; empty when the reader is there.

    A full version with its delta beside it is in the chain as the one of both that is read.

    Args:
        indexes: what is there, by version.
        target: the version wanted.
        version: the version that the reader holds; 0 for none.
        digest: of the state it holds. A delta on ``version`` that starts from another state is no way on.

    Raises:
        StaleVersion: no chain leads there.
    """
    if version == target and (target not in indexes or digest in (None, indexes[target].after)):
        return ()
    best: dict[int, tuple[int, tuple[Index, ...]]] = {}
    for number in sorted(number for number in indexes if number <= target):
        ways: list[tuple[int, tuple[Index, ...]]] = []
        for index in indexes[number].ways():
            if index.kind == FULL or (index.base == version and digest in (None, index.before)):
                ways.append((index.nbytes, (index,)))
            elif index.base in best and indexes[index.base].after == index.before:
                nbytes, chain = best[index.base]
                ways.append((nbytes + index.nbytes, (*chain, index)))
        if ways:
            best[number] = min(ways, key=lambda way: (way[0], len(way[1])))
    if target not in best:
        there = f"{min(indexes)} to {max(indexes)}" if indexes else "none"
        raise StaleVersion(
            f"no chain leads from version {version} to {target}; versions there are {there}; publish a full version"
        )
    return best[target][1]


def fresh_chain(indexes: Mapping[int, Index], target: int) -> tuple[Index, ...] | None:
    """What a reader that holds nothing reads for ``target``; None when it cannot get there."""
    try:
        return cheapest_chain(indexes, target)
    except StaleVersion:
        return None
