"""From element to rows: the RowMap with the widest rows that says where each element of a parameter lives.

A probe or a capture knows every element's place; a table of elements is as large as the weights. Where elements
lie side by side on both sides, a table of rows says the same. Where they do not, a row is one element.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta
from weightsync.reference.rowmap import RowMap, rows_and_width


@dataclass(frozen=True, eq=False)
class Elements:
    """Where each element of one rank's runtime parameter lives, in row-major order of its shape.

    Attributes:
        number: int64 (n,), number in the plan of the checkpoint tensor; -1 for an element that never travels.
        flat: int64 (n,), flat position in that tensor; 0 where nothing travels.
        owned: bool (n,), whether the rank speaks for the element.
    """

    number: Tensor
    flat: Tensor
    owned: Tensor

    @classmethod
    def of(cls, row_map: RowMap) -> Elements:
        """Every element of a map, replicas included: new memory, 17 bytes an element."""
        # The entry behind the last one is found by -1.
        numbers = torch.tensor((*row_map.outputs, -1))[row_map.tensor.long()]
        widths = torch.tensor((*row_map.full_widths, 0))[row_map.tensor.long()]
        starts = row_map.row * widths + row_map.column
        flat = (starts[:, None] + torch.arange(row_map.width)).reshape(-1)
        number, owned = (one.repeat_interleave(row_map.width) for one in (numbers, row_map.owned))
        return cls(number, flat.where(number >= 0, 0), owned & (number >= 0))

    def part(self, first: int, end: int) -> Elements:
        """The elements from ``first`` up to ``end``; shares memory."""
        return Elements(self.number[first:end], self.flat[first:end], self.owned[first:end])


def find_rows(
    runtime: ParamMeta, elements: Elements, tensors: Sequence[ParamMeta], also: Collection[int] = ()
) -> RowMap:
    """The map of a runtime parameter from the places of its elements, in the widest rows that there are.

    A checkpoint element that the parameter holds several times has one output per copy: the same number again.

    Args:
        runtime: the parameter's name, the dtype that travels, and this rank's shape.
        elements: where its elements live.
        tensors: the plan's checkpoint tensors, by number.
        also: numbers that are to be among the outputs even if this rank holds nothing of them.

    Raises:
        PlanMismatch: a checkpoint tensor has another dtype than the parameter.
    """
    outputs, output = _outputs(elements, also)
    for number in outputs:
        if tensors[number].dtype != runtime.dtype:
            raise PlanMismatch(
                f"parameter {runtime.name!r} is {runtime.dtype}, but feeds or holds "
                f"{tensors[number].name!r} of {tensors[number].dtype}, expected one dtype; cast neither on "
                "the way"
            )
    widths = [max(rows_and_width(tensors[number].shape)[1], 1) for number in outputs]
    flat, owned = elements.flat.numpy(), elements.owned.numpy()
    width, full_widths, column = _widest(output, flat, owned, widths)
    row_tensor = torch.from_numpy(output[::width].astype(np.int32))
    starts = elements.flat[::width]
    full = torch.tensor((*full_widths, 1))[row_tensor.long()]
    return RowMap(
        name=runtime.name,
        dtype=runtime.dtype,
        local_shape=runtime.shape,
        outputs=outputs,
        tensor=row_tensor,
        row=((starts - column) // full).where(row_tensor >= 0, 0),
        width=width,
        full_widths=full_widths,
        column=column,
        owned=elements.owned[::width] & (row_tensor >= 0),
    )


def speak_once(
    ranks: Sequence[Mapping[str, RowMap]], tensors: Sequence[ParamMeta]
) -> tuple[dict[str, RowMap], ...]:
    """The same maps, in which the first rank and parameter that holds a checkpoint element speaks for it.

    A rank that captured its own placement cannot know who else holds an element; the digest of a rollout
    counts each element once. Scratch memory is a byte per element of the checkpoint.

    Args:
        ranks: the maps of all ranks of one rollout, in rank order.
        tensors: the plan's checkpoint tensors, by number.
    """
    spoken = [torch.zeros(meta.numel, dtype=torch.bool) for meta in tensors]
    found = []
    for maps in ranks:
        made = {}
        for name, one in maps.items():
            runtime = ParamMeta(name, one.dtype, one.local_shape)
            made[name] = find_rows(runtime, speaking(Elements.of(one), spoken), tensors, one.outputs)
        found.append(made)
    return tuple(found)


def speaking(elements: Elements, spoken: Sequence[Tensor]) -> Elements:
    """The same elements, each owned unless it is spoken for already; ``spoken`` is brought up to date.

    Args:
        elements: of one parameter.
        spoken: per checkpoint tensor, bool (numel,), which of its elements an earlier place speaks for.
    """
    owned = torch.zeros_like(elements.owned)
    number, copy = elements.number.numpy(), _copies(elements)
    for one in distinct(number):
        chosen = torch.from_numpy(np.flatnonzero((number == one) & (copy == 0)))
        flat = elements.flat[chosen]
        owned[chosen] = ~spoken[one][flat]
        spoken[one][flat] = True
    return replace(elements, owned=owned)


def distinct(numbers: NDArray[np.int64]) -> list[int]:
    """The small numbers from 0 on that occur, ascending; -1 is left out."""
    found: list[int] = np.flatnonzero(np.bincount(numbers + 1)[1:]).tolist()
    return found


def _outputs(elements: Elements, also: Collection[int]) -> tuple[tuple[int, ...], NDArray[np.int64]]:
    """Numbers in ascending order, one that is held k times k times; and per element the index of its output."""
    number = elements.number.numpy()
    copy = _copies(elements)
    held = number >= 0
    most = int(copy.max(initial=0)) + 1
    keys = np.where(held, number * most + copy, -1)
    ordered = sorted({*distinct(keys), *(one * most for one in also)})
    places = np.full(max(ordered, default=-1) + 2, -1, dtype=np.int64)  # the last entry is found by -1
    places[ordered] = np.arange(len(ordered))
    return tuple(key // most for key in ordered), places[keys]


def _copies(elements: Elements) -> NDArray[np.int64]:
    """Per element, how often its checkpoint element was held before it."""
    number, flat = elements.number.numpy(), elements.flat.numpy()
    copy = np.zeros(number.size, dtype=np.int64)
    for one in distinct(number):
        local = np.flatnonzero(number == one)
        places = flat[local]
        if places.size > 1 and not bool((places[1:] > places[:-1]).all()):
            order = np.argsort(places, kind="stable")
            ordered = places[order]
            first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
            start = np.maximum.accumulate(np.where(first, np.arange(first.size), 0))
            copy[local[order]] = np.arange(first.size) - start
    return copy


def _widest(
    output: NDArray[np.int64], flat: NDArray[np.int64], owned: NDArray[np.bool_], widths: Sequence[int]
) -> tuple[int, tuple[int, ...], int]:
    """Width of a local row, full widths, and column; rows of one element always fit."""
    held = output >= 0
    joined = (output[1:] == output[:-1]) & (owned[1:] == owned[:-1])
    joined &= (flat[1:] == flat[:-1] + 1) | ~held[1:]
    breaks = np.flatnonzero(~joined) + 1
    common = math.gcd(output.size, int(np.gcd.reduce(breaks)) if breaks.size else 0)
    used = [index for index in range(len(widths)) if bool((output == index).any())]
    limit = min((widths[index] for index in used), default=max(widths, default=1))
    for width in _divisors(common):
        if width <= limit:
            rows = {index: flat[::width][output[::width] == index] for index in used}
            fit = _fit(rows, width, widths)
            if fit is not None:
                return width, *fit
    return 1, (1,) * len(widths), 0


def _fit(
    rows: Mapping[int, NDArray[np.int64]], width: int, widths: Sequence[int]
) -> tuple[tuple[int, ...], int] | None:
    """Full widths and the column in which all rows start, or None: first full rows, then rows like local ones.

    A full row never crosses a row of its checkpoint tensor, since tensors are cut into pieces there.
    """
    full = list(widths)
    columns = {0} if not rows else set()
    for index, starts in rows.items():
        full[index] = math.gcd(widths[index], int(np.gcd.reduce(starts - starts[0])))
        columns.add(int(starts[0]) % full[index])
    if len(columns) == 1:
        (column,) = columns
        if all(column + width <= full[index] for index in rows):
            return tuple(full), column
    if all(widths[index] % width == 0 and not bool((starts % width).any()) for index, starts in rows.items()):
        return tuple(width if index in rows else one for index, one in enumerate(widths)), 0
    return None


def _divisors(number: int) -> Iterator[int]:
    """Descending; none of 0."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    yield from sorted({*small, *(number // one for one in small)}, reverse=True)
