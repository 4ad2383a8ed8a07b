"""Positions carried as values: what a probe or a capture puts into tensors, and how it reads positions back.

Every position gets a code, and a code is spread over several passes of digits that the dtype holds exactly
(0 to 255 in bfloat16), so that nothing has to be of another dtype than the real weights. Codes are scattered in
a space 2**16 times larger than needed: a value that was computed is, but for that chance, no code of anything.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.reference.errors import UnsupportedCapability
from weightsync.reference.params import ParamMeta, int_view

_SPARE_BITS = 16
_MOST_BITS = 62
_AT_ONCE = 1 << 15


def digit_bits(dtype: torch.dtype) -> int:
    """How many bits of a digit a dtype holds exactly: every integer from 0 to ``2**bits - 1``.

    >>> digit_bits(torch.bfloat16), digit_bits(torch.float32), digit_bits(torch.float8_e4m3fn)
    (8, 24, 4)

    Raises:
        UnsupportedCapability: complex, boolean and power-of-two dtypes, which hold no useful digits.
    """
    bits = 0
    if dtype.is_floating_point:
        bits = 1 - round(torch.tensor(torch.finfo(dtype).eps).log2().item())
    elif not dtype.is_complex and dtype is not torch.bool:
        bits = torch.iinfo(dtype).bits - (1 if dtype.is_signed else 0)
    if bits < 2:
        raise UnsupportedCapability(
            f"tensors of {dtype} hold no exact integers to carry positions with, expected a float of 8 bits or "
            "more or an integer; leave these tensors out"
        )
    return min(bits, _MOST_BITS)


@dataclass(frozen=True)
class Labels:
    """Digits of the codes of the positions 0 to ``total - 1``, and positions from digits. Holds no tensors.

    Attributes:
        total: number of positions.
        bits: bits of a digit.
        passes: digits of a code.
        factor: odd; ``code = position * factor + shift`` in ``bits * passes`` bits, which is one-to-one.
        shift: see ``factor``.
    """

    total: int
    bits: int
    passes: int
    factor: int
    shift: int

    @classmethod
    def of(cls, total: int, dtypes: Sequence[torch.dtype], seed: int) -> Labels:
        """Labels whose digits all of ``dtypes`` hold; equal where the arguments are."""
        bits = min((digit_bits(dtype) for dtype in dtypes), default=_MOST_BITS)
        passes = max(1, min(-(-(total.bit_length() + _SPARE_BITS) // bits), _MOST_BITS // bits))
        draw = random.Random(seed)
        space = 1 << bits * passes
        return cls(total, bits, passes, draw.randrange(space) | 1, draw.randrange(space))

    def values(self, base: int, meta: ParamMeta, number: int) -> Tensor:
        """A new tensor like ``meta`` whose elements hold digit ``number`` of the positions from ``base`` on."""
        made = torch.empty(meta.numel, dtype=meta.dtype)
        for start, part in _parts(made):
            positions = torch.arange(base + start, base + start + part.numel())
            code = positions.mul_(self.factor).add_(self.shift).bitwise_and_(self._mask)
            digits = (code >> number * self.bits) & ((1 << self.bits) - 1)
            part.copy_(as_dtype(digits, meta.dtype))
        return made.reshape(meta.shape)

    def collect(self, codes: Tensor, values: Tensor, number: int) -> None:
        """Add what pass ``number`` read, of any shape, to flat int64 ``codes``, which starts as zeros.

        A value that is no digit makes its code -1, for good.
        """
        values = values.detach().reshape(-1)
        for start, part in _parts(codes):
            digits = whole_numbers(values[start : start + part.numel()])
            bad = (digits < 0) | (digits >= 1 << self.bits) | (part < 0)
            part |= digits << number * self.bits
            part[bad] = -1

    def positions(self, codes: Tensor) -> Tensor:
        """Positions of collected codes, written over them; -1 for one that is the code of no position."""
        inverse = pow(self.factor, -1, self._mask + 1)
        for _, part in _parts(codes):
            found = ((part - self.shift) * inverse) & self._mask
            part.copy_(found.where((part >= 0) & (found < self.total), -1))
        return codes

    @property
    def _mask(self) -> int:
        return (1 << self.bits * self.passes) - 1


def _parts(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Views of a flat tensor that stay in a processor's cache while they are worked on, with where they start."""
    for start in range(0, flat.numel(), _AT_ONCE):
        yield start, flat[start : start + _AT_ONCE]


def as_dtype(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Digits as values of a dtype that holds them exactly."""
    return numbers.to(torch.float64).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def whole_numbers(values: Tensor) -> Tensor:
    """Values as int64, on the host; -1 for one that is negative, not finite, or has a fraction."""
    values = values.detach().cpu()
    if not values.dtype.is_floating_point:
        return values.to(torch.int64).clamp(min=-1)
    wide = values.to(torch.float64)
    whole = wide.clamp(-1.0, 2.0**_MOST_BITS).to(torch.int64)
    return whole.where(whole.to(torch.float64) == wide, -1).clamp(min=-1)


def any_bits(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random bits: both signs, subnormal numbers, infinities, but no NaN, whose payload a cast may change."""
    drawn = torch.empty(tuple(shape), dtype=dtype)
    bits = int_view(drawn).view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, dtype=torch.uint8, generator=generator))
    if dtype.is_floating_point:
        int_view(drawn)[drawn.reshape(-1).to(torch.float64).isnan()] = 0
    return drawn
