"""Fault case 029: a reader sees the marker before the data, or data that is cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightsync.backends.disk import CheckpointReader, LocalFiles, LocalStore, Publisher, listing
from weightsync.backends.disk.checkpoint import read_state
from weightsync.reference.errors import PatchMismatch, StaleVersion
from weightsync.testing.disk_states import bits_in, bits_of, metas, states

STATES = [states(4)[number] for number in (0, 1, 3)]


@pytest.fixture
def setup(tmp_path: Path) -> tuple[LocalStore, CheckpointReader]:
    """Two versions published, the first of them pulled."""
    store = LocalStore(tmp_path / "out")
    reader = CheckpointReader(store, tmp_path / "checkpoint", "reader")
    with Publisher(store, metas(STATES[0])) as publisher:
        publisher.publish(STATES[0])
        reader.pull()
        publisher.publish(STATES[1])
        publisher.publish(STATES[2])
    return store, reader


def assert_untouched(reader: CheckpointReader) -> None:
    held = read_state(reader.files)
    assert held is not None
    assert held.version == 1
    assert bits_in(reader.files) == bits_of(STATES[0])


@pytest.mark.parametrize("name", ["weightsync.json", "delta-00001-of-00001.safetensors"])
def test_a_file_cut_at_any_byte_leaves_weights_and_version_untouched(
    name: str, setup: tuple[LocalStore, CheckpointReader], tmp_path: Path
) -> None:
    """Fault case 029: cut to every length, longer by a byte, and gone."""
    _, reader = setup
    path = tmp_path / "out" / "weight_v000003" / name
    whole = path.read_bytes()
    for length in range(len(whole) - (name == "weightsync.json")):  # the index ends with a line break
        path.write_bytes(whole[:length])
        with pytest.raises((PatchMismatch, StaleVersion)):
            reader.prepare(3)
        assert_untouched(reader)
    path.unlink()
    with pytest.raises((FileNotFoundError, StaleVersion)):
        reader.prepare(3)
    assert_untouched(reader)
    path.write_bytes(whole)
    reader.pull(3)
    assert bits_in(reader.files) == bits_of(STATES[2])


def test_a_flipped_bit_anywhere_in_a_shard_is_refused(
    setup: tuple[LocalStore, CheckpointReader], tmp_path: Path
) -> None:
    """Fault case 029, its kind: bytes that are there but not the right ones."""
    _, reader = setup
    path = tmp_path / "out" / "weight_v000003" / "delta-00001-of-00001.safetensors"
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(PatchMismatch):
            reader.prepare(3)
    assert_untouched(reader)


def test_a_marker_before_its_data_is_no_version_for_any_writer(tmp_path: Path) -> None:
    """Fault case 029: an index over a folder whose shard is written in three parts."""
    store = LocalStore(tmp_path / "out")
    with Publisher(store, metas(STATES[0])) as publisher:
        publisher.publish(STATES[0])
    folder = tmp_path / "out" / "weight_v000001"
    shard = folder / "model-00001-of-00001.safetensors"
    whole = shard.read_bytes()
    for part in (0, len(whole) // 3, 2 * len(whole) // 3):
        shard.write_bytes(whole[:part])
        reader = CheckpointReader(store, tmp_path / f"checkpoint{part}", "reader")
        with pytest.raises(PatchMismatch, match="cut short"):
            reader.pull()
        assert read_state(LocalFiles(tmp_path / f"checkpoint{part}")) is None
        shard.write_bytes(whole)
        reader.pull()
        assert bits_in(reader.files) == bits_of(STATES[0])
    assert list(listing(store).indexes) == [1]
