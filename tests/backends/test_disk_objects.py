"""The same publisher and readers over fsspec, in memory; tests/real has an S3 server."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

from weightsync.backends.disk.objects import ObjectStore, open_store
from weightsync.backends.disk.store import LocalStore
from weightsync.testing import disk_objects


@pytest.fixture
def store() -> ObjectStore:
    fsspec.filesystem("memory").store.clear()
    return ObjectStore("memory://run", part_bytes=1 << 20)


def test_publish_pull_clean_and_resume(store: ObjectStore, tmp_path: Path) -> None:
    disk_objects.publish_pull_clean_and_resume(store, tmp_path)


def test_large_and_abandoned_objects(store: ObjectStore) -> None:
    disk_objects.a_large_object_goes_in_parts_and_an_abandoned_one_never_appears(store)


def test_a_path_is_a_local_folder(tmp_path: Path) -> None:
    assert isinstance(open_store(str(tmp_path)), LocalStore)
    assert isinstance(open_store(f"file://{tmp_path}"), LocalStore)
    assert isinstance(open_store("memory://x"), ObjectStore)
