"""A workload without training: seeded elements change to seeded other bits, the same on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import Parameter

from weightsync.cli.model.sharded import ShardedModel
from weightsync.reference.deployment import Deployment
from weightsync.reference.dirty import DirtyBits
from weightsync.reference.params import ParamMeta, fresh_copy, int_view

_EXPONENT_BITS = {
    torch.bfloat16: 8,
    torch.float16: 5,
    torch.float32: 8,
    torch.float64: 11,
    torch.float8_e4m3fn: 4,
    torch.float8_e5m2: 5,
}
SPECIAL_SHARE = 8
"""One change in this many becomes a NaN with a payload, an infinity or a zero with a sign."""


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to one checkpoint tensor in one step.

    Attributes:
        positions: flat checkpoint positions that change, (n,) int64, distinct and sorted.
        flips: bits to flip at each, (n,) integer of the tensor's item size, never 0.
        targets: the bits that become special values there, (n,); only read where ``special``.
        special: where the new bits are ``targets`` unless the old ones already are, (n,) bool.
    """

    positions: Tensor
    flips: Tensor
    targets: Tensor
    special: Tensor

    def applied(self, old: Tensor, chosen: Tensor) -> Tensor:
        """New bits at the m ``chosen`` (n,) bool positions, all different from their ``old`` bits (m,)."""
        targets = self.targets[chosen]
        use = self.special[chosen] & (targets != old)
        return torch.where(use, targets, old ^ self.flips[chosen])


@dataclass(frozen=True)
class SyntheticWorkload:
    """Which elements change in which step: pure functions of the tensors, the density and the seed.

    Attributes:
        metas: checkpoint tensors in wire order.
        density: expected share of elements that change in one step, 0 to 1.
        seed: draws everything.
    """

    metas: Sequence[ParamMeta]
    density: float
    seed: int

    def counts(self, step: int) -> tuple[int, ...]:
        """Elements of each tensor that change in ``step``, from 1; binomial, so 0 to all of them."""
        sizes = [meta.numel for meta in self.metas]
        return tuple(int(count) for count in self._random(step).binomial(sizes, self.density))

    def initial(self) -> dict[str, Tensor]:
        """Checkpoint name -> tensor of arbitrary bits, NaN payloads among them, before the first step."""
        tensors = {}
        for number, meta in enumerate(self.metas):
            raw = self._random(0, number).integers(0, 256, meta.nbytes, dtype=np.uint8)
            tensors[meta.name] = torch.from_numpy(raw).view(meta.dtype).reshape(meta.shape)
        return tensors

    def change(self, step: int, number: int) -> Change:
        """What ``step`` does to tensor ``number``: exactly ``counts(step)[number]`` distinct positions."""
        meta = self.metas[number]
        count = self.counts(step)[number]
        random = self._random(step, number)
        positions = np.sort(random.choice(meta.numel, count, replace=False))
        bits = 8 * meta.itemsize
        flips = random.integers(1, (1 << bits) - 1, count, dtype=np.uint64, endpoint=True)
        targets = random.choice(np.array(special_bits(meta.dtype), dtype=np.uint64), count)
        special = random.integers(0, SPECIAL_SHARE, count) == 0
        return Change(
            torch.from_numpy(positions.astype(np.int64)),
            _as_bits(flips, meta),
            _as_bits(targets, meta),
            torch.from_numpy(special),
        )

    def _random(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])


class SyntheticTrainer:
    """A trainer rank whose steps are a SyntheticWorkload; the same attributes and methods as DemoTrainer.

    Args:
        deployment: who holds what.
        rank: this rank; whose shards ``params`` gives.
        density: expected share of elements that change in one step.
        seed: draws everything.
        weights: checkpoint name -> tensor to start from; ``SyntheticWorkload.initial`` when left out.
        dirty: mark what changes, as an optimizer's hook would.

    Attributes:
        dirty: per rank, the marks; empty without them.
    """

    def __init__(
        self,
        deployment: Deployment,
        rank: int,
        *,
        density: float,
        seed: int,
        weights: Mapping[str, Tensor] | None = None,
        dirty: bool = False,
    ) -> None:
        self.rank = rank
        self.workload = SyntheticWorkload(deployment.tensors, density, seed)
        self.model = ShardedModel(deployment, self.workload.initial() if weights is None else weights)
        self.dirty = [DirtyBits(params) for params in self.model.params] if dirty else []
        self.steps = 0

    @property
    def params(self) -> Mapping[str, Parameter]:
        """Runtime name -> this rank's live parameter with real TP attributes; changed in place."""
        return self.params_of(self.rank)

    def params_of(self, rank: int) -> Mapping[str, Parameter]:
        """As ``params``, of another rank."""
        return self.model.params[rank]

    def collect(self) -> None:
        """Nothing to do: what changes is drawn."""

    def step(self) -> dict[str, float]:
        """Change ``workload.counts(step)`` elements of each tensor on every rank; ``changed``: how many in all.

        Padding rows of the vocabulary all change too, as under an optimizer; those changes never travel.
        """
        self.steps += 1
        changes = [self.workload.change(self.steps, number) for number in range(len(self.workload.metas))]
        for rank, maps in enumerate(self.model.deployment.trainer_maps):
            for name, row_map in maps.items():
                param = self.model.params[rank][name]
                before, bits = fresh_copy(param) if self.dirty else None, int_view(param)
                bits.view(-1, row_map.width)[row_map.tensor < 0] ^= 1
                for output, number in enumerate(row_map.outputs):
                    change = changes[number]
                    held, local = row_map.to_local(output, change.positions)
                    bits[local] = change.applied(bits[local], held)
                if before is not None:
                    self.dirty[rank].mark(name, param, before)
        return {"changed": sum(len(change.positions) for change in changes)}

    def export(self) -> dict[str, Tensor]:
        """Hugging Face name -> whole tensor of the present weights: the oracle for every rollout."""
        return self.model.export()


def special_bits(dtype: torch.dtype) -> tuple[int, ...]:
    """Bit patterns that value comparisons get wrong: both zeros, an infinity, NaNs with payload and sign."""
    bits = 8 * dtype.itemsize
    sign, ones = 1 << (bits - 1), (1 << bits) - 1
    exponent_bits = _EXPONENT_BITS.get(dtype)
    if exponent_bits is None:
        return (0, sign, ones, sign - 1)
    mantissa_bits = bits - 1 - exponent_bits
    exponent = ((1 << exponent_bits) - 1) << mantissa_bits
    quiet = 1 << (mantissa_bits - 1)
    return (0, sign, exponent, exponent | quiet, exponent | quiet | 1, exponent | 1, ones)


def _as_bits(values: NDArray[np.uint64], meta: ParamMeta) -> Tensor:
    unsigned = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[meta.itemsize]
    signed = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}[meta.itemsize]
    return torch.from_numpy(values.astype(unsigned).view(signed))
