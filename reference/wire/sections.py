"""Sections: what one range puts in a bucket, written in a form and read back, everything checked."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weightsync.reference.encoding import element_bytes, from_bytes, write_section
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import Form, Packing, Positions
from weightsync.reference.wire.positions import (
    position_stream_count,
    position_streams,
    read_positions,
    require_ascending,
)
from weightsync.reference.wire.streams import StreamReader, Zstd, write_streams
from weightsync.reference.wire.values import read_values, stream_count, value_streams


class Encoded(NamedTuple):
    """A section and the form that it is in.

    Attributes:
        form: the form asked for, or its ``fixed`` one where that takes no more bytes.
        section: uint8 (nbytes,), without padding.
    """

    form: Form
    section: Tensor


class Section(NamedTuple):
    """What a section says.

    Attributes:
        positions: int32 (count,) relative to the range's base, strictly ascending; None when dense.
        values: integer view (count,), in the form's value form: ``resolve`` makes them bits.
    """

    positions: Tensor | None
    values: Tensor


def fixed_bytes(form: Form, count: int, itemsize: int) -> int:
    """Bytes of ``form.fixed``; no section of ``count`` elements in ``form`` has more."""
    return count * element_bytes(form.positions, itemsize)


def encode_section(positions: Tensor | None, values: Tensor, form: Form, zstd: Zstd) -> Encoded:
    """The section of one range in ``form``, or in its fixed form where that takes no more bytes. Sender.

    Equal input and an equal form give equal bytes (with one release of zstd, in ZSTD packing).

    Args:
        positions: int32 (n,) ascending, relative to the range's base; None for a dense form.
        values: integer view (n,) in the form's value form; see ``coded``.
        form: what to write.
        zstd: contexts to use.

    Returns:
        New memory; the input may be overwritten once this returns.
    """
    count, itemsize = values.numel(), values.itemsize
    most = fixed_bytes(form, count, itemsize)
    if form.packing is not Packing.FIXED and count:
        split = form.packing is Packing.ZSTD
        first = [] if positions is None else position_streams(form.positions, positions.cpu().numpy(), split)
        if first is not None:
            streams = first + value_streams(form.values, values.cpu().numpy(), split)
            stored = write_streams(streams, zstd if split else None)
            if stored is not None and sum(stream.size for stream in stored) < most:
                return Encoded(form, torch.from_numpy(np.concatenate(stored)))
    section = torch.empty(most, dtype=torch.uint8)
    write_section(section, positions, values)
    return Encoded(form.fixed, section)


def decode_section(
    section: Tensor, form: Form, count: int, limit: int, dtype: torch.dtype, name: str, zstd: Zstd
) -> Section:
    """What a section in ``form`` says; nothing but its own result is allocated, bounded by ``count``. Receiver.

    Args:
        section: uint8, without padding; may be anything.
        form: from the range table.
        count: elements that the table announces.
        limit: one more than the largest position allowed, relative to the range's base.
        dtype: the tensor's own dtype.
        name: the tensor, for errors.
        zstd: contexts to use.

    Returns:
        In the section's memory where the form allows.

    Raises:
        PatchMismatch: the section is not exactly what a sender may write; names the tensor.
    """
    if not 1 <= count <= limit:
        raise PatchMismatch(
            f"section of {name!r} announces {count} elements, expected 1 to {limit}; compare the shapes"
        )
    most = fixed_bytes(form, count, dtype.itemsize)
    exact = form.packing is Packing.FIXED
    if section.numel() != most if exact else section.numel() >= most:
        raise PatchMismatch(
            f"section of {name!r} has {section.numel()} bytes for {count} elements of {dtype} as {form.name}, "
            f"expected {'' if exact else 'fewer than '}{most}; send the update again"
        )
    if exact:
        return _read_fixed(section, form, count, limit, dtype, name)
    split = form.packing is Packing.ZSTD
    own = position_stream_count(form.positions, split)
    raw = section.numpy()
    total = own + stream_count(form.values, dtype.itemsize, split)
    reader = StreamReader(raw, total, zstd if split else None, name)
    positions = None
    if form.positions is not Positions.DENSE:
        positions = torch.from_numpy(read_positions(reader, form.positions, count, limit, split))
    values = read_values(reader, form.values, count, dtype.itemsize, split)
    return Section(positions, from_bytes(torch.from_numpy(values.view(np.uint8)), _integer(dtype)))


def _read_fixed(
    section: Tensor, form: Form, count: int, limit: int, dtype: torch.dtype, name: str
) -> Section:
    if form.positions is Positions.DENSE:
        return Section(None, from_bytes(section, _integer(dtype)))
    split = section.numel() - count * dtype.itemsize
    positions = from_bytes(section[:split], torch.int32)

    def refusal(found: str, expected: str) -> PatchMismatch:
        return PatchMismatch(f"section of {name!r} {found}, expected {expected}; send the update again")

    require_ascending(positions.numpy(), limit, refusal)
    return Section(positions, from_bytes(section[split:], _integer(dtype)))


def _integer(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the integer view."""
    return int_view(torch.empty(0, dtype=dtype)).dtype
