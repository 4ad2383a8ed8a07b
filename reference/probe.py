"""A trainer's row maps without a layout table: read off an export function that is given positions.

The function runs on tensors of the parameters' own dtypes and shapes whose values are digits of positions
(``labels``). Where a digit comes out, its element goes. A last run on random bits must come out as the maps say.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torch import Tensor

from weightsync.reference.errors import ProbeError
from weightsync.reference.params import ParamMeta, TPAttributes, read
from weightsync.reference.plan import TransferPlan
from weightsync.reference.probing import Export, GroupProbe, Probed

__all__ = ["Export", "Params", "Probe", "Probed", "plan_of"]

Params: TypeAlias = Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]]


@dataclass(eq=False)
class Probe:
    """Probes one export function, once per layout. Reads no weights: names, dtypes and shapes are enough.

    Attributes:
        export: from runtime parameters to checkpoint tensors, as a mapping or as pairs. It gets what ``of`` got,
            with positions as values: one rank's mapping, or the list of all ranks' mappings. The tensors carry the
            tensor-parallel attributes of what ``of`` got, and nothing else.
        padded: names of parameters of which elements may be dropped: padding, heads that another rank tells.
        replicated: names of parameters that every rank holds whole; the export may take any rank's.
        tensors: the checkpoint tensors that must come out, in wire order; None takes what comes.
        groups: names of parameters to export together, in calls of their own. Scratch memory is about 100 bytes per
            element of the largest group over all ranks, beside what ``export`` takes; None is one group of all.
        rank: set where ``export`` gathers by itself and runs on all ranks at once: it then gets this rank's
            mapping, and must give every rank all checkpoint tensors. ``of`` still needs all ranks' metadata.
    """

    export: Export
    padded: Collection[str] = ()
    replicated: Collection[str] = ()
    tensors: Sequence[ParamMeta] | None = None
    groups: Sequence[Collection[str]] | None = None
    rank: int | None = None
    _known: dict[str, Probed] = field(default_factory=dict, repr=False)

    def of(self, params: Params) -> Probed:
        """The maps of all ranks, from one rank's parameters or a list of all ranks'; meta tensors will do.

        A layout that was seen before is answered from memory.

        Raises:
            ProbeError: the function computes, drops or repeats undeclared elements, writes to its inputs,
                changes a dtype, gives other tensors than declared, or does something else the second time.
        """
        single = isinstance(params, Mapping)
        ranks = [params] if isinstance(params, Mapping) else list(params)
        layout = [[ParamMeta.of(name, one) for name, one in rank.items()] for rank in ranks]
        attributes = [{name: read(one) for name, one in rank.items()} for rank in ranks]
        key = repr((single, layout, attributes))
        if key not in self._known:
            self._known[key] = self._probe(layout, attributes, 0 if single else self.rank)
        return self._known[key]

    def _probe(
        self,
        layout: Sequence[Sequence[ParamMeta]],
        attributes: Sequence[Mapping[str, TPAttributes]],
        alone: int | None,
    ) -> Probed:
        names = list(dict.fromkeys(meta.name for metas in layout for meta in metas))
        _check_declared(names, (self.padded, self.replicated), self.groups)
        declared = None if self.tensors is None else {meta.name: meta for meta in self.tensors}
        found: list[ParamMeta] = []
        whole = Probed((), tuple({} for _ in layout), {}, {}, {})
        for group in [names] if self.groups is None else self.groups:
            metas = [[meta for meta in several if meta.name in group] for several in layout]
            part = GroupProbe(
                self.export, metas, attributes, alone, self.padded, self.replicated, declared
            ).result()
            repeated = {meta.name for meta in part.tensors} & {meta.name for meta in found}
            if repeated:
                raise ProbeError(
                    f"export gave {min(repeated)!r} for two groups of parameters, expected each checkpoint tensor "
                    "whole from one group; put these parameters in one group"
                )
            for into, made in zip(whole.maps, part.maps, strict=True):
                for name, one in made.items():
                    into[name] = replace(one, outputs=tuple(number + len(found) for number in one.outputs))
            found += part.tensors
            whole.aliases.update(part.aliases)
            whole.dropped.update(part.dropped)
            whole.replicas.update(part.replicas)
        return self._in_order(whole, names, found)

    def _in_order(self, whole: Probed, names: Sequence[str], found: Sequence[ParamMeta]) -> Probed:
        """Parameters in one order on all ranks, tensors in the declared order."""
        tensors = tuple(found if self.tensors is None else self.tensors)
        place = {meta.name: number for number, meta in enumerate(tensors)}
        absent = [meta.name for meta in tensors if meta not in found]
        if absent:
            raise ProbeError(
                f"export gave no {absent[0]!r}, which is declared; correct the export or the declared tensors"
            )
        maps = tuple(
            {
                name: replace(one, outputs=tuple(place[found[number].name] for number in one.outputs))
                for name in names
                if (one := made.get(name)) is not None
            }
            for made in whole.maps
        )
        return replace(whole, tensors=tensors, maps=maps)


def plan_of(probed: Probed, bucket_bytes: int) -> TransferPlan:
    """The plan of all updates of a probed trainer, as ``Deployment.plan`` gives it."""
    return TransferPlan(probed.tensors, tuple(tuple(one.values()) for one in probed.maps), bucket_bytes)


def _check_declared(
    names: Sequence[str], declared: Sequence[Collection[str]], groups: Sequence[Collection[str]] | None
) -> None:
    listed = [name for group in groups or () for name in group]
    unknown = [name for several in (*declared, listed) for name in several if name not in names]
    if unknown:
        raise ProbeError(
            f"{unknown[0]!r} is declared, but no parameter has that name; correct the declaration"
        )
    for name in names:
        if groups is not None and listed.count(name) != 1:
            raise ProbeError(
                f"parameter {name!r} is in {listed.count(name)} groups, expected one; correct the groups"
            )
