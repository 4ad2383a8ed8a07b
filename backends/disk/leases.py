"""Readers' leases: small files that say what a reader holds and still needs, until when."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from weightsync.backends.disk.names import KEPT, plain_name
from weightsync.backends.disk.store import Store
from weightsync.reference.errors import PatchMismatch

FOLDER = f"{KEPT}/leases"
_LARGEST = 1 << 20

Clock = Callable[[], int]
"""Nanoseconds since the epoch, the same on all hosts up to less than a lease's length."""


@dataclass(frozen=True, slots=True)
class Lease:
    """What one reader says.

    Attributes:
        reader: its name, a plain file name.
        version: the version it holds; deltas after it stay.
        chain: versions that it reads now; None while it still chooses, when every version stays.
        ends_ns: when it ends, unless renewed.
    """

    reader: str
    version: int
    chain: tuple[int, ...] | None
    ends_ns: int

    def put(self, store: Store) -> None:
        """Say it to the cleaner."""
        body = {"version": self.version, "chain": self.chain, "ends_ns": self.ends_ns}
        store.put(f"{FOLDER}/{plain_name(self.reader)}.json", [json.dumps(body).encode()])

    @staticmethod
    def drop(store: Store, reader: str) -> None:
        """The reader needs nothing any more."""
        store.remove(f"{FOLDER}/{plain_name(reader)}.json")


def leases(store: Store) -> list[Lease]:
    """Every lease, ended or not. One that cannot be read counts as one that needs everything, for ever."""
    found = []
    for name in store.list(FOLDER):
        if not name.endswith(".json"):
            continue
        reader = name.removesuffix(".json")
        try:
            body = json.loads(store.read_whole(f"{FOLDER}/{name}", _LARGEST))
            chain = body["chain"]
            found.append(
                Lease(
                    reader,
                    int(body["version"]),
                    None if chain is None else tuple(map(int, chain)),
                    int(body["ends_ns"]),
                )
            )
        except FileNotFoundError:
            continue  # dropped meanwhile
        except (ValueError, TypeError, KeyError, RecursionError, PatchMismatch):
            found.append(Lease(reader, 0, None, 1 << 62))
    return found
