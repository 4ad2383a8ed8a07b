"""What every object store must do for the disk transport."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from weightsync.backends.disk import (
    CheckpointReader,
    FolderLocked,
    LocalFiles,
    Publisher,
    PublisherSettings,
    listing,
)
from weightsync.backends.disk.objects import ObjectStore
from weightsync.reference.errors import PatchMismatch
from weightsync.testing.disk_states import bits_in, bits_of, metas, states


def publish_pull_clean_and_resume(store: ObjectStore, tmp_path: Path) -> None:
    """Eight versions, a reader, a cleaner, a second publisher, and one that a killed publisher began."""
    reader = CheckpointReader(store, tmp_path, "reader")
    settings = PublisherSettings(anchor_every=3, keep=1)
    with Publisher(store, metas(states(8)[0]), settings) as publisher:
        for state in states(8)[:6]:
            publisher.publish(state)
            reader.pull()
            assert bits_in(LocalFiles(tmp_path)) == bits_of(state)
        with pytest.raises(FolderLocked), Publisher(store, metas(states(8)[0])):
            pass
        assert publisher.clean() == (1, 2, 3, 4)
    store.put("weight_v000007/weightsync.claim", [b""])
    with Publisher(store, metas(states(8)[0]), settings) as publisher:
        publisher.adopt(states(8)[5])
        assert publisher.publish(states(8)[7]).version == 8
    assert list(listing(store).indexes) == [5, 6, 8]
    assert reader.pull().chain == (8,)
    assert bits_in(LocalFiles(tmp_path)) == bits_of(states(8)[7])


def a_large_object_goes_in_parts_and_an_abandoned_one_never_appears(store: ObjectStore) -> None:
    """Two chunks of 12 MiB together, then one that ends in an error."""
    raw = os.urandom(12 << 20)
    assert store.put("big", [raw[: 7 << 20], raw[7 << 20 :]]) == len(raw)
    assert store.size("big") == len(raw)
    assert store.read("big", 6 << 20, 1 << 20) == raw[6 << 20 : 7 << 20]

    def broken() -> Iterator[bytes]:
        yield raw
        raise OSError("the disk of the sender failed")

    with pytest.raises(OSError, match="sender failed"):
        store.put("never", broken())
    assert store.list("") == ["big"]
    with pytest.raises(PatchMismatch):
        store.read_whole("big", 10)
    with pytest.raises(FileExistsError):
        store.put("big", [b""], exclusive=True)
