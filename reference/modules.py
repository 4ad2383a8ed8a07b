"""What a model is made of: modules, each of which says its checkpoint tensors and its parameters on both sides.

A family of models is a table of modules in their places. To declare a module of your own, derive from ``Module``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from weightsync.reference.heads import HeadCut
from weightsync.reference.layouts import Layout, plain
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta, TPAttributes

Stage = int | Literal["first", "last"]


@dataclass(frozen=True, eq=False, slots=True)
class Param:
    """One runtime parameter of a module on one side.

    Parameters with one ``layout.tensor``, ``layout.row`` and ``attributes`` object share one table of rows: layers
    do so by sharing the module, experts by ``again``.

    Attributes:
        name: its name, inside the module.
        layout: how the whole of it is made of the module's checkpoint tensors.
        attributes: how it is cut; on the trainer, all that the live parameter carries.
        expert: whether the ranks that cut it and hold it are those of the routed experts.
    """

    name: str
    layout: Layout
    attributes: TPAttributes
    expert: bool = False

    def again(self, name: str, *metas: ParamMeta) -> Param:
        """The same for other checkpoint tensors of the same shapes."""
        return replace(self, name=name, layout=replace(self.layout, metas=metas))


class Module(ABC):
    """A part of a model that occurs as a whole, such as attention. Holds sizes, no weights and no place.

    Names are relative: what stands in front of them is told by ``Placed``. One object may stand in many places, and
    should, since then its tables are made once.
    """

    @abstractmethod
    def tensors(self) -> tuple[ParamMeta, ...]:
        """Its checkpoint tensors in wire order."""

    @abstractmethod
    def trainer(self, at: TrainerRank) -> Iterable[Param]:
        """The parameters that a trainer rank holds, as Megatron has them."""

    @abstractmethod
    def rollout(self, at: RolloutRank) -> Iterable[Param]:
        """The parameters that a rollout rank holds, as vLLM has them, or the checkpoint's own without ``fused``."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A module in its place. Prefixes are put in front of its names as they are.

    Attributes:
        module: the module.
        stage: on which pipeline stage the trainer holds it: that of a decoder layer, the first, or the last.
        checkpoint: prefix of the checkpoint tensors.
        trainer: prefix of the trainer's parameters; ``{layer}`` stands for the layer's number on its stage.
        rollout: prefix of the rollout's parameters.
        copy: for a tied copy, the ``checkpoint`` of the entry that it is tied to. It adds no tensors of its own. The
            trainer holds it only where it does not hold that entry, and never speaks for it; on a rollout it is an
            alias.
    """

    module: Module
    stage: Stage
    checkpoint: str
    trainer: str
    rollout: str
    copy: str | None = None

    @property
    def source(self) -> str:
        """Prefix of the checkpoint tensors that it is made of."""
        return self.checkpoint if self.copy is None else self.copy


class Model(ABC):
    """A family with its sizes. Derive from it to declare a family of your own.

    Attributes:
        layers: decoder layers, which pipeline stages share out.
    """

    layers: int

    @abstractmethod
    def modules(self) -> tuple[Placed, ...]:
        """Its modules in wire order."""

    def aliases(self, fused: bool = True) -> dict[str, str]:
        """Second name -> first name of storage that a rollout ties, such as head and embedding."""
        modules = self.modules()
        firsts = {placed.checkpoint: placed for placed in modules if placed.copy is None}

        def name(placed: Placed) -> str:
            return placed.rollout if fused else placed.checkpoint

        return {
            name(placed) + meta.name: name(firsts[placed.copy]) + meta.name
            for placed in modules
            if placed.copy is not None
            for meta in placed.module.tensors()
        }

    def tensors(self) -> tuple[ParamMeta, ...]:
        """Every checkpoint tensor in wire order; a tied one is listed once."""
        places = [placed for placed in self.modules() if placed.copy is None]
        listed = {id(placed.module): placed.module for placed in places}
        metas = {key: module.tensors() for key, module in listed.items()}
        return tuple(
            ParamMeta(placed.checkpoint + meta.name, meta.dtype, meta.shape)
            for placed in places
            for meta in metas[id(placed.module)]
        )

    def numbers(self) -> dict[str, int]:
        """Checkpoint tensor name -> its place in ``tensors()``."""
        return {meta.name: number for number, meta in enumerate(self.tensors())}


def megatron(dim: int, *, stride: int = 1, **others: object) -> TPAttributes:
    """What Megatron stamps on a column-parallel (dim 0) or row-parallel (dim 1) parameter."""
    values = {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride}
    return TPAttributes({**values, "parallel_mode": "row" if dim else "column", "allreduce": True, **others})


def cut_along(dim: int, *, stride: int = 1, **others: object) -> TPAttributes:
    """How a rollout's parameter is cut: equal parts of ``dim``, or ``stride`` blocks that are each cut so."""
    return TPAttributes(
        {"tensor_model_parallel": True, "partition_dim": dim, "partition_stride": stride, **others}
    )


def by_heads(name: str, layout: Layout, cut: HeadCut) -> Param:
    """A rollout's parameter that is cut by whole heads."""
    counts = {"num_attention_heads": cut.heads, "num_query_groups": cut.kv_heads}
    return Param(name, replace(layout, heads=cut), cut_along(cut.dim, **counts))


def everywhere(name: str, meta: ParamMeta, **attributes: object) -> Param:
    """A parameter that every rank holds whole, by design, such as a norm's weight."""
    return Param(name, plain(meta, replicated=True), TPAttributes(attributes))
