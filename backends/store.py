"""Hosting and reaching the store through which ranks find each other. Its address is passed in, never guessed."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

from torch import distributed

PATIENCE = timedelta(days=1)
"""How long one blocking read may last; readers try again afterwards."""

BACKLOG = 1024

_dist: Any = distributed  # its type stubs lack clones and queues

StoreTimeout: type[Exception] = _dist.DistStoreError
"""What a blocking read raises when nothing came for very long."""


class Store(Protocol):
    """What is used of a ``torch.distributed`` store. ``TCPStore`` and, within one process, ``HashStore`` have it."""

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return it."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if the key has the expected one, or none where that is empty; what stands there then."""

    def check(self, keys: list[str]) -> bool:
        """True when every key has a value."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that have one."""

    def queue_push(self, key: str, value: bytes) -> None:
        """Append to a queue."""

    def queue_pop(self, key: str) -> bytes:
        """Take the oldest entry of a queue; waits for one."""

    def clone(self) -> Any:
        """Another connection to the same store."""


def host_store(hostname: str = "127.0.0.1", port: int = 0) -> Any:
    """A ``TCPStore`` served by this process while the returned object lives; ``.port`` is the one it bound.

    Host it in the launcher, never in a rank that may be killed. It listens on IPv4 where ``hostname`` has such an
    address: the store looks up the name of every client that connects, and serves nobody meanwhile; for an IPv4
    client of an IPv6 socket that look-up goes to the name server, and may last for seconds.

    Args:
        hostname: address of this host that every rank can reach.
        port: 0 takes a free one.
    """
    found = socket.getaddrinfo(hostname, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    bound = listener.getsockname()[1]
    return _dist.TCPStore(
        hostname, bound, None, True, PATIENCE, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def connect_store(hostname: str, port: int, timeout_s: float = 60.0) -> Any:
    """A client of the ``TCPStore`` at this address.

    Blocks until it serves; raises ``torch.distributed.DistError`` after ``timeout_s``.
    """
    limit = timedelta(seconds=timeout_s)
    store = _dist.TCPStore(hostname, port, None, False, limit, wait_for_workers=False)
    store.set_timeout(PATIENCE)
    return store


def local_store() -> Any:
    """A store for ranks that are threads of one process; connections to it cost nothing."""
    return _dist.HashStore()


def client_of(store: Store) -> Any:
    """A connection of its own to the same store: a read that blocks on one connection blocks all its users."""
    client = store.clone()
    if isinstance(client, _dist.TCPStore):  # the clone of a HashStore is that HashStore
        client.set_timeout(PATIENCE)
    return client


def prefixed(store: Store, parts: Sequence[str]) -> Any:
    """The same store and connection, with every key behind a prefix."""
    return _dist.PrefixStore("/".join(parts), store)


def push(client: Store, queue: str, message: bytes) -> None:
    """Append to a queue of the store and wake its reader."""
    client.queue_push(queue, message)
    if isinstance(client, _dist.HashStore):
        # Its push wakes one reader, perhaps of another queue; a set wakes them all.
        client.set(f"{queue}/wake", "")
