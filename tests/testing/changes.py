"""Kinds of change that weight-sync code loses: how each one edits the bits of live tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from weightsync.reference.params import int_view, read

Edit = Callable[[Tensor, torch.dtype, torch.Generator], None]
"""Edits flat integer bits (n,), n >= 1, of a tensor of some dtype in place."""


class Step(NamedTuple):
    """One change between two pushes.

    Attributes:
        says: what changed, as a clause.
        scope: which tensors: ``every`` or ``one`` drawn name, the ``first`` or ``last`` of them, or ``back``:
            all of them to the bits of the first push.
        edit: the edit, or None for no change.
        floats: only tensors of floating dtypes.
    """

    says: str
    scope: Literal["every", "one", "first", "last", "back"]
    edit: Edit | None
    floats: bool = False


@dataclass(frozen=True, slots=True)
class Leaf:
    """One live tensor of a trainer.

    Attributes:
        name: its name.
        shard: index of the shard it is in; 0 when the trainer is not cut.
        tensor: the tensor itself, of any strides and device.
    """

    name: str
    shard: int
    tensor: Tensor

    def bits(self) -> Tensor:
        """A copy of its bits, flat in row-major order, on the host."""
        return int_view(self.tensor).to("cpu", copy=True)

    def write(self, bits: Tensor) -> None:
        """Write flat bits through its strides."""
        whole = self.tensor.detach().view(bits.dtype)
        whole.copy_(bits.reshape(whole.shape))


def leaves(trainer: Any) -> list[Leaf]:
    """The live tensors of a trainer: a mapping, an object with ``params``, a module, or a sequence of these.

    Raises:
        ValueError: it is none of them.
    """
    if isinstance(trainer, Sequence) and not isinstance(trainer, str):
        return [
            Leaf(leaf.name, shard, leaf.tensor) for shard, one in enumerate(trainer) for leaf in leaves(one)
        ]
    if isinstance(trainer, torch.nn.Module):
        trainer = dict(trainer.named_parameters())
    found = trainer if isinstance(trainer, Mapping) else getattr(trainer, "params", None)
    if not isinstance(found, Mapping) or not all(isinstance(one, Tensor) for one in found.values()):
        raise ValueError(
            f"make_trainer() gave {type(trainer).__name__}, expected a mapping of names to tensors, an "
            "object with one in .params, a module, or a sequence of such shards; wrap your trainer"
        )
    return [Leaf(name, 0, tensor) for name, tensor in found.items()]


def make_change(
    found: Sequence[Leaf], step: Step, first: Mapping[tuple[str, int], Tensor], seed: str
) -> bool:
    """Change live tensors as a step says; False when it applies to none of them.

    Shards of one name get one change, unless their attributes say that they are cut: replicas stay equal.

    Args:
        found: the live tensors.
        step: the change.
        first: (name, shard) -> the bits of the first push.
        seed: equal seeds draw equal elements.
    """
    fitting = [one for one in found if one.tensor.numel() and (_is_float(one) or not step.floats)]
    names = sorted({one.name for one in fitting}, key=[one.name for one in fitting].index)
    if not names:
        return False
    if step.scope == "one":
        names = [random.Random(seed).choice(names)]
    elif step.scope in ("first", "last"):
        names = [names[0 if step.scope == "first" else -1]]
    for leaf in fitting:
        if leaf.name not in names:
            continue
        bits = first[leaf.name, leaf.shard].clone() if step.scope == "back" else leaf.bits()
        if step.edit is not None:
            cut = leaf.shard if read(leaf.tensor).sharded else 0
            stream = torch.Generator().manual_seed(random.Random(f"{seed}/{leaf.name}/{cut}").getrandbits(63))
            step.edit(bits, leaf.tensor.dtype, stream)
        leaf.write(bits)
    return True


def _flip(bits: Tensor, dtype: torch.dtype, stream: torch.Generator, where: Any) -> None:
    """Give the chosen elements other bits."""
    chosen = bits[where]
    if dtype == torch.bool:
        bits[where] = chosen ^ 1
        return
    width = 8 * dtype.itemsize
    mask = torch.randint(1, 1 << min(width, 62), chosen.shape, generator=stream)
    low = (mask & ((1 << (width - 1)) - 1)).to(bits.dtype)  # the top bit separately: it is the sign
    top = torch.full_like(chosen, 1 << 7) if width == 8 else torch.full_like(chosen, -(1 << (width - 1)))
    signed = (torch.rand(chosen.shape, generator=stream) < 0.5) | (low == 0)
    bits[where] = chosen ^ low ^ torch.where(signed, top, torch.zeros_like(top))


def _drawn(bits: Tensor, stream: torch.Generator) -> int:
    return int(torch.randint(0, bits.numel(), (), generator=stream))


def _one(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
    _flip(bits, dtype, stream, slice(at := _drawn(bits, stream), at + 1))


def _lowest(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
    bits[_drawn(bits, stream)] ^= 1


def _first(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
    _flip(bits, dtype, stream, slice(0, 1))


def _last(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
    _flip(bits, dtype, stream, slice(bits.numel() - 1, None))


def _third(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
    _flip(bits, dtype, stream, slice(None, None, 3))


def _all(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
    _flip(bits, dtype, stream, slice(None))


def _becomes(pattern: Callable[[torch.dtype], Tensor]) -> Edit:
    """The same drawn element in every step of a kind becomes one bit pattern."""

    def edit(bits: Tensor, dtype: torch.dtype, stream: torch.Generator) -> None:
        bits[_drawn(bits, stream)] = pattern(dtype)

    return edit


def _value(number: float) -> Callable[[torch.dtype], Tensor]:
    return lambda dtype: int_view(torch.tensor(number).to(dtype))[0]


def _all_ones(dtype: torch.dtype) -> Tensor:
    return ~int_view(torch.zeros((), dtype=dtype))[0]


def _is_float(leaf: Leaf) -> bool:
    return leaf.tensor.dtype.is_floating_point


ZERO, MINUS_ZERO, ONE = _becomes(_value(0.0)), _becomes(_value(-0.0)), _becomes(_value(1.0))
NAN, OTHER_NAN, INFINITY = _becomes(_value(float("nan"))), _becomes(_all_ones), _becomes(_value(float("inf")))

KINDS: Mapping[str, tuple[Step, ...]] = {
    "nothing": (Step("nothing changed", "every", None),),
    "one element": (Step("one element of one tensor changed", "one", _one),),
    "lowest bit": (Step("one element of each tensor changed in its lowest bit", "every", _lowest),),
    "signed zero": (
        Step("one element of each tensor became 0.0", "every", ZERO, floats=True),
        Step("0.0 became -0.0 in each tensor", "every", MINUS_ZERO, floats=True),
        Step("-0.0 became 0.0 in each tensor", "every", ZERO, floats=True),
    ),
    "NaN": (
        Step("one element of each tensor became NaN", "every", NAN, floats=True),
        Step("NaN became a NaN with another payload in each tensor", "every", OTHER_NAN, floats=True),
        Step("NaN became 1.0 in each tensor", "every", ONE, floats=True),
    ),
    "infinity": (Step("one element of each tensor became infinity", "every", INFINITY, floats=True),),
    "first element": (Step("the first element of each tensor changed", "every", _first),),
    "last element": (Step("the last element of each tensor changed", "every", _last),),
    "strided": (Step("every third element of each tensor changed", "every", _third),),
    "first tensor": (Step("only the first tensor changed", "first", _all),),
    "last tensor": (Step("only the last tensor changed", "last", _all),),
    "all elements": (Step("every element of every tensor changed", "every", _all),),
    "back": (Step("every tensor went back to the bits of the first push", "back", None),),
}
"""Kind -> its steps; a push follows each of them."""


def schedule(kinds: Sequence[str] | None, rounds: int, seed: int) -> Iterator[tuple[str, Step, str]]:
    """(kind, step, seed of its draws), ``rounds`` times through the kinds; from the second on, shuffled.

    Raises:
        ValueError: an unknown kind, or no round.
    """
    chosen = list(KINDS) if kinds is None else list(kinds)
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown or not chosen or rounds < 1:
        raise ValueError(
            f"kinds are {chosen} and rounds {rounds}, expected some of {list(KINDS)} and at least 1 round; "
            "correct them"
        )
    for number in range(rounds):
        if number:
            random.Random(f"{seed}/{number}").shuffle(chosen)
        for kind in chosen:
            for step in KINDS[kind]:
                yield kind, step, f"{seed}/{number}/{kind}"
