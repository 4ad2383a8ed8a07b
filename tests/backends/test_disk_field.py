"""The field's layouts, written by us and read by an independent reader, and theirs read by us."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import xxhash
import zstandard
from safetensors.torch import save_file

from weightsync.backends.disk.field import FieldPublisher, hasher
from weightsync.backends.disk.field_reader import FieldReader
from weightsync.backends.disk.files import LocalFiles
from weightsync.backends.disk.store import LocalStore
from weightsync.reference.errors import PatchMismatch, StaleVersion, UnsupportedCapability
from weightsync.testing import field_reader
from weightsync.testing.disk_states import bits_in, bits_of, states

STATES = states(4)
SUMS = ["xxh3-128", "adler32", *(["blake3"] if find_spec("blake3") else [])]


@pytest.mark.parametrize("checksum", SUMS)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_ours_is_read_by_an_independent_reader_and_by_us(
    encoding: str, checksum: str, tmp_path: Path
) -> None:
    publisher = FieldPublisher(LocalStore(tmp_path / "out"), STATES[0], encoding, checksum)
    save_file(dict(STATES[0]), tmp_path / "model.safetensors")
    theirs = bits_of(STATES[0])
    for number, state in enumerate(STATES[1:], 1):
        assert publisher.publish(state) == number
        field_reader.pull(tmp_path / "out", theirs, number - 1, number)
        assert theirs == bits_of(state)
    reader = FieldReader(LocalStore(tmp_path / "out"), tmp_path)
    assert reader.pull(1).chain == (1,)
    assert bits_in(LocalFiles(tmp_path)) == bits_of(STATES[1])
    assert reader.pull().chain == (2, 3)
    assert bits_in(LocalFiles(tmp_path)) == bits_of(STATES[3])
    state, digest = reader.verify()
    assert state is not None
    assert (state.version, state.digest) == (3, digest)
    with pytest.raises(StaleVersion, match="older"):
        reader.pull(2)


def write_theirs(folder: Path, encoding: str) -> None:
    """One version as slime writes it, with safetensors' own writer; a stale shard lies beside it."""
    folder.mkdir(parents=True)
    blobs, sums = {}, {}
    for name, new in bits_of(STATES[1]).items():
        fresh, old = np.frombuffer(new, np.uint8), np.frombuffer(bits_of(STATES[0])[name], np.uint8)
        mask = fresh != old
        if mask.any():
            at = np.flatnonzero(mask).astype("<u4")
            count = np.array([at.size], "<u4").view(np.uint8)
            body = (
                fresh ^ old if encoding == "xor" else np.concatenate([count, at.view(np.uint8), fresh[mask]])
            )
            packed = zstandard.ZstdCompressor(level=1).compress(body.tobytes())
            blobs[name], sums[name] = np.frombuffer(packed, np.uint8), xxhash.xxh3_128_hexdigest(new)
    file = "model-00000-of-00001.safetensors"
    (folder / file).write_bytes(safetensors.numpy.save(blobs, metadata=sums))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"stale")
    metadata = {
        "version": "000001", "base_version": "000000", "delta_encoding": encoding, "compression_format": "zstd",
        "checksum_format": "xxh3-128",
    }  # fmt: skip
    index = {"metadata": metadata, "weight_map": dict.fromkeys(blobs, file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_theirs_is_read_by_us_and_a_flipped_bit_changes_nothing(encoding: str, tmp_path: Path) -> None:
    folder = tmp_path / "out" / "weight_v000001"
    write_theirs(folder, encoding)
    save_file(dict(STATES[0]), tmp_path / "model.safetensors")
    shard = folder / "model-00000-of-00001.safetensors"
    whole = shard.read_bytes()
    reader = FieldReader(LocalStore(tmp_path / "out"), tmp_path)
    for place in range(0, len(whole), 3):
        shard.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        try:
            reader.pull()
        except (PatchMismatch, FileNotFoundError):
            assert bits_in(LocalFiles(tmp_path)) == bits_of(STATES[0])
        else:  # a bit that carries nothing, such as one of a frame's flags
            assert bits_in(LocalFiles(tmp_path)) == bits_of(STATES[1])
            return
    shard.write_bytes(whole)
    reader.pull()
    assert bits_in(LocalFiles(tmp_path)) == bits_of(STATES[1])


def test_a_checksum_that_is_not_there_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "blake3", None)
    with pytest.raises(UnsupportedCapability, match="'blake3' needs the package blake3"):
        hasher("blake3")
    with pytest.raises(UnsupportedCapability, match="'md5' is unknown"):
        hasher("md5")
