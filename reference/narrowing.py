"""As much of a merged gather group as a holding takes, in the coordinates of its slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weightsync.reference.holdings import Cut, Holding
from weightsync.reference.joining import Contents, Joined
from weightsync.reference.pieces import Piece

FEW_RUNS = 16
"""Up to so many runs are taken one after the other, as views where there is only one."""


def narrow(joined: Joined, holding: Holding, pieces: Sequence[Piece]) -> Joined:
    """What ``holding`` takes of ``joined``, which is in checkpoint coordinates; ``pieces`` are its windows by piece of
    the plan. Memory may be shared.
    """
    windows, contents = [], []
    for number, piece, one in zip(joined.group.pieces, joined.pieces, joined.contents, strict=True):
        cut, window = holding.cuts[piece.tensor], pieces[number]
        windows.append(window)
        if cut is None:
            contents.append(one)
        elif one.positions is None:
            contents.append(_dense(one, cut, piece))
        else:
            contents.append(sparse(one, cut, piece, window))
    return Joined(holding.tensors, joined.group, tuple(windows), tuple(contents))


def sparse(one: Contents, cut: Cut, piece: Piece, window: Piece) -> Contents:
    """The held ones of changed elements of ``piece``, relative to the base of ``window``, its image in the slice.

    Positions ascend, so that each run of held elements is found by two searches; only where there are more runs than
    elements it is asked of each element.
    """
    positions = one.positions
    if positions is None or window.count == 0 or positions.numel() == 0:
        return _taken(one, torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32))
    starts, lengths, firsts = cut.within(piece.base, piece.count)
    if starts.numel() > positions.numel():
        return plainly(one, cut, piece, window)
    last = starts + lengths - 1 - piece.base
    # The last position of a piece fits int32, the one behind it may not.
    low = torch.searchsorted(positions, (starts - piece.base).clamp_(min=0).to(torch.int32))
    high = torch.searchsorted(positions, last.clamp_(max=piece.count - 1).to(torch.int32), right=True)
    shifts = firsts - window.base - (starts - piece.base)
    if starts.numel() <= FEW_RUNS:
        return _run_by_run(one, positions, low.tolist(), high.tolist(), shifts.tolist())
    sizes = high - low
    ends = sizes.cumsum(0)
    index = torch.arange(int(ends[-1])) + torch.repeat_interleave(low - (ends - sizes), sizes)
    moved = positions[index] + torch.repeat_interleave(shifts.to(torch.int32), sizes)
    return _taken(one, index, moved)


def plainly(one: Contents, cut: Cut, piece: Piece, window: Piece) -> Contents:
    """The same, asked of each element."""
    if one.positions is None:
        return _dense(one, cut, piece)
    held, flat = cut.place(one.positions.to(torch.int64) + piece.base)
    return _taken(one, held.nonzero().reshape(-1), (flat - window.base).to(torch.int32))


def _run_by_run(
    one: Contents, positions: Tensor, lows: list[int], highs: list[int], shifts: list[int]
) -> Contents:
    """Each run is a view; the shift of a run is the same for all its elements."""
    windows = [slice(low, high) for low, high in zip(lows, highs, strict=True)]
    moved = [positions[at] + shift for at, shift in zip(windows, shifts, strict=True)]
    return Contents(_cat(moved), _cat([one.bits[at] for at in windows]))


def _dense(one: Contents, cut: Cut, piece: Piece) -> Contents:
    """Of a piece that travels whole, the held elements."""
    width = cut.full_width
    if piece.base % width or piece.count % width:
        held, _ = cut.place(torch.arange(piece.base, piece.base + piece.count))
        return Contents(None, one.bits[held])
    first, last = piece.base // width, (piece.base + piece.count) // width
    low, high = torch.searchsorted(cut.rows, torch.tensor([first, last])).tolist()
    rows, columns = cut.rows[low:high] - first, slice(cut.column, cut.column + cut.width)
    lines = one.bits.view(-1, width)
    if rows.numel() and int(rows[-1]) - int(rows[0]) + 1 == rows.numel():
        return Contents(None, lines[int(rows[0]) : int(rows[-1]) + 1, columns].reshape(-1))
    return Contents(None, lines[:, columns].index_select(0, rows).reshape(-1))


def _taken(one: Contents, index: Tensor, positions: Tensor) -> Contents:
    return Contents(positions, one.bits[index])


def _cat(several: list[Tensor]) -> Tensor:
    return several[0] if len(several) == 1 else torch.cat(several)
