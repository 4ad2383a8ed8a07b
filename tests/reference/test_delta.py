"""Bitwise diffs, patches that are refused before they write, and writes that can be undone."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.delta import (
    Cells,
    SparsePatch,
    UndoLog,
    apply,
    check_patch,
    check_positions,
    diff,
)
from weightsync.reference.detect import WIDE, changed, changed_plain
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.testing.strategies import DTYPES, Update, tensors, updates

ALL_DTYPES = (*DTYPES, torch.float64, torch.int64, torch.bool, torch.complex64)


@given(update=updates())
def test_changed_finds_exactly_the_flipped_positions(update: Update) -> None:
    assert changed(update.new, update.old).tolist() == list(update.positions)
    assert changed_plain(update.new, update.old).tolist() == list(update.positions)


@given(shape=st.lists(st.integers(0, 5), max_size=3).map(tuple), data=st.data())
def test_changed_equals_plain_comparison_on_any_bits_and_strides(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    new = data.draw(tensors(dtype=dtype, shape=shape, strided=True))
    old = data.draw(tensors(dtype=dtype, shape=shape, strided=True))
    found = changed(new, old)
    assert found.dtype == torch.int64
    assert torch.equal(found, changed_plain(new, old))


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_every_single_position_is_found_in_every_word_and_tail(dtype: torch.dtype, offset: int) -> None:
    for size in range(20):
        old = torch.zeros(size + offset, dtype=dtype)[offset:]
        for position in range(size):
            new = torch.zeros(size + offset, dtype=dtype)[offset:]
            int_view(new)[position] = 1
            assert changed(new, old).tolist() == [position]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_blocks_of_words_meet_without_gap_or_overlap(dtype: torch.dtype) -> None:
    block = (1 << 16) * 8 // dtype.itemsize
    old = torch.zeros(2 * block + 3, dtype=dtype)
    at = torch.tensor([0, 1, block - 1, block, 2 * block - 1, 2 * block, 2 * block + 2])
    new = old.clone()
    int_view(new)[at] = 1
    assert torch.equal(changed(new, old), at)
    assert torch.equal(changed(new, new.clone()), torch.empty(0, dtype=torch.int64))
    assert torch.equal(changed(~int_view(new), int_view(new)), torch.arange(new.numel()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
def test_every_lane_of_a_lonely_word_is_found(dtype: torch.dtype) -> None:
    """Where few words differ they are looked into one by one."""
    lanes = 8 // dtype.itemsize
    old = torch.zeros(1000 * lanes + 3, dtype=dtype)
    for lane in range(lanes):
        at = torch.tensor([lane, 500 * lanes + lane, 999 * lanes + lane])
        new = old.clone()
        int_view(new)[at] = 1
        assert torch.equal(changed(new, old), at)


def test_a_nan_equals_itself_and_the_sign_of_zero_is_a_change() -> None:
    old = torch.tensor([float("nan"), 0.0, 1.0])
    new = torch.tensor([float("nan"), -0.0, 1.0])
    assert changed(new, old).tolist() == [1]


@given(update=updates(), strided=st.booleans())
def test_applying_the_diff_gives_the_new_bits_and_undoing_the_old(update: Update, strided: bool) -> None:
    meta = ParamMeta.of("w", update.old)
    patch = diff(meta, update.new, update.old)
    assert patch.nnz == len(update.positions)
    assert (patch.positions.dtype, patch.values.dtype) == (torch.int32, meta.dtype)
    target = update.old.clone()
    if strided and target.ndim:
        room = torch.empty((*target.shape[:-1], 2 * target.shape[-1]), dtype=target.dtype)
        target = room[..., ::2]
        target.view(int_view(update.old).dtype).copy_(int_view(update.old).view(target.shape))
    log = UndoLog()
    assert apply(patch, target, log) == patch.nnz
    assert same_bits(target, update.new)
    log.undo()
    assert same_bits(target, update.old)
    log.undo()
    assert same_bits(target, update.old)


def test_untouched_elements_keep_their_exact_bits() -> None:
    target = torch.full((8,), 0x7FA1, dtype=torch.int16).view(torch.bfloat16)
    meta = ParamMeta.of("w", target)
    values = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    apply(SparsePatch(meta, torch.tensor([2, 5], dtype=torch.int32), values), target)
    assert int_view(target).tolist() == [0x7FA1, 0x7FA1, 0x3F80, 0x7FA1, 0x7FA1, 0x4000, 0x7FA1, 0x7FA1]


def test_diff_refuses_tensors_that_were_not_cast_before_it() -> None:
    meta = ParamMeta("w", torch.bfloat16, (3,))
    old = torch.zeros(3)
    with pytest.raises(PatchMismatch, match=r"'w'.*torch.float32.*expected torch.bfloat16"):
        diff(meta, old, old)
    with pytest.raises(PatchMismatch, match="expected one dtype and shape"):
        changed(old, torch.zeros(4))


def patch_of(
    positions: list[int], values: int, *, numel: int = 4, dtype: torch.dtype = torch.float32
) -> SparsePatch:
    meta = ParamMeta("layer.w", torch.float32, (numel,))
    return SparsePatch(meta, torch.tensor(positions, dtype=torch.int32), torch.ones(values, dtype=dtype))


@pytest.mark.parametrize(
    ("patch", "said"),
    [
        (patch_of([1, 4], 2), "names position 4, expected 0 to 3"),
        (patch_of([1, -1], 2), "names position -1, expected 0 to 3"),
        (patch_of([1, 1], 2), "names position 1 after position 1, expected strictly ascending"),
        (patch_of([2, 1], 2), "names position 1 after position 2, expected strictly ascending"),
        (patch_of([0, 1], 3), r"positions \[2\] and values \[3\]"),
        (patch_of([0, 1], 2, dtype=torch.float64), "carries torch.float64 values, expected torch.float32"),
        (patch_of([0, 1], 2, numel=5), r"is for 'layer.w' torch.float32 \[5\], expected"),
    ],
    ids=["beyond", "negative", "twice", "unsorted", "lengths", "dtype", "shape"],
)
def test_a_bad_patch_is_refused_before_the_first_write(patch: SparsePatch, said: str) -> None:
    target = torch.zeros(4)
    log = UndoLog()
    with pytest.raises(PatchMismatch, match=said) as caught:
        apply(patch, target, log)
    assert "layer.w" in str(caught.value)
    assert not target.any()
    assert log.entries == []


def test_positions_of_another_dtype_or_rank_are_refused() -> None:
    meta = ParamMeta("w", torch.float32, (4,))
    with pytest.raises(PatchMismatch, match=r"carries torch\.int16 positions"):
        check_patch(SparsePatch(meta, torch.tensor([1], dtype=torch.int16), torch.ones(1)), meta)
    with pytest.raises(PatchMismatch, match="expected two flat tensors"):
        check_patch(SparsePatch(meta, torch.ones(1, 1, dtype=torch.int32), torch.ones(1, 1)), meta)


def test_positions_beyond_int32_are_held_as_int64() -> None:
    """On metadata alone: nothing of this size is allocated."""
    meta = ParamMeta("huge", torch.int8, (1 << 16, 1 << 16))
    assert meta.numel > WIDE
    values = torch.ones(2, dtype=torch.int8)
    check_patch(SparsePatch(meta, torch.tensor([WIDE - 1, WIDE + 5]), values), meta)
    with pytest.raises(PatchMismatch, match=f"names position {meta.numel}"):
        check_patch(SparsePatch(meta, torch.tensor([WIDE, meta.numel]), values), meta)


@given(
    positions=st.lists(st.integers(-3, 12), max_size=5),
    base=st.integers(0, 4),
    after=st.integers(-1, 9),
)
def test_positions_pass_exactly_when_they_continue_within_bounds(
    positions: list[int], base: int, after: int
) -> None:
    whole = [after, *(base + position for position in positions)]
    ascending = all(left < right for left, right in pairwise(whole))
    fits = not positions or (ascending and min(positions) >= 0 and whole[-1] < 10)
    found = torch.tensor(positions, dtype=torch.int32)
    if fits:
        check_positions("w", 10, found, base=base, after=after)
    else:
        with pytest.raises(PatchMismatch, match=re.escape("'w'")):
            check_positions("w", 10, found, base=base, after=after)


@pytest.mark.parametrize(
    ("positions", "base", "after"), [([-1, 2], 3, -1), ([7], 3, -1), ([0], 3, 3), ([2, 2], 0, -1)], ids=str
)
def test_positions_are_held_to_their_base(positions: list[int], base: int, after: int) -> None:
    """Before the base, beyond the end, at the last position already named, twice."""
    with pytest.raises(PatchMismatch, match="patch for 'w' names position"):
        check_positions("w", 10, torch.tensor(positions, dtype=torch.int32), base=base, after=after)


@st.composite
def overwrites(draw: st.DrawFn) -> tuple[Tensor, list[tuple[list[int], int]]]:
    """A target and writes to it, (positions, bits), which may hit one element again and again."""
    target = draw(tensors(dtype=torch.int16, shape=(6,)))
    writes = draw(
        st.lists(
            st.tuples(
                st.lists(st.integers(0, 5), unique=True, min_size=1), st.integers(-(1 << 15), (1 << 15) - 1)
            ),
            max_size=5,
        )
    )
    return target, writes


@given(drawn=overwrites(), abandoned=st.booleans())
def test_undo_restores_the_first_bits_also_after_it_was_abandoned(
    drawn: tuple[Tensor, list[tuple[list[int], int]]], abandoned: bool
) -> None:
    target, writes = drawn
    before = target.clone()
    cells, log = Cells.of(target), UndoLog()
    for positions, bits in writes:
        at = torch.tensor(positions)
        log.record(cells, at)
        cells.write(at, torch.full((len(positions),), bits, dtype=torch.int16))
    if abandoned:
        step = log.steps()
        next(step)
        step.close()
    log.undo()
    assert same_bits(target, before)


def test_a_cleared_log_undoes_nothing() -> None:
    target = torch.zeros(3, dtype=torch.int32)
    cells, log = Cells.of(target), UndoLog()
    log.record(cells, torch.tensor([1]))
    cells.write(torch.tensor([1]), torch.tensor([7], dtype=torch.int32))
    assert log.nbytes == 8 + 4
    log.clear()
    assert log.undo() == 0
    assert target.tolist() == [0, 7, 0]


@given(tensor=tensors(dtype=torch.bfloat16, shape=(4, 6), strided=True), width=st.sampled_from([1, 2, 3, 6]))
def test_cells_read_and_write_rows_of_any_strides(tensor: Tensor, width: int) -> None:
    rows = int_view(tensor.clone()).view(-1, width)
    index = torch.arange(rows.shape[0])[::2]
    cells = Cells.of(tensor, width)
    expected = rows[index]
    assert torch.equal(cells.read(index).view(-1, width), expected)
    values = expected.flip(0).contiguous()
    cells.write(index, values.reshape(-1) if width == 1 else values)
    rows[index] = values
    assert torch.equal(int_view(tensor).view(-1, width), rows)
