"""Strategies for the whole checkpoint before and after an optimizer step: too many elements to draw one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.params import ParamMeta, int_view
from weightsync.testing.strategies import special_bits

KINDS = ("nothing", "one", "some", "special", "all")
"""What a step does to one tensor; ``special`` leaves zeros of both signs, infinities and NaNs where it writes."""


def examples(share: float) -> settings:
    """A share of the examples that the active Hypothesis profile draws: 50 by default, 2,000 with ``nightly``.

    A number in ``@settings`` would stand against every profile.
    """
    return settings(max_examples=max(1, round(share * settings().max_examples)))


@st.composite
def state_changes(
    draw: st.DrawFn, *, metas: Sequence[ParamMeta]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole tensors by name, before and after a step of a drawn kind per tensor; random bits from a drawn seed."""
    stream = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    before = random_tensors(metas, stream)
    after = {name: tensor.clone() for name, tensor in before.items()}
    drawn = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    event("changes: " + ("none" if set(drawn) == {"nothing"} else "some"))
    for number, tensor in enumerate(after.values()):
        change(tensor, drawn[number % len(drawn)], stream)
    return before, after


def random_tensors(metas: Sequence[ParamMeta], stream: torch.Generator) -> dict[str, Tensor]:
    """Tensors of random bits, NaN payloads among them."""
    return {
        meta.name: torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=stream)
        .view(meta.dtype)
        .reshape(meta.shape)
        for meta in metas
    }


def change(tensor: Tensor, kind: str, stream: torch.Generator) -> None:
    """Do to a contiguous tensor, in place, what ``kind`` says."""
    bits = int_view(tensor)
    if not len(bits) or kind == "nothing":
        return
    if kind == "one":
        bits[int(torch.randint(len(bits), (1,), generator=stream))] ^= 1
    elif kind == "special":
        patterns = torch.tensor(special_bits(tensor.dtype), dtype=torch.int64).to(bits.dtype)
        chosen = torch.rand(len(bits), generator=stream) < 0.4
        drawn = torch.randint(len(patterns), (len(bits),), generator=stream)
        bits[chosen] = patterns[drawn][chosen]
    else:
        chosen = torch.rand(len(bits), generator=stream) < (2.0 if kind == "all" else 0.2)
        flips = torch.randint(1, 256, (len(bits), tensor.itemsize), dtype=torch.uint8, generator=stream)
        bits[chosen] ^= flips.view(bits.dtype).reshape(-1)[chosen]


def overwrite(params: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Write ``values`` into the live parameters of the same names, bit for bit, as an optimizer does in place."""
    for name, value in values.items():
        int_view(params[name].detach()).copy_(int_view(value.detach()))
