"""Sections: what is written comes back bit for bit, in one way only, and anything else is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.errors import PatchMismatch
from weightsync.reference.wire.forms import ALL_FORMS, DENSE_FORM, Form, Packing, Positions, Values
from weightsync.reference.wire.positions import decode_window
from weightsync.reference.wire.sections import Section, decode_section, encode_section, fixed_bytes
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import resolve
from weightsync.testing import plainwire
from weightsync.testing.wire_sections import Changes, changes, encoded, made, sparse_forms

ZSTD = Zstd()
SMALL = made([0, 3, 4, 9, 12, 13, 14, 40, 41, 300, 301, 302, 303, 304, 305, 306], torch.bfloat16, 5, True, 3)


def decoded(section: torch.Tensor, form: Form, one: Changes, count: int | None = None) -> Section:
    count = one.new.numel() if count is None else count
    return decode_section(section, form, count, one.limit, one.dtype, "w", ZSTD)


@given(changes(), sparse_forms)
def test_what_is_written_comes_back(one: Changes, form: Form) -> None:
    found = encoded(one, form, ZSTD)
    assert found.form in (form, form.fixed)
    assert found.section.numel() <= fixed_bytes(form, one.new.numel(), one.new.itemsize)
    section = decoded(found.section, found.form, one)
    assert section.positions is not None
    assert section.positions.dtype == torch.int32
    assert torch.equal(section.positions, one.positions)
    assert torch.equal(resolve(form.values, section.values, one.old, one.dtype), one.new)
    assert torch.equal(encoded(one, form, Zstd()).section, found.section)


@given(changes(dense=True), st.sampled_from(list(Packing)))
def test_a_dense_section_comes_back(one: Changes, packing: Packing) -> None:
    form = DENSE_FORM if packing is Packing.FIXED else Form(Positions.DENSE, Values.RAW, Packing.ZSTD)
    found = encode_section(None, one.new, form, ZSTD)
    section = decoded(found.section, found.form, one)
    assert section.positions is None
    assert torch.equal(section.values, one.new)


@given(changes(), sparse_forms)
def test_a_reader_that_shares_no_code_agrees(one: Changes, form: Form) -> None:
    found = encoded(one, form, ZSTD)
    width = one.new.itemsize
    at, values = plainwire.read_section(bytes(found.section.tolist()), *found.form, one.new.numel(), width)
    assert at == one.positions.tolist()
    old = unsigned(one.old)
    with_sign = one.dtype.is_floating_point and one.dtype is not torch.float8_e8m0fnu
    new = [
        plainwire.new_bits(form.values, value, before, 8 * width, with_sign)
        for value, before in zip(values, old, strict=True)
    ]
    assert new == unsigned(one.new)


def unsigned(bits: torch.Tensor) -> list[int]:
    return [int(value) & ((1 << 8 * bits.itemsize) - 1) for value in bits.tolist()]


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.name)
def test_every_form_is_really_written(form: Form) -> None:
    positions = list(range(0, 4000, 2)) if form.positions is not Positions.DENSE else list(range(2000))
    one = made(positions, torch.bfloat16, 3, True)
    if form.positions is Positions.DENSE:
        one = one._replace(new=torch.zeros_like(one.new))
    assert encoded(one, form, ZSTD).form == form


@pytest.mark.parametrize("form", ALL_FORMS, ids=lambda form: form.name)
def test_damage_is_refused_or_is_another_sound_section(form: Form) -> None:
    """Whatever comes out has the announced count, ascends and stays in bounds; without zstd it has no other coding."""
    one = SMALL if form.positions is not Positions.DENSE else made(list(range(40)), torch.bfloat16, 1, True)
    found = encoded(one, form, ZSTD)
    whole = found.section
    variants = [whole[:size] for size in range(whole.numel())] + [
        torch.cat([whole, whole[:extra]]) for extra in (1, 8)
    ]
    for at in range(whole.numel()):
        for flipped in (1, 0x80, 0xFF):
            variants.append(whole.clone())
            variants[-1][at] ^= flipped
    for variant in variants:
        section = sound_or_refused(variant, found.form, one, one.new.numel())
        if section is None:
            continue
        if found.form.packing is not Packing.ZSTD:
            again = encode_section(section.positions, section.values, found.form, ZSTD)
            assert torch.equal(again.section, variant)


def sound_or_refused(raw: torch.Tensor, form: Form, one: Changes, count: int) -> Section | None:
    """What the section says, once that is sound; None when it was refused by the tensor's name."""
    try:
        section = decoded(raw, form, one, count)
    except PatchMismatch as error:
        if "'w'" not in str(error):
            raise AssertionError("the tensor is not named") from error
        return None
    assert section.values.numel() == count
    if section.positions is not None:
        assert section.positions.numel() == count
        assert int(section.positions[0]) >= 0
        assert int(section.positions[-1]) < one.limit
        assert bool((section.positions[1:] > section.positions[:-1]).all())
    return section


@given(st.binary(max_size=400), st.sampled_from(ALL_FORMS), st.integers(1, 40), st.integers(1, 600))
def test_any_bytes_are_refused_or_sound(raw: bytes, form: Form, count: int, limit: int) -> None:
    one = SMALL._replace(limit=limit)
    section = (
        torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    )
    sound_or_refused(section, form, one, count)


@given(changes(), sparse_forms, st.integers(-3, 3))
def test_a_wrong_count_or_bound_is_refused(one: Changes, form: Form, wrong: int) -> None:
    found = encoded(one, form, ZSTD)
    if wrong:
        with pytest.raises(PatchMismatch, match="'w'"):
            decoded(found.section, found.form, one, max(one.new.numel() + wrong, 0))
    with pytest.raises(PatchMismatch, match="'w'"):
        decoded(found.section, found.form, one._replace(limit=int(one.positions[-1])))


def frame_section(frame: bytes, plain: int) -> torch.Tensor:
    """A GAP8 RAW section of bytes whose positions are ``frame``, announced as ``plain`` bytes."""
    table = np.array([[len(frame), plain], [64, 64]], "<u4").reshape(-1).view(np.uint8)
    return torch.from_numpy(np.concatenate([table, np.frombuffer(frame, np.uint8), np.zeros(64, np.uint8)]))


@pytest.mark.parametrize(
    ("frame", "plain", "told"),
    [
        (zstandard.compress(bytes(1 << 13)), 1 << 13, "announces 8192 bytes of GAP8, expected 1 to 256"),
        (zstandard.compress(bytes(1 << 13)), 64, "frame of 8192 bytes, expected 64"),
        (zstandard.compress(bytes(64))[:-1], 64, "no sound zstd frame"),
        (zstandard.compress(bytes(64)) + b"\0", 64, "no sound zstd frame"),
        (zstandard.compress(bytes(32)) + zstandard.compress(bytes(32)), 64, "frame of 32 bytes, expected 64"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(64)), 64, "zstd frame of"),
        (b"garbage that is no frame", 64, "no sound zstd frame"),
    ],
    ids=["bomb", "lying bomb", "cut", "longer", "two frames", "no size", "garbage"],
)
def test_a_frame_that_is_not_what_it_says_is_refused(frame: bytes, plain: int, told: str) -> None:
    form = Form(Positions.GAP8, Values.RAW, Packing.ZSTD)
    with pytest.raises(PatchMismatch, match=told):
        decode_section(frame_section(frame, plain), form, 64, 1 << 20, torch.uint8, "w", ZSTD)


@given(changes(), st.sampled_from(list(Values)), st.integers(0, 1 << 20), st.integers(0, 1 << 18))
def test_a_window_is_what_lies_in_it(one: Changes, values: Values, first: int, size: int) -> None:
    found = encoded(one, Form(Positions.BLOCK, values, Packing.STREAMS), ZSTD)
    if found.form.positions is not Positions.BLOCK:
        return
    last = first + size
    positions, before = decode_window(
        found.section, found.form, one.new.numel(), one.limit, "w", first=first, last=last
    )
    inside = (one.positions >= first) & (one.positions < last)
    assert torch.equal(positions, one.positions[inside])
    assert before == int((one.positions < first).sum()) or not positions.numel()


def test_a_window_reads_its_own_blocks_only() -> None:
    one = made(list(range(0, 1 << 20, 100)), torch.bfloat16, 0, True)
    form = Form(Positions.BLOCK, Values.RAW, Packing.STREAMS)
    found = encoded(one, form, ZSTD)
    count = one.new.numel()
    first, last = 3 << 16, 5 << 16
    whole, before = decode_window(found.section, form, count, one.limit, "w", first=first, last=last)
    damaged = found.section.clone()
    index = 2 * 8 + 8 * (1 + 16)
    inside = slice(index + before, index + before + whole.numel())
    kept = damaged[inside].clone()
    damaged[index:] = 255
    damaged[inside] = kept
    again = decode_window(damaged, form, count, one.limit, "w", first=first, last=last)
    assert torch.equal(again[0], whole)
    assert again[1] == before
    with pytest.raises(PatchMismatch, match="'w'"):
        decode_window(damaged, form, count, one.limit, "w", first=first, last=last + 1)
    with pytest.raises(ValueError, match="has no windows"):
        decode_window(found.section, form.fixed, count, one.limit, "w", first=first, last=last)
