"""Strategies for sections: ascending positions, bits before and after, and a form to write them in."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import ALL_FORMS, Form, Positions
from weightsync.reference.wire.sections import Encoded, encode_section
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded
from weightsync.testing.strategies import DTYPES

SECTION_DTYPES = (*DTYPES, torch.float8_e8m0fnu, torch.uint8, torch.int32, torch.float64)
"""Every item size, with and without a sign bit."""


class Changes(NamedTuple):
    """What a section is made of: int32 positions below ``limit``, and integer views of the bits there."""

    positions: Tensor
    new: Tensor
    old: Tensor
    limit: int
    dtype: torch.dtype


def encoded(changes: Changes, form: Form, zstd: Zstd) -> Encoded:
    """The section of ``changes`` in ``form``."""
    values = coded(form.values, changes.new, changes.old, changes.dtype)
    positions = None if form.positions is Positions.DENSE else changes.positions
    return encode_section(positions, values, form, zstd)


def made(positions: list[int], dtype: torch.dtype, seed: int, near: bool, extra: int = 0) -> Changes:
    """Changes at ``positions``: bits anywhere, or ``near`` the old ones."""
    generator = torch.Generator().manual_seed(seed)
    size = len(positions) * dtype.itemsize
    raw = torch.randint(0, 256, (2, size), generator=generator, dtype=torch.uint8)
    integer = int_view(torch.empty(0, dtype=dtype)).dtype
    old, new = raw[0].clone().view(integer), raw[1].clone().view(integer)
    if near:
        new = old + torch.randint(-2, 3, old.shape, generator=generator).to(integer)
    return Changes(torch.tensor(positions, dtype=torch.int32), new, old, positions[-1] + 1 + extra, dtype)


@st.composite
def changes(draw: st.DrawFn, dense: bool = False) -> Changes:
    """Changes of any dtype: gaps of every length that forms treat apart, bits of all kinds, not all of them changed."""
    dtype = draw(st.sampled_from(SECTION_DTYPES))
    gap = st.sampled_from([0, 0, 0, 1, 2, 7, 253, 254, 255, 256, 509, 510, 65534, 65535, 65536, 131071])
    short = st.integers(0, 12)
    if draw(st.booleans()):
        gaps = draw(st.lists(short, min_size=1, max_size=300))
    else:
        gaps = draw(st.lists(gap | short, min_size=1, max_size=40))
    positions, at = [], -1
    for one in [0] * len(gaps) if dense else gaps:
        at += one + 1
        positions.append(at)
    return made(
        positions,
        dtype,
        draw(st.integers(0, 1 << 30)),
        draw(st.booleans()),
        draw(st.sampled_from([0, 1, 9, 1 << 17])),
    )


sparse_forms = st.sampled_from([form for form in ALL_FORMS if form.positions is not Positions.DENSE])
"""Every form that names positions."""
