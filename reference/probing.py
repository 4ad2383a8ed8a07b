"""The probe of one group of parameters: an export run on positions, its result turned around, and proved."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from weightsync.reference.errors import ProbeError
from weightsync.reference.labels import Labels, any_bits
from weightsync.reference.params import ParamMeta, TPAttributes, int_view, same_bits
from weightsync.reference.pieces import Piece, owned_rows
from weightsync.reference.rowfind import Elements, distinct, find_rows
from weightsync.reference.rowmap import RowMap

Exported: TypeAlias = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Export: TypeAlias = Callable[[Any], Exported]


@dataclass(frozen=True, eq=False)
class Probed:
    """What an export function was found to do.

    Attributes:
        tensors: the checkpoint tensors, in wire order; an alias is none of them.
        maps: per trainer rank, runtime name -> map; parameters that are not exported have none.
        aliases: exported name -> the exported name whose elements it repeats, one for one.
        dropped: runtime name -> per rank that has it, elements that no checkpoint tensor has.
        replicas: runtime name -> per rank that has it, elements that another rank speaks for.
    """

    tensors: tuple[ParamMeta, ...]
    maps: tuple[dict[str, RowMap], ...]
    aliases: dict[str, str]
    dropped: dict[str, tuple[int, ...]]
    replicas: dict[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class GroupProbe:
    """One group of parameters; their elements are numbered through all ranks and names.

    Attributes:
        export: the function.
        metas: per rank, the parameters of the group.
        attributes: per rank, runtime name -> the attributes that what the function gets is to carry.
        alone: the rank whose mapping is passed by itself; None to pass the list of all.
        padded: see ``Probe``.
        replicated: see ``Probe``.
        declared: name -> what must come out under it; None takes what comes.
    """

    export: Export
    metas: Sequence[Sequence[ParamMeta]]
    attributes: Sequence[Mapping[str, TPAttributes]]
    alone: int | None
    padded: Collection[str]
    replicated: Collection[str]
    declared: Mapping[str, ParamMeta] | None

    def result(self) -> Probed:
        """What the group's parameters become, numbered by the group's own tensors.

        Raises:
            ProbeError: see ``Probe.of``.
        """
        first = self._call(self._digits(0))
        self._check_metas(first)
        _require_same(first, self._call(self._digits(0)))
        codes = {name: torch.zeros(tensor.numel(), dtype=torch.int64) for name, tensor in first.items()}
        for number in range(self.labels.passes):
            exported = first if number == 0 else self._call(self._digits(number))
            for name, tensor in exported.items():
                if name not in codes or tensor.shape != first[name].shape:
                    raise _unsteady(name)
                self.labels.collect(codes[name], tensor, number)
        sources = {name: self.labels.positions(code) for name, code in codes.items()}
        metas = {name: ParamMeta.of(name, tensor) for name, tensor in first.items()}
        del first, exported
        tensors, places, aliases = self._invert(sources, metas)
        probed = self._maps(tensors, places, aliases)
        self._verify(probed)
        return probed

    @cached_property
    def labels(self) -> Labels:
        """Labels that all dtypes on the way hold."""
        dtypes = {meta.dtype for _, meta in self._entries}
        dtypes |= {meta.dtype for meta in (self.declared or {}).values()}
        return Labels.of(int(self._bases[-1]), sorted(dtypes, key=str), seed=0)

    @cached_property
    def _entries(self) -> list[tuple[int, ParamMeta]]:
        return [(rank, meta) for rank, several in enumerate(self.metas) for meta in several]

    @cached_property
    def _bases(self) -> Tensor:
        """The number of the first element of each entry, and of all elements."""
        return torch.tensor([0, *(meta.numel for _, meta in self._entries)]).cumsum(0)

    def _check_metas(self, exported: Mapping[str, Tensor]) -> None:
        """Dtypes and shapes, before a wrong dtype could lose digits."""
        dtypes = {meta.dtype for _, meta in self._entries}
        for name, tensor in exported.items():
            found, wanted = ParamMeta.of(name, tensor), (self.declared or {}).get(name)
            if wanted is not None and found != wanted:
                raise ProbeError(
                    f"export gave {_say(found)}, expected {_say(wanted)}; correct the export or the declared "
                    "tensors"
                )
            if self.declared is None and tensor.dtype not in dtypes:
                raise _other_dtype(found, self._entries[0][1])

    def _invert(
        self, sources: Mapping[str, Tensor], metas: Mapping[str, ParamMeta]
    ) -> tuple[list[ParamMeta], Elements, dict[str, str]]:
        """From where each exported element comes to where each element of the group goes."""
        number = torch.full((self.labels.total,), -1, dtype=torch.int64)
        flat = torch.zeros(self.labels.total, dtype=torch.int64)
        tensors: list[ParamMeta] = []
        aliases: dict[str, str] = {}
        for name, source in sources.items():
            if bool((source < 0).any()):
                raise ProbeError(
                    f"element {int((source < 0).nonzero()[0])} of exported tensor {name!r} is no element of any "
                    "parameter: the export computes it or fills it in, and positions cannot follow; export the "
                    "stored parameter and compute on the rollout's side, or leave this tensor out"
                )
            places, taken = torch.arange(source.numel()), number[source]
            if source.numel() and int(taken[0]) >= 0 and bool((taken == taken[0]).all()):
                other = tensors[int(taken[0])]
                if other.numel == source.numel() and torch.equal(flat[source], places):
                    aliases[name] = other.name
                    self._check_alias(name, other.name)
                    continue
            number[source], flat[source] = len(tensors), places
            again = (taken >= 0) | (flat[source] != places)
            if bool(again.any()):
                raise self._repeated(name, source, int(again.nonzero()[0]))
            self._check_source(metas[name], source)
            tensors.append(metas[name])
        return tensors, Elements(number, flat, number >= 0), aliases

    def _check_alias(self, name: str, other: str) -> None:
        if name in (self.declared or ()):
            raise ProbeError(
                f"export gave {name!r} as a second name of {other!r}, expected a tensor of its own since it is "
                "declared; take it out of the declared tensors: what is tied travels once"
            )

    def _check_source(self, meta: ParamMeta, source: Tensor) -> None:
        if self.declared is not None and meta.name not in self.declared:
            raise ProbeError(
                f"export gave {_say(meta)}, which is not declared; correct the export or the declared tensors"
            )
        entries = torch.bucketize(source, self._bases[1:], right=True)
        for _, one in (self._entries[entry] for entry in distinct(entries.numpy())):
            if self.declared is None and one.dtype != meta.dtype:
                raise _other_dtype(meta, one)

    def _repeated(self, name: str, source: Tensor, at: int) -> ProbeError:
        rank, meta = self._entries[int(torch.bucketize(source[at], self._bases[1:], right=True))]
        return ProbeError(
            f"export repeats an element of parameter {meta.name!r} of rank {rank} at element {at} of {name!r}, "
            "expected each element once; only a whole tensor may repeat another, as a tied head does"
        )

    def _maps(self, tensors: Sequence[ParamMeta], places: Elements, aliases: dict[str, str]) -> Probed:
        probed = Probed(tuple(tensors), tuple({} for _ in self.metas), aliases, {}, {})
        for name in dict.fromkeys(meta.name for _, meta in self._entries):
            shards = [entry for entry, (_, meta) in enumerate(self._entries) if meta.name == name]
            held = [places.part(int(self._bases[one]), int(self._bases[one + 1])) for one in shards]
            if name in self.replicated:
                held = _replicas(name, [self._entries[one][1] for one in shards], held)
            fed = {one for part in held for one in distinct(part.number.numpy())}
            for shard, part in zip(shards, held, strict=True):
                rank, meta = self._entries[shard]
                self._check_dropped(rank, name, part.number < 0)
                if fed:
                    travels = replace(meta, dtype=tensors[min(fed)].dtype)
                    probed.maps[rank][name] = find_rows(travels, part, tensors, fed)
            dropped = tuple(int((part.number < 0).sum()) for part in held)
            copies = tuple(int(((part.number >= 0) & ~part.owned).sum()) for part in held)
            probed.dropped.update({name: dropped} if any(dropped) else {})
            probed.replicas.update({name: copies} if any(copies) else {})
        return probed

    def _check_dropped(self, rank: int, name: str, gone: Tensor) -> None:
        if bool(gone.any()) and name not in self.padded:
            raise ProbeError(
                f"export drops {int(gone.sum())} of {gone.numel()} elements of parameter {name!r} of rank {rank}, "
                f"the first is {int(gone.nonzero()[0])}; correct the export, or declare the name in padded, or in "
                "replicated if every rank holds all of it"
            )

    def _verify(self, probed: Probed) -> None:
        """A relabelling at random: what the function makes of any bits is what the maps make of them."""
        live = list(self._random())
        exported = self._call(live)
        expected = [torch.zeros(meta.numel, dtype=meta.dtype) for meta in probed.tensors]
        for params, maps in zip(live, probed.maps, strict=True):
            for name, row_map in maps.items():
                bits = int_view(params.pop(name).to(row_map.dtype))
                for output, number in enumerate(row_map.outputs):
                    piece = Piece(number, 0, probed.tensors[number].numel)
                    rows = owned_rows(row_map, output, piece)
                    if rows is not None:
                        rows.place(int_view(expected[number]), rows.read(bits))
        wanted = {meta.name: one for meta, one in zip(probed.tensors, expected, strict=True)}
        for name in (*wanted, *probed.aliases):
            if name not in exported:
                raise _unsteady(name)
            if not same_bits(exported[name].cpu().reshape(-1), wanted[probed.aliases.get(name, name)]):
                raise ProbeError(
                    f"exported tensor {name!r} has other bits than the elements it is made of: the export computes "
                    "on some values; export the stored elements as they are"
                )

    def _digits(self, number: int) -> Iterator[dict[str, Tensor]]:
        base = 0
        for metas in self.metas:
            made = {}
            for meta in metas:
                made[meta.name] = self.labels.values(base, meta, number)
                base += meta.numel
            yield made

    def _random(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(0)
        for metas in self.metas:
            yield {meta.name: any_bits(meta.shape, meta.dtype, generator) for meta in metas}

    def _call(self, ranks: Iterable[dict[str, Tensor]]) -> dict[str, Tensor]:
        """One run of the function, which must leave its inputs as they are; what it gave, by name."""
        given = list(ranks)
        for carried, one in zip(self.attributes, given, strict=True):
            for name, tensor in one.items():
                carried[name].stamp(tensor)
        kept = [{name: tensor.clone() for name, tensor in one.items()} for one in given]
        result = self.export(given if self.alone is None else given[self.alone])
        exported: dict[str, Tensor] = {}
        for name, tensor in result.items() if isinstance(result, Mapping) else result:
            if name in exported or not isinstance(tensor, Tensor):
                found = "two tensors" if name in exported else type(tensor).__name__
                raise ProbeError(f"export gave {found} as {name!r}, expected one tensor per name; correct it")
            exported[name] = tensor.detach()
        for before, after in zip(kept, given, strict=True):
            for name, tensor in before.items():
                if name not in after or not same_bits(tensor, after[name]):
                    raise ProbeError(
                        f"export writes to its input {name!r}, expected live parameters to be left alone; let it "
                        "clone before it changes anything"
                    )
        return exported


def _replicas(name: str, metas: Sequence[ParamMeta], held: Sequence[Elements]) -> list[Elements]:
    """Every rank holds what any rank tells; only that rank speaks for it."""
    shapes = {meta.shape for meta in metas}
    if len(shapes) > 1:
        raise ProbeError(
            f"parameter {name!r} is declared replicated, but has the shapes {sorted(shapes)} on different ranks, "
            "expected one; correct the declaration"
        )
    number, flat = held[0].number, held[0].flat
    for part in held[1:]:
        flat = flat.where(number >= 0, part.flat)
        number = number.where(number >= 0, part.number)
    return [
        Elements(part.number.where(part.owned, number), part.flat.where(part.owned, flat), part.owned)
        for part in held
    ]


def _require_same(first: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> None:
    for name in (*first, *again):
        if name not in first or name not in again or not same_bits(first[name], again[name]):
            raise _unsteady(name)


def _unsteady(name: str) -> ProbeError:
    return ProbeError(
        f"export gave another {name!r} at a second call on the same parameters, expected the same; let it keep "
        "no state and draw no random numbers"
    )


def _other_dtype(found: ParamMeta, source: ParamMeta) -> ProbeError:
    return ProbeError(
        f"export gave {_say(found)} from {_say(source)}, expected the same dtype; declare the checkpoint tensors if "
        "this cast is meant to travel"
    )


def _say(meta: ParamMeta) -> str:
    return f"{meta.name!r} {meta.dtype} {list(meta.shape)}"
