"""Fault case 030: bytes from elsewhere run code, leave their folder, or take all memory."""

from __future__ import annotations

import ast
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
import zstandard

from weightsync.backends.disk import CheckpointReader, LocalStore, Publisher
from weightsync.backends.disk.checkpoint import read_state
from weightsync.backends.disk.field_reader import FieldReader
from weightsync.backends.disk.names import safe_name
from weightsync.backends.disk.shards import read_header
from weightsync.reference.errors import PatchMismatch, StaleVersion
from weightsync.testing.disk_states import bits_in, bits_of, metas, states

STATES = states(4)
DISK = Path(__import__("weightsync.backends.disk", fromlist=["x"]).__file__).parent
Damage = Callable[[Path], None]


class Bomb:
    """Its pickle makes a folder when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def reader(tmp_path: Path) -> CheckpointReader:
    """Holds version 1; version 2 is there."""
    store = LocalStore(tmp_path / "out")
    made = CheckpointReader(store, tmp_path / "checkpoint", "reader")
    with Publisher(store, metas(STATES[0])) as publisher:
        publisher.publish(STATES[0])
        made.pull()
        publisher.publish(STATES[1])
        publisher.publish(states(4)[3])
    return made


@pytest.mark.parametrize("name", ["weightsync.json", "delta-00001-of-00001.safetensors"])
@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_a_pickle_is_refused_before_any_call(
    name: str, form: str, reader: CheckpointReader, tmp_path: Path
) -> None:
    """Fault case 030: as manifest and as payload, bare and in a .pt file."""
    trap = tmp_path / "ran"
    path = tmp_path / "out" / "weight_v000003" / name
    if form == "pickle":
        path.write_bytes(pickle.dumps(Bomb(trap)))
    else:
        torch.save({"w": Bomb(trap)}, path)
    with pytest.raises((PatchMismatch, StaleVersion)):
        reader.prepare(3)
    assert not trap.exists()
    assert bits_in(reader.files) == bits_of(STATES[0])


def test_nothing_on_the_path_can_unpickle() -> None:
    """Fault case 030: no module of the transport names pickle, torch.load, numpy's loader, eval or exec."""
    found = []
    for path in DISK.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = (
                ast.unparse(node)
                if isinstance(node, ast.Import | ast.ImportFrom | ast.Attribute | ast.Name)
                else ""
            )
            if any(
                word in text for word in ("pickle", "torch.load", "np.load", "marshal", "shelve")
            ) or text in (
                "eval",
                "exec",
            ):
                found.append(f"{path.name}: {text}")
    assert found == []


@pytest.mark.parametrize(
    "name",
    ["", "..", "../x", "/etc/passwd", "a/../../x", "a//b", "./a", "a\0b", "a\nb", "C:x", "a\\b", "CON", "nul.txt",
     "COM1", "x" * 256, "é" * 200, None, 7, "a\u202eb"],
)  # fmt: skip
def test_a_name_that_leaves_its_folder_is_refused(name: object) -> None:
    with pytest.raises(PatchMismatch, match="file name"):
        safe_name(name)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "a\0b", ".hidden", "sub/file", "NUL"])
def test_an_index_cannot_name_a_file_outside_its_folder(
    name: str, reader: CheckpointReader, tmp_path: Path
) -> None:
    """Fault case 030, its kind, in our index and in the field's."""
    path = tmp_path / "out" / "weight_v000003" / "weightsync.json"
    index = json.loads(path.read_text())
    index["files"][0]["name"] = name
    path.write_text(json.dumps(index))
    with pytest.raises((PatchMismatch, StaleVersion)):
        reader.prepare(3)
    theirs = tmp_path / "theirs" / "weight_v000001"
    theirs.mkdir(parents=True)
    (theirs / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"b.bias": name}}))
    with pytest.raises(PatchMismatch, match="file name"):
        FieldReader(LocalStore(tmp_path / "theirs"), tmp_path / "copy").pull(1) if _copy(
            reader, tmp_path
        ) else None


def _copy(reader: CheckpointReader, tmp_path: Path) -> bool:
    (tmp_path / "copy").mkdir()
    name = "model-00001-of-00001.safetensors"
    (tmp_path / "copy" / name).write_bytes((tmp_path / "checkpoint" / name).read_bytes())
    return True


def link_shard(folder: Path) -> None:
    shard = folder / "delta-00001-of-00001.safetensors"
    shard.rename(folder.parent.parent / "elsewhere")
    shard.symlink_to(folder.parent.parent / "elsewhere")


def link_folder(folder: Path) -> None:
    folder.rename(folder.parent.parent / "elsewhere")
    folder.symlink_to(folder.parent.parent / "elsewhere")


def fifo(folder: Path) -> None:
    shard = folder / "delta-00001-of-00001.safetensors"
    shard.unlink()
    os.mkfifo(shard)


@pytest.mark.parametrize("damage", [link_shard, link_folder, fifo])
def test_no_link_and_no_special_file_is_followed(
    damage: Damage, reader: CheckpointReader, tmp_path: Path
) -> None:
    """Fault case 030, its kind; a FIFO would wait for ever."""
    damage(tmp_path / "out" / "weight_v000003")
    with pytest.raises((PatchMismatch, StaleVersion)):
        reader.prepare(3)
    assert bits_in(reader.files) == bits_of(STATES[0])


def test_a_checkpoint_that_is_a_link_is_not_written_through(tmp_path: Path, reader: CheckpointReader) -> None:
    """Fault case 030, its kind: a hub's cache links its files, and all its users would see the change."""
    name = "model-00001-of-00001.safetensors"
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / name).symlink_to(tmp_path / "checkpoint" / name)
    (tmp_path / "linked" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"b.bias": name}})
    )
    before = (tmp_path / "checkpoint" / name).read_bytes()
    with pytest.raises(PatchMismatch, match="link"):
        FieldReader(reader.store, tmp_path / "linked").pull(3)
    assert (tmp_path / "checkpoint" / name).read_bytes() == before


def test_a_header_cannot_ask_for_memory() -> None:
    """Fault case 030, its kind: lengths and shapes are held against the file before anything is allocated."""
    huge = (1 << 60).to_bytes(8, "little") + b"{}"
    with pytest.raises(PatchMismatch, match="header has 1152921504606846976 bytes"):
        read_header(lambda at, n: huge[at : at + n], len(huge), "huge")
    text = json.dumps({"w": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}).encode()
    lying = len(text).to_bytes(8, "little") + text
    with pytest.raises(PatchMismatch, match="bytes where its header needs"):
        read_header(lambda at, n: lying[at : at + n], len(lying), "lying")


def test_a_frame_cannot_ask_for_memory(tmp_path: Path, reader: CheckpointReader) -> None:
    """Fault case 030, its kind: a blob of a few bytes that would unpack to a gigabyte."""
    folder = tmp_path / "theirs" / "weight_v000001"
    folder.mkdir(parents=True)
    packer = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    blob = b"".join([*(packer.compress(bytes(1 << 20)) for _ in range(1 << 10)), packer.flush()])
    file = "model-00000-of-00001.safetensors"
    (folder / file).write_bytes(
        safetensors.numpy.save({"b.bias": np.frombuffer(blob, np.uint8)}, {"b.bias": "0"})
    )
    metadata = {"version": "000001", "base_version": "000000", "delta_encoding": "xor"}
    index = {"metadata": metadata, "weight_map": {"b.bias": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _copy(reader, tmp_path)
    with pytest.raises(PatchMismatch, match="says 1073741824 bytes, expected at most 28"):
        FieldReader(LocalStore(tmp_path / "theirs"), tmp_path / "copy").pull(1)
    held = read_state(FieldReader(LocalStore(tmp_path / "theirs"), tmp_path / "copy").files)
    assert held is not None
    assert held.version == 0
