"""``weightsync publish``, ``pull``, ``inspect`` and ``verify``, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from typer.testing import CliRunner

from weightsync.backends.disk import LocalFiles
from weightsync.cli.main import app
from weightsync.testing.disk_states import bits_in, bits_of, states

STATES = states(4)


def call(*arguments: object, code: int = 0) -> str:
    found = CliRunner().invoke(app, [str(one) for one in arguments])
    assert found.exit_code == code, found.output
    return found.output


def asked(*arguments: object) -> Any:
    return json.loads(call(*arguments, "--json"))


def test_a_checkpoint_travels_through_a_folder(tmp_path: Path) -> None:
    source, out, copy = tmp_path / "source", tmp_path / "out", tmp_path / "copy"
    source.mkdir()
    (source / "config.json").write_text("{}")
    for number, state in enumerate((STATES[0], STATES[1], STATES[3]), 1):
        save_file(dict(state), source / "model.safetensors")
        told = asked("publish", source, "--into", out)
        assert (told["version"], told["kind"]) == (number, "full" if number == 1 else "delta")
        assert asked("pull", out, "--into", copy) == {
            "version": number,
            "chain": [number] if number > 1 else [],
        }
        assert bits_in(LocalFiles(copy)) == bits_of(state)
    assert (copy / "config.json").read_text() == "{}"
    found = asked("inspect", out, "--keep", 1)
    assert [one["version"] for one in found["versions"]] == [1, 2, 3]
    assert found["versions"][2]["chain"] == [1, 2, 3]
    assert found["removable"] == []
    assert "newest" in call("inspect", out)
    assert all(row["fault"] is None for row in asked("verify", out))
    assert "yes" in call("verify", copy)
    shard = out / "weight_v000002" / "delta-00001-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    assert "another checksum" in call("verify", out, "--json", code=1)


def test_a_base_that_no_delta_would_start_from_is_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    save_file(dict(STATES[0]), source / "model.safetensors")
    said = call("publish", source, "--into", out, "--base", source, code=1)
    assert "holds no version" in said
    call("publish", source, "--into", out)
    said = call("publish", source, "--into", out, "--base", source, "--full", code=1)
    assert "leave one out" in said
    assert [one["version"] for one in asked("inspect", out)["versions"]] == [1]


def test_what_cannot_be_done_is_one_sentence(tmp_path: Path) -> None:
    call("publish", tmp_path / "none", "--into", tmp_path / "out", code=1)
    call("pull", tmp_path / "out", "--into", tmp_path / "copy", code=1)
    call("verify", tmp_path / "none" / "none", code=1)
    assert not (tmp_path / "none").exists()
