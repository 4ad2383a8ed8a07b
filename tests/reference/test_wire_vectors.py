"""The published sections: ours reads and writes them, and so does a reader that was written from the page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import ALL_FORMS, Form, Packing, Positions
from weightsync.reference.wire.sections import decode_section, encode_section
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded, resolve
from weightsync.testing import plainwire

VECTORS: list[dict[str, Any]] = json.loads((Path(__file__).parents[1] / "vectors" / "wire.json").read_text())


def label(one: dict[str, Any]) -> str:
    return f"{one['form']}-{one['dtype']}-{len(one['positions'])}"


def test_there_is_one_of_every_form() -> None:
    assert {one["form"] for one in VECTORS} == {form.name for form in ALL_FORMS}


@pytest.mark.parametrize("one", VECTORS, ids=label)
def test_ours_reads_and_writes_a_published_section(one: dict[str, Any]) -> None:
    dtype = getattr(torch, one["dtype"])
    form, old, new = Form.of(*one["numbers"], "w"), bits(one["old"], dtype), bits(one["new"], dtype)
    section = torch.frombuffer(bytearray.fromhex(one["section"]), dtype=torch.uint8)
    limit = one["positions"][-1] + 1
    found = decode_section(section, form, new.numel(), limit, dtype, "w", Zstd())
    positions = (
        None if form.positions is Positions.DENSE else torch.tensor(one["positions"], dtype=torch.int32)
    )
    assert (found.positions is None) if positions is None else torch.equal(found.positions, positions)
    assert torch.equal(resolve(form.values, found.values, old, dtype), new)
    written = encode_section(positions, coded(form.values, new, old, dtype), form, Zstd())
    assert written.form == form
    if form.packing is not Packing.ZSTD:
        assert torch.equal(written.section, section)


@pytest.mark.parametrize("one", VECTORS, ids=label)
def test_the_plain_reader_reads_a_published_section(one: dict[str, Any]) -> None:
    width = getattr(torch, one["dtype"]).itemsize
    at, values = plainwire.read_section(
        bytes.fromhex(one["section"]), *one["numbers"], len(one["new"]), width
    )
    assert at == one["positions"]
    old = [int(value, 16) for value in one["old"]]
    signed = one["dtype"].startswith(("float", "bfloat"))
    new = [
        plainwire.new_bits(one["numbers"][1], value, before, 8 * width, signed)
        for value, before in zip(values, old, strict=True)
    ]
    assert [f"{value:x}" for value in new] == one["new"]


def bits(values: list[str], dtype: torch.dtype) -> torch.Tensor:
    raw = b"".join(int(value, 16).to_bytes(dtype.itemsize, "little") for value in values)
    return int_view(torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype))
