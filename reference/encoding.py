"""The fixed wire forms of one range's positions and values: their size follows from the count. Little endian.

A section is what one range puts in a bucket: for DENSE the values alone, for INT32 the positions, relative to
the range's base, and then the values in the same order. ``wire.sections`` writes the smaller forms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import Positions as Encoding

__all__ = [
    "ALIGNMENT", "POSITION_BYTES", "Encoding", "as_bytes", "element_bytes", "from_bytes", "padded",
    "read_section", "write_section",
]  # fmt: skip

ALIGNMENT = 8
"""Sections start at multiples of this many bytes."""

POSITION_BYTES = 4


def padded(nbytes: int) -> int:
    """``nbytes`` rounded up to the alignment of sections."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def element_bytes(encoding: Encoding, itemsize: int) -> int:
    """Bytes that one element of a range adds to its section; at most, when it is in no fixed form."""
    return itemsize + (0 if encoding is Encoding.DENSE else POSITION_BYTES)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor`` in row-major order, uint8 (nbytes,); shares memory with a contiguous tensor."""
    return int_view(tensor).view(torch.uint8)


def from_bytes(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """``raw`` (uint8) as a flat tensor of ``dtype``; shares its memory unless it is misaligned for it."""
    aligned = raw.storage_offset() % dtype.itemsize == 0 and raw.is_contiguous()
    return (raw if aligned else raw.clone(memory_format=torch.contiguous_format)).view(dtype)


def write_section(out: Tensor, positions: Tensor | None, bits: Tensor) -> None:
    """Fill ``out`` (uint8, exactly the section without padding) with positions, unless dense, and values.

    Args:
        out: where the section goes; a view of the bucket's payload.
        positions: int32 (n,) relative to the range's base; None for DENSE.
        bits: integer view (n,) of the values.
    """
    split = 0
    if positions is not None:
        split = positions.numel() * POSITION_BYTES
        out[:split] = as_bytes(positions)
    out[split:] = as_bytes(bits)


def read_section(
    section: Tensor, encoding: Encoding, count: int, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor]:
    """Positions (int32 (count,), None for DENSE) and the values' integer view (count,), in ``section``'s
    memory.

    ``section`` is uint8 of exactly ``count`` elements' bytes; the caller has checked that. ``dtype`` is the
    tensor's own dtype.
    """
    if encoding is Encoding.DENSE:
        return None, int_view(from_bytes(section, dtype))
    split = count * POSITION_BYTES
    return from_bytes(section[:split], torch.int32), int_view(from_bytes(section[split:], dtype))
