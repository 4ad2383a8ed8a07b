"""Value forms: what is left of new bits once the old ones are taken out, and how that is cut in streams.

A STEP is a difference, modulo 2^w for items of w bits, of two ranks in the dtype's order of representable values. The
rank of a sign-and-magnitude item (floats) with the sign bit set is its bits with all others inverted, read as a
two's-complement integer; of any other item it is its bits. So -0.0 lies one step below 0.0, and NaN and infinities
lie beyond the finite values in the order of their bits. Nothing is rounded: bits to ranks is one to one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weightsync.reference.wire.forms import Values
from weightsync.reference.wire.streams import Bytes, Integers, StreamReader, planes, unplane

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def signed_magnitude(dtype: torch.dtype) -> bool:
    """True for dtypes whose top bit is a sign and whose others are a magnitude.

    float8_e8m0fnu has no sign; a complex item is two numbers, and steps in its 64 bits mean nothing.
    """
    return dtype.is_floating_point and dtype is not getattr(torch, "float8_e8m0fnu", None)


def coded(form: Values, new: Tensor, old: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``new`` in a value form, an integer tensor of the same shape and item size; new memory unless RAW.

    Args:
        form: RAW, XOR or STEP.
        new: integer view (n,) of the new values.
        old: integer view (n,) of the values of the base version; not needed for RAW.
        dtype: the tensor's own dtype.

    Raises:
        ValueError: XOR or STEP without old bits.
    """
    if form is Values.RAW:
        return new
    if old is None:
        raise ValueError(f"{form.name} needs the bits of the base version, found none; send RAW values")
    if form is Values.XOR:
        return new ^ old
    if not signed_magnitude(dtype):
        return new - old
    steps = _ranks(new)
    steps -= _ranks(old)
    return torch.from_numpy(steps.view(np.uint8)).view(new.dtype).to(new.device)


def resolve(form: Values, values: Tensor, old: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The new bits, from what ``coded`` gave and the same old bits; to be done once per change."""
    if form is Values.RAW:
        return values
    if old is None:
        raise ValueError(f"{form.name} needs the bits of the base version, found none; send RAW values")
    if form is Values.XOR:
        return values ^ old
    if not signed_magnitude(dtype):
        return old + values
    ranks = _ranks(old)
    ranks += values.cpu().numpy().view(ranks.dtype)
    return torch.from_numpy(_flip(ranks).view(np.uint8)).view(old.dtype).to(old.device)


def _ranks(bits: Tensor) -> Integers:
    """Ranks of sign-and-magnitude bits (n,), signed; new memory on the host, whose shifts are the fast ones."""
    return _flip(bits.cpu().numpy().view(_SIGNED[bits.itemsize]))


def _flip(bits: Integers) -> Integers:
    """All bits but the sign inverted where the sign is set, in new memory; its own inverse."""
    width = 8 * bits.itemsize
    flipped = bits >> (width - 1)
    flipped &= (1 << (width - 1)) - 1
    flipped ^= bits
    return flipped


def value_streams(form: Values, values: Integers, split: bool) -> list[Bytes]:
    """The streams of coded values.

    RAW and XOR: the items. STEP: one bit an element that says "negative", one that says "not one step", and for those
    elements, as items, the number of steps less two.
    """
    if form is not Values.STEP:
        return planes(values, split)
    unsigned = _UNSIGNED[values.itemsize]
    steps = values.view(_SIGNED[values.itemsize])
    negative = steps < 0
    one = steps == 1
    one |= steps == -1
    np.logical_not(one, out=one)
    far = steps[np.flatnonzero(one)]
    rest = np.where(far < 0, 0 - far.view(unsigned), far.view(unsigned)) - unsigned(2)
    return [_pack(negative), _pack(one), *planes(rest, split)]


def stream_count(form: Values, itemsize: int, split: bool) -> int:
    """Streams that ``value_streams`` makes."""
    return (itemsize if split else 1) + (2 if form is Values.STEP else 0)


def read_values(reader: StreamReader, form: Values, count: int, itemsize: int, split: bool) -> Integers:
    """The coded values that the next streams of ``reader`` hold, (count,) of an unsigned integer.

    Raises:
        PatchMismatch: the streams are damaged, or say what another row of streams says as well.
    """
    unsigned = _UNSIGNED[itemsize]
    if form is not Values.STEP:
        return unplane(reader.take_planes(count, itemsize, split), unsigned)
    negative, far = (_unpack(reader, count) for _ in range(2))
    where = np.flatnonzero(far.view(bool))
    rest = unplane(reader.take_planes(where.size, itemsize, split), unsigned) + unsigned(2)
    if where.size:
        # One step is not far, and a size has one sign: no step is positive, half of the range negative.
        half = unsigned(1 << (8 * itemsize - 1))
        below = negative[where].view(bool)
        if (
            bool((rest == 1).any())
            or bool((below & (rest > half)).any())
            or bool((below & (rest == 0)).any())
        ):
            raise reader.refusal("codes a step in a way that another one has", "the one way there is")
        if bool((~below & (rest >= half)).any()):
            raise reader.refusal("codes a step in a way that another one has", "the one way there is")
    signed: Any = _SIGNED[itemsize]
    steps = (1 - (negative.view(np.int8) << 1)).astype(signed)
    # One step is its sign; the size of others times the sign, in the item's own wrap-around arithmetic.
    steps[where] *= rest.view(signed)
    found: Integers = steps.view(unsigned)
    return found


def _pack(flags: Integers) -> Bytes:
    return np.packbits(flags, bitorder="little")


def _unpack(reader: StreamReader, count: int) -> Bytes:
    raw = reader.take(-(-count // 8))
    if count % 8 and raw[-1] >> (count % 8):
        raise reader.refusal("sets bits behind its last element", "zeros there")
    return np.unpackbits(raw, count=count, bitorder="little")
