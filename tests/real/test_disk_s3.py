"""The disk transport on an S3 server: moto's, through s3fs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from moto.server import ThreadedMotoServer

from weightsync.backends.disk.objects import ObjectStore
from weightsync.testing import disk_objects

pytestmark = pytest.mark.filterwarnings("ignore")  # moto's and botocore's own


@pytest.fixture
def store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    running = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    running.start()
    host, port = running.get_host_and_port()
    options: dict[str, Any] = {"endpoint_url": f"http://{host}:{port}"}
    fsspec.filesystem("s3", **options).makedirs("weights", exist_ok=True)
    yield ObjectStore(f"s3://weights/{request.node.name}", options, part_bytes=5 << 20)
    running.stop()


def test_publish_pull_clean_and_resume(store: ObjectStore, tmp_path: Path) -> None:
    disk_objects.publish_pull_clean_and_resume(store, tmp_path)


def test_large_and_abandoned_objects(store: ObjectStore) -> None:
    disk_objects.a_large_object_goes_in_parts_and_an_abandoned_one_never_appears(store)
