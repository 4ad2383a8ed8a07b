"""A rollout rank's row maps without a placement table: read off a ``load_weights`` that is given positions.

The loader writes into the real parameters, whose bits are put back afterwards. What it is given are tensors of the
checkpoint's own dtypes and shapes whose values are digits of positions (``labels``); where a digit lands, its
element lives. A last load of random bits must land as the maps say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from weightsync.reference.errors import ProbeError
from weightsync.reference.labels import Labels, any_bits, as_dtype, whole_numbers
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.rowfind import Elements, distinct, find_rows, speaking
from weightsync.reference.rowmap import RowMap, local_tensor

Load: TypeAlias = Callable[[Iterable[tuple[str, Tensor]]], object]


@dataclass(frozen=True, eq=False)
class Captured:
    """Where a loader puts the checkpoint on one rank.

    Attributes:
        maps: runtime name -> map, as ``placement.rollout_maps`` gives them; this rank speaks for every element it
            holds, once. With several ranks, pass all ranks' maps through ``rowfind.speak_once``.
        aliases: runtime name -> the earlier, mapped name of the same storage.
        untouched: runtime names that the loader never writes.
        padding: runtime name -> elements of a mapped parameter that the loader never writes.
        ignored: checkpoint names of which nothing lands on this rank.
        replicas: runtime name -> elements that this rank holds in an earlier place as well.
        overwritten: runtime name -> elements that several checkpoint elements are written to, as far as another
            order of loading shows it; the map knows the one that is written last in the given order.
    """

    maps: dict[str, RowMap]
    aliases: dict[str, str]
    untouched: tuple[str, ...]
    padding: dict[str, int]
    ignored: tuple[str, ...]
    replicas: dict[str, int]
    overwritten: dict[str, int]


def capture(
    load_weights: Load,
    params: Mapping[str, Tensor],
    tensors: Sequence[ParamMeta],
    *,
    groups: Sequence[Collection[str]] | None = None,
) -> Captured:
    """Where ``load_weights`` puts each element of each checkpoint tensor; to be called once, before serving.

    It is called about eight times per group with bfloat16. During a call the parameters hold nothing of use;
    afterwards, also after an error, they have their old bits in their old storage.

    Args:
        load_weights: writes (name, tensor) pairs into the parameters, in place. It may take any views, fuse, slice,
            pad, transpose, replicate and leave out; it may not compute, cast or replace storage.
        params: runtime name -> live tensor, of any strides, on any device; a copy of them is kept on their device.
        tensors: the plan's checkpoint tensors, in the order in which they are loaded.
        groups: names of checkpoint tensors to load together, for loaders that take a part of a checkpoint. Scratch
            memory on the host is about 60 bytes per element that one group writes; None is one group of all.

    Raises:
        ProbeError: the loader computes, casts, quantises or replaces storage; or the groups do not fit.
    """
    names = [meta.name for meta in tensors]
    listed = names if groups is None else [name for group in groups for name in group]
    if sorted(listed) != sorted(names):
        wrong = sorted({name for name in (*listed, *names) if listed.count(name) != names.count(name)})
        raise ProbeError(
            f"checkpoint tensor {wrong[0]!r} is in {listed.count(wrong[0])} groups, expected "
            f"{names.count(wrong[0])}; list every tensor of the plan once"
        )
    aliases = _aliases(params)
    own = {name: tensor for name, tensor in params.items() if name not in aliases}
    found: dict[str, Elements] = {}
    overwritten: dict[str, int] = {}
    with torch.no_grad(), _Borrowed(own, params) as borrowed:
        for group in [names] if groups is None else groups:
            numbers = [number for number, name in enumerate(names) if name in group]
            part = _GroupCapture(load_weights, borrowed, tensors, numbers)
            for name, elements in part.elements().items():
                found[name], again = _over(found.get(name), elements)
                overwritten[name] = overwritten.get(name, 0) + again + part.disputed.get(name, 0)
    spoken = [torch.zeros(meta.numel, dtype=torch.bool) for meta in tensors]
    maps, padding, replicas = {}, {}, {}
    for name in [name for name in own if name in found]:
        elements = speaking(found.pop(name), spoken)
        maps[name] = find_rows(ParamMeta.of(name, own[name]), elements, tensors)
        padding[name] = int((elements.number < 0).sum())
        replicas[name] = int(((elements.number >= 0) & ~elements.owned).sum())
    held = {number for one in maps.values() for number in one.outputs}
    return Captured(
        maps,
        {name: tied_to for name, tied_to in aliases.items() if tied_to in maps},
        tuple(name for name in params if aliases.get(name, name) not in maps),
        _nonzero(padding),
        tuple(name for number, name in enumerate(names) if number not in held),
        _nonzero(replicas),
        _nonzero(overwritten),
    )


class _Borrowed:
    """Live parameters while a loader writes what it likes into them; their own bits come back at the end."""

    def __init__(self, params: Mapping[str, Tensor], tied: Mapping[str, Tensor]) -> None:
        self.params = params
        self._all = {name: (tensor, tensor.data) for name, tensor in (*params.items(), *tied.items())}
        self._saved = {name: _bits(tensor).clone() for name, tensor in params.items()}

    def __enter__(self) -> _Borrowed:
        return self

    def __exit__(self, *_: object) -> None:
        for tensor, kept in self._all.values():
            tensor.data = kept
        for name, tensor in self.params.items():
            _bits(tensor).copy_(self._saved[name])

    def clear(self) -> None:
        """Zero bits everywhere."""
        for tensor in self.params.values():
            _bits(tensor).zero_()

    def check(self) -> None:
        """Refuse a loader that gave a parameter another storage."""
        for name, (tensor, kept) in self._all.items():
            if tensor.data_ptr() != kept.data_ptr() or ParamMeta.of(name, tensor) != ParamMeta.of(name, kept):
                raise ProbeError(
                    f"load_weights replaces the storage of parameter {name!r}, expected it to be written in place; "
                    "capture before the engine repacks its weights, or let the loader copy into the parameter"
                )


class _GroupCapture:
    """Where the checkpoint tensors with the given numbers land; their elements are numbered one after the other."""

    def __init__(
        self, load_weights: Load, borrowed: _Borrowed, tensors: Sequence[ParamMeta], numbers: Sequence[int]
    ) -> None:
        self.load_weights, self.borrowed, self.numbers = load_weights, borrowed, numbers
        self.tensors = tensors
        self.metas = [tensors[number] for number in numbers]
        self.bases = torch.tensor([0, *(meta.numel for meta in self.metas)]).cumsum(0)
        dtypes = {meta.dtype for meta in self.metas}
        self.labels = Labels.of(int(self.bases[-1]), sorted(dtypes, key=str), seed=0)
        self.disputed: dict[str, int] = {}
        """Runtime name -> elements that hold something else when the tensors come in reverse order."""

    def elements(self) -> dict[str, Elements]:
        """Runtime name -> where its elements live, of every parameter that is written."""
        written = self._written()
        codes = {name: torch.zeros(int(mask.sum()), dtype=torch.int64) for name, mask in written.items()}
        for number in range(self.labels.passes):
            self._load(self._digits(number))
            for name, mask in written.items():
                self.labels.collect(codes[name], self._read(name, mask), number)
        found = {name: self._places(name, mask, codes.pop(name)) for name, mask in written.items()}
        self._verify(found)
        return found

    def _written(self) -> dict[str, Tensor]:
        """Per written parameter, which elements are: those in which a one lands where zeros were."""
        self._load((meta.name, as_dtype(torch.ones(meta.shape), meta.dtype)) for meta in self.metas)
        dtypes = {meta.dtype for meta in self.metas}
        written = {}
        for name, tensor in self.borrowed.params.items():
            mask = int_view(tensor).cpu() != 0
            if not bool(mask.any()):
                continue
            if tensor.dtype not in dtypes:
                raise self._cast(name, self.metas[0])
            if not bool((whole_numbers(self._read(name, mask)) == 1).all()):
                raise _computed(name, int(mask.nonzero()[0]))
            written[name] = mask
        return written

    def _places(self, name: str, mask: Tensor, codes: Tensor) -> Elements:
        positions = self.labels.positions(codes)
        if bool((positions < 0).any()):
            raise _computed(name, int(mask.nonzero()[(positions < 0).nonzero()[0]]))
        entry = torch.bucketize(positions, self.bases[1:], right=True)
        for one in distinct(entry.numpy()):
            if self.metas[one].dtype != self.borrowed.params[name].dtype:
                raise self._cast(name, self.metas[one])
        number = torch.full(mask.shape, -1, dtype=torch.int64)
        flat = torch.zeros(mask.shape, dtype=torch.int64)
        number[mask] = torch.tensor(self.numbers, dtype=torch.int64)[entry]
        flat[mask] = positions - self.bases[entry]
        return Elements(number, flat, mask)

    def _verify(self, found: Mapping[str, Elements]) -> None:
        """Random bits in order must land as found; in reverse order they show what is written twice."""
        expected = {}
        for name, elements in found.items():
            runtime = ParamMeta.of(name, self.borrowed.params[name])
            row_map = find_rows(runtime, elements, self.tensors)
            given = [self._random(number) for number in row_map.outputs]
            expected[name] = int_view(local_tensor(row_map, given))
        self._load((self.tensors[number].name, self._random(number)) for number in self.numbers)
        for name, bits in expected.items():
            wrong = (int_view(self.borrowed.params[name]).cpu() != bits).nonzero()
            if wrong.numel():
                raise _computed(name, int(wrong[0]))
        if len(self.numbers) > 1:
            self._load((self.tensors[number].name, self._random(number)) for number in reversed(self.numbers))
            for name, bits in expected.items():
                differing = int((int_view(self.borrowed.params[name]).cpu() != bits).sum())
                self.disputed[name] = differing

    def _load(self, pairs: Iterable[tuple[str, Tensor]]) -> None:
        self.borrowed.clear()
        self.load_weights(iter(pairs))
        self.borrowed.check()

    def _read(self, name: str, mask: Tensor) -> Tensor:
        values = self.borrowed.params[name].detach().reshape(-1).cpu()
        return values if bool(mask.all()) else values[mask]

    def _digits(self, number: int) -> Iterator[tuple[str, Tensor]]:
        for meta, base in zip(self.metas, self.bases.tolist(), strict=False):
            yield meta.name, self.labels.values(base, meta, number)

    def _random(self, number: int) -> Tensor:
        meta = self.tensors[number]
        return any_bits(meta.shape, meta.dtype, torch.Generator().manual_seed(number))

    def _cast(self, name: str, meta: ParamMeta) -> ProbeError:
        return ProbeError(
            f"load_weights casts or quantises into parameter {name!r} of {self.borrowed.params[name].dtype} from "
            f"tensors such as {meta.name!r} of {meta.dtype}, expected one dtype; load this parameter by itself and "
            "leave its tensors out of the plan"
        )


def _computed(name: str, at: int) -> ProbeError:
    return ProbeError(
        f"element {at} of parameter {name!r} holds no element of the checkpoint after load_weights: the loader "
        "computes it, or does something else at each call; load this parameter by itself and leave its tensors "
        "out of the plan"
    )


def _over(below: Elements | None, above: Elements) -> tuple[Elements, int]:
    """A later group's elements on top of an earlier one's, and how many they cover."""
    if below is None:
        return above, 0
    new = above.number >= 0
    number, flat = above.number.where(new, below.number), above.flat.where(new, below.flat)
    return Elements(number, flat, number >= 0), int((new & (below.number >= 0)).sum())


def _aliases(params: Mapping[str, Tensor]) -> dict[str, str]:
    seen: dict[object, str] = {}
    aliases = {}
    for name, tensor in params.items():
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and seen.setdefault(key, name) != name:
            aliases[name] = seen[key]
    return aliases


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's own memory as integers, of any strides."""
    return tensor.detach().view(int_view(tensor.new_empty(0)).dtype)


def _nonzero(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
