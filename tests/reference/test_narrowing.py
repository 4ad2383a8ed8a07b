"""Narrowing by searches equals asking every element, bit for bit, whatever the cut, the piece and the changes."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.holdings import Cut
from weightsync.reference.joining import Contents
from weightsync.reference.narrowing import _dense, plainly, sparse
from weightsync.reference.pieces import Piece


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, int]:
    """A cut, and the rows of the tensor: whole rows or columns of some, few runs or many."""
    full_width = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 80))
    column = draw(st.integers(0, full_width - 1))
    width = draw(st.integers(1, full_width - column))
    if draw(st.booleans()):
        column, width = 0, full_width
    held = draw(
        st.sets(st.integers(0, rows - 1)) | st.just(set(range(0, rows, 2))) | st.just(set(range(rows)))
    )
    return Cut(torch.tensor(sorted(held), dtype=torch.int64), full_width, column, width), rows


def image(cut: Cut, piece: Piece) -> Piece:
    base, end = cut.before(piece.base), cut.before(piece.base + piece.count)
    return Piece(piece.tensor, base, end - base)


def places(cut: Cut) -> list[int]:
    """Flat checkpoint position of each element of the slice."""
    return [
        row * cut.full_width + column
        for row in cut.rows.tolist()
        for column in range(cut.column, cut.column + cut.width)
    ]


@given(drawn=cuts(), data=st.data())
def test_narrowing_by_searches_is_narrowing_element_by_element(
    drawn: tuple[Cut, int], data: st.DataObject
) -> None:
    cut, rows = drawn
    numel, held = rows * cut.full_width, places(cut)
    base = data.draw(st.integers(0, numel - 1))
    piece = Piece(0, base, data.draw(st.integers(1, numel - base)))
    window = image(cut, piece)
    mine = [place for place in held if piece.base <= place < piece.base + piece.count]
    assert window == Piece(0, held.index(mine[0]) if mine else window.base, len(mine))
    chosen = sorted(data.draw(st.sets(st.integers(0, piece.count - 1))))
    bits = torch.arange(len(chosen), dtype=torch.int16)
    one = Contents(torch.tensor(chosen, dtype=torch.int32), bits)
    fast, plain = sparse(one, cut, piece, window), plainly(one, cut, piece, window)
    expected = [held.index(at + base) - window.base for at in chosen if at + base in set(mine)]
    values = [number for number, at in enumerate(chosen) if at + base in set(mine)]
    for found in (fast, plain):
        assert found.positions is not None
        assert found.positions.dtype == torch.int32
        assert found.positions.tolist() == expected
        assert found.bits.dtype == torch.int16
        assert found.bits.tolist() == values


@given(drawn=cuts(), data=st.data())
def test_a_dense_piece_gives_its_held_elements_in_order(drawn: tuple[Cut, int], data: st.DataObject) -> None:
    cut, rows = drawn
    numel = rows * cut.full_width
    base = data.draw(st.integers(0, numel - 1))
    piece = Piece(0, base, data.draw(st.integers(1, numel - base)))
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, rows - 1))
        count = data.draw(st.integers(1, rows - first))
        piece = Piece(0, first * cut.full_width, count * cut.full_width)
    whole: Tensor = torch.arange(piece.base, piece.base + piece.count, dtype=torch.int32)
    found = _dense(Contents(None, whole), cut, piece)
    mine = [place for place in places(cut) if piece.base <= place < piece.base + piece.count]
    assert found.positions is None
    assert found.bits.tolist() == mine


def test_the_last_position_that_fits_int32_is_kept() -> None:
    rows = torch.tensor([0, (1 << 30) - 1])
    cut = Cut(rows, 2, 0, 2)
    piece = Piece(0, 0, 1 << 31)
    positions = torch.tensor([1, 2, (1 << 31) - 1], dtype=torch.int32)
    one = Contents(positions, torch.tensor([5, 6, 7], dtype=torch.int16))
    for found in (sparse(one, cut, piece, image(cut, piece)), plainly(one, cut, piece, image(cut, piece))):
        assert found.positions is not None
        assert found.positions.tolist() == [1, 3]
        assert found.bits.tolist() == [5, 7]
