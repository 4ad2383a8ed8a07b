"""Which versions nobody may need any more, and taking them away in an order that no reader falls into.

A version is hidden first, its index under another name. Only then are the leases read again: a reader that saw the
index wrote its lease before, so it is seen now, and its version is shown again. What nobody leased goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from weightsync.backends.disk.index import (
    LARGEST_INDEX,
    Index,
    folders,
    highest_tried,
    listing,
    remember_highest,
)
from weightsync.backends.disk.leases import Lease, leases
from weightsync.backends.disk.names import CLAIM, INDEX, version_folder
from weightsync.backends.disk.store import Store
from weightsync.reference.protocol import FULL

HIDDEN = "weightsync.hidden"


@dataclass(frozen=True, slots=True)
class Cleaning:
    """What a cleaner did, or would do.

    Attributes:
        removable: versions that nobody needs.
        kept: versions that stay, and why.
        ended: readers whose leases ended.
    """

    removable: tuple[int, ...]
    kept: Mapping[int, str]
    ended: tuple[str, ...]


def plan_cleaning(indexes: Mapping[int, Index], held: Iterable[Lease], now_ns: int, keep: int) -> Cleaning:
    """What may go: all but the newest ``keep`` versions, their chains from a full version on, and leased ones.

    Args:
        indexes: the versions that are there.
        held: every lease.
        now_ns: the clock.
        keep: newest versions that a reader without any must be able to reach, at least 1.
    """
    held = list(held)
    kept: dict[int, str] = {}
    numbers = sorted(indexes)
    newest = numbers[-max(1, keep) :]
    for version in newest:
        kept.setdefault(version, "one of the newest")
    oldest = newest[0] if newest else 0
    for number in reversed([one for one in numbers if one <= oldest]):
        kept.setdefault(number, "in the chain of one of the newest")
        if indexes[number].kind == FULL:
            break  # from this full version on, every version is reachable
    for lease in held:
        if lease.ends_ns <= now_ns:
            continue
        for number in numbers:
            if lease.chain is None or number in lease.chain or number > lease.version:
                kept.setdefault(number, f"leased by {lease.reader}")
    removable = tuple(number for number in numbers if number not in kept)
    return Cleaning(removable, kept, tuple(one.reader for one in held if one.ends_ns <= now_ns))


def clean(store: Store, now_ns: int, keep: int) -> Cleaning:
    """Take away what nobody may need; the caller holds the publisher's lock. May be killed anywhere and repeated."""
    there = listing(store).indexes
    plan = plan_cleaning(there, leases(store), now_ns, keep)
    for version in plan.removable:
        _hide(store, version)
    everything = {**there, **hidden(store)}
    again = plan_cleaning(everything, leases(store), now_ns, keep)
    highest = highest_tried(store)
    remember_highest(store, highest)
    for version in sorted(hidden(store)):
        if version not in again.removable:
            show(store, version)
    for version in again.removable:
        if version in there or version in everything:
            if INDEX in store.list(version_folder(version)):
                continue  # not hidden before the leases were read; the next cleaner's
            discard(store, version)
    for reader in again.ended:
        Lease.drop(store, reader)
    return again


def hidden(store: Store) -> dict[int, Index]:
    """Versions that a cleaner hid and neither showed again nor took away."""
    found = {}
    for version in folders(store):
        names = store.list(version_folder(version))
        if HIDDEN in names and INDEX not in names:
            raw = store.read_whole(f"{version_folder(version)}/{HIDDEN}", LARGEST_INDEX)
            found[version] = Index.load(raw, version)
    return found


def show(store: Store, version: int) -> None:
    """A hidden version is there again."""
    folder = version_folder(version)
    store.put(f"{folder}/{INDEX}", [store.read_whole(f"{folder}/{HIDDEN}", LARGEST_INDEX)])
    store.remove(f"{folder}/{HIDDEN}")


def discard(store: Store, version: int) -> None:
    """Everything in a version's folder goes, its index first and what says that it is ours last."""
    folder = version_folder(version)
    names = [name for name in store.list(folder) if not name.endswith("/")]
    order = [INDEX, HIDDEN]
    for name in (*order, *(name for name in names if name not in (*order, CLAIM)), CLAIM):
        if name in names:
            store.remove(f"{folder}/{name}")
    store.remove_folder(folder)


def _hide(store: Store, version: int) -> None:
    folder = version_folder(version)
    store.put(f"{folder}/{HIDDEN}", [store.read_whole(f"{folder}/{INDEX}", LARGEST_INDEX)])
    store.remove(f"{folder}/{INDEX}")
