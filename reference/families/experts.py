"""Mixture of experts: the router, and the routed experts, which have parallel sizes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from weightsync.reference.families.basic import BF16
from weightsync.reference.layouts import Layout, concat, gate_up, plain
from weightsync.reference.modules import Module, Param, cut_along, everywhere, megatron
from weightsync.reference.parallel import RolloutRank, TrainerRank
from weightsync.reference.params import ParamMeta, TPAttributes

ExpertForm = Literal["grouped", "sequential", "stacked"]
"""How a trainer holds its experts: Megatron's grouped GEMM, a parameter ``linear_fc1.weight3`` each; its
``local_experts.3``, a module each; or one tensor ``linear_fc1.weight`` with a dimension more, (experts, rows, columns).

The first two names are Megatron's. That of the third is not settled there: check it against your version.
"""


@dataclass(frozen=True)
class Router(Module):
    """The linear map from a token to its experts' scores: whole on every rank.

    Attributes:
        bias: the correction that balances the load (DeepSeek-V3): fp32 whatever the model's dtype, a buffer in
            Megatron, which calls it ``expert_bias``.
    """

    hidden: int
    experts: int
    bias: bool = False
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """``gate.weight``, and the correction."""
        weight = ParamMeta("gate.weight", self.dtype, (self.experts, self.hidden))
        bias = ParamMeta("gate.e_score_correction_bias", torch.float32, (self.experts,))
        return (weight, bias) if self.bias else (weight,)

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """``router.weight`` and ``router.expert_bias``."""
        weight, *bias = self.tensors()
        yield everywhere("router.weight", weight, sequence_parallel=at.layout.tp > 1)
        for meta in bias:
            yield everywhere("router.expert_bias", meta)

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """Under the checkpoint's names."""
        return (everywhere(meta.name, meta) for meta in self.tensors())


@dataclass(frozen=True)
class Experts(Module):
    """Routed experts with gated MLPs.

    Expert i of EP rank e of ``ep`` on the trainer is expert i + e * count // ep of the checkpoint. Megatron stamps
    ``allreduce`` False where EP > 1, and no ``parallel_mode`` on experts that are cut or shared out. Its Transformer
    Engine may stamp stride 1 on a gated fc1, which is no cut of [gate; up] for more than one expert-TP rank: such
    attributes are refused, set ``partition_stride`` to 2.

    Attributes:
        count: experts in all.
        intermediate: width of one of them.
        form: how the trainer holds them.
    """

    hidden: int
    intermediate: int
    count: int
    form: ExpertForm = "grouped"
    dtype: torch.dtype = BF16

    def tensors(self) -> tuple[ParamMeta, ...]:
        """Gate, up and down, expert by expert."""
        return tuple(meta for expert in range(self.count) for meta in self._expert(expert))

    def trainer(self, at: TrainerRank) -> Iterator[Param]:
        """fc1 and fc2 of the rank's experts."""
        held = at.experts(self.count)
        topology: dict[str, Any] = {"allreduce": at.layout.ep == 1}
        if at.layout.ep > 1 or at.layout.expert_tp > 1 or self.form == "stacked":
            topology["parallel_mode"] = None
        if self.form == "stacked":
            first, second = megatron(1, stride=2, **topology), megatron(2, **topology)
            yield Param("linear_fc1.weight", self._stacked(held, (0, 1)), first, expert=True)
            yield Param("linear_fc2.weight", self._stacked(held, (2,)), second, expert=True)
            return
        attributes = megatron(0, stride=2, **topology), megatron(1, **topology)
        names = {"grouped": "linear_fc{}.weight{}", "sequential": "local_experts.{1}.linear_fc{0}.weight"}
        yield from self._each(held, lambda fc, local: names[self.form].format(fc, local), attributes)

    def rollout(self, at: RolloutRank) -> Iterator[Param]:
        """``w13_weight`` (experts, 2 * intermediate, hidden), ``w2_weight`` (experts, hidden, intermediate)."""
        held = at.experts(self.count)
        if at.layout.fused:
            if held:
                layout = self._stacked(held, (0, 1))
                yield Param("w13_weight", layout, cut_along(1, stride=2), expert=True)
                yield Param("w2_weight", self._stacked(held, (2,)), cut_along(2), expert=True)
            return
        attributes = cut_along(0), cut_along(1)
        for which in range(3 if held else 0):
            first = self._expert(held[0])[which]
            param = Param(first.name, plain(first), attributes[which == 2], expert=True)
            for expert in held:
                meta = self._expert(expert)[which]
                yield param.again(meta.name, meta)

    def _expert(self, expert: int) -> tuple[ParamMeta, ParamMeta, ParamMeta]:
        rows, columns = (self.intermediate, self.hidden), (self.hidden, self.intermediate)
        return (
            ParamMeta(f"{expert}.gate_proj.weight", self.dtype, rows),
            ParamMeta(f"{expert}.up_proj.weight", self.dtype, rows),
            ParamMeta(f"{expert}.down_proj.weight", self.dtype, columns),
        )

    def _stacked(self, held: range, which: tuple[int, ...]) -> Layout:
        metas = [self._expert(expert)[one] for expert in held for one in which]
        rows = sum(metas[one].shape[0] for one in range(len(which)))
        return replace(concat(*metas), shape=(len(held), rows, metas[0].shape[1]))

    def _each(
        self, held: range, name: Callable[[int, int], str], attributes: tuple[TPAttributes, TPAttributes]
    ) -> Iterator[Param]:
        """fc1 and fc2 of each expert, all of them with the tables of the first one."""
        gate, up, down = self._expert(held[0])
        first = Param("", gate_up(gate, up), attributes[0], expert=True)
        second = Param("", plain(down), attributes[1], expert=True)
        for local, expert in enumerate(held):
            gate, up, down = self._expert(expert)
            yield first.again(name(1, local), gate, up)
            yield second.again(name(2, local), down)
