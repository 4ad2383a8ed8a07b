"""Updates to measure the wire with: ascending positions, new and old bits, one row a tensor."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import Form, Values
from weightsync.reference.wire.sections import Encoded, decode_section, encode_section
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded, resolve

SHAPE = (4096, 1024)
NUMEL = math.prod(SHAPE)
DTYPE = torch.bfloat16


class Update(NamedTuple):
    """One tensor's changes: int32 positions, and int16 bits after and before."""

    positions: Tensor
    new: Tensor
    old: Tensor


def uniform(density: float, seed: int, shape: tuple[int, ...] = SHAPE) -> Update:
    """One representable value up or down, at random places."""
    generator = torch.Generator().manual_seed(seed)
    old = int_view((torch.randn(shape, generator=generator) * 0.02).to(DTYPE))
    positions = (torch.rand(old.numel(), generator=generator) < density).nonzero().flatten()
    ways = torch.randint(0, 2, positions.shape, generator=generator, dtype=torch.int16) * 2 - 1
    return Update(positions.to(torch.int32), old[positions] + ways, old[positions])


def adam(density: float, seed: int, shape: tuple[int, ...] = SHAPE) -> Update:
    """A normally distributed step on fp32 masters, as large as it takes to change this share of the bf16 weights."""
    generator = torch.Generator().manual_seed(seed)
    masters = torch.randn(shape, generator=generator) * 0.02
    step = torch.randn(shape, generator=generator)
    old = int_view(masters.to(DTYPE))
    low, high = 1e-12, 1.0
    for _ in range(24):
        middle = math.sqrt(low * high)
        new = int_view((masters + middle * step).to(DTYPE))
        share = float((new != old).double().mean())
        low, high = (middle, high) if share < density else (low, middle)
    positions = (new != old).nonzero().flatten()
    return Update(positions.to(torch.int32), new[positions], old[positions])


def entropy_bits(updates: list[Update], numel: int) -> float:
    """Bits per change that no code of independent positions and steps passes."""
    count = sum(one.positions.numel() for one in updates)
    share = count / (numel * len(updates))
    rest = (1 - share) * math.log2(1 - share) if share < 1 else 0.0
    where = -(share * math.log2(share) + rest) / share
    steps = torch.cat([coded(Values.STEP, one.new, one.old, DTYPE) for one in updates])
    odds = torch.unique(steps, return_counts=True)[1].double() / count
    return where - float((odds * odds.log2()).sum())


def encode(one: Update, form: Form, zstd: Zstd) -> Encoded:
    """From positions and bits to the section."""
    return encode_section(one.positions, coded(form.values, one.new, one.old, DTYPE), form, zstd)


def decode(found: Encoded, one: Update, numel: int, zstd: Zstd) -> tuple[Tensor | None, Tensor]:
    """From the section and the old bits to positions and new bits."""
    section = decode_section(found.section, found.form, one.positions.numel(), numel, DTYPE, "w", zstd)
    return section.positions, resolve(found.form.values, section.values, one.old, DTYPE)
