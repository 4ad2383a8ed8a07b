"""Tensors of any dtype and shape, cut one way on a trainer and another way on one rollout, and what changes
them.

For checks of bytes by hand: no protocol, no clock, no group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from hypothesis import event
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.digest import combine, state_digest
from weightsync.reference.layouts import RowMap, export, local_tensor, plain, row_map
from weightsync.reference.params import ParamMeta, TPAttributes, int_view, same_bits
from weightsync.reference.plan import TransferPlan
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.reference.wire.policy import PLAIN_WIRE, WirePolicy
from weightsync.testing.byhand import Update, make_update
from weightsync.testing.strategies import param_metas


@dataclass
class TwoSides:
    """Tensors of any dtype and shape, cut one way on the trainer and another on one rollout.

    Attributes:
        metas: the checkpoint tensors.
        trainer: per trainer rank, the maps.
        rollout: per rollout rank, the maps.
        bucket_bytes: largest bucket.
        piece_elements: largest piece.
        state: the trainer's weights as whole checkpoint tensors.
        wire: how updates are encoded.
    """

    metas: tuple[ParamMeta, ...]
    trainer: list[Mapping[str, RowMap]]
    rollout: list[Mapping[str, RowMap]]
    bucket_bytes: int
    piece_elements: int
    state: list[Tensor] = field(default_factory=list)
    wire: WirePolicy = PLAIN_WIRE

    def __post_init__(self) -> None:
        """Make the plan, the live shards and the sources."""
        maps = tuple(tuple(one.values()) for one in self.trainer)
        self.plan = TransferPlan(self.metas, maps, self.bucket_bytes, self.piece_elements, self.wire)
        self.live = [self.shards(one) for one in self.trainer]
        self.sources = [Source(self.plan, rank, params) for rank, params in enumerate(self.live)]

    def shards(self, maps: Mapping[str, RowMap]) -> dict[str, Tensor]:
        """What the rank with these maps holds of the state: new storage."""
        return {name: local_tensor(one, [self.state[n] for n in one.outputs]) for name, one in maps.items()}

    def targets(self) -> list[Target]:
        """Fresh rollout ranks full of poison."""
        targets = []
        for maps in self.rollout:
            weights = {name: poison(one.local_shape, one.dtype) for name, one in maps.items()}
            targets.append(Target(self.metas, maps, weights))
        return targets

    def train(self, chosen: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Flip bits, (position, mask) per tensor, in the state and in every live shard of it."""
        for tensor, flips in zip(self.state, chosen, strict=True):
            for position, mask in flips:
                int_view(tensor)[position] ^= mask
        for maps, params in zip(self.trainer, self.live, strict=True):
            for name, shard in self.shards(maps).items():
                int_view(params[name]).copy_(int_view(shard))

    def full(self, *, version: int = 1, slot: int = 0) -> Update:
        """A full update from a snapshot of the live shards in ``slot``."""
        return make_update(self.plan, self.sources, slot=slot, version=version)

    def delta(self, *, version: int = 2, slot: int = 1) -> Update:
        """The change from the other slot, which holds the version before."""
        return make_update(
            self.plan, self.sources, slot=slot, base_slot=1 - slot, version=version, base=version - 1
        )

    def digest(self) -> int:
        """Digest of the trainer's state."""
        return state_digest(zip(self.metas, self.state, strict=True))

    def expect(self, targets: Sequence[Target]) -> None:
        """Every rollout rank holds its cut of the trainer's state, and together they hold all of it."""
        for maps, target in zip(self.rollout, targets, strict=True):
            for name, shard in self.shards(maps).items():
                assert same_bits(target.weights[name], shard), name
        whole = export(self.rollout, [target.weights for target in targets], self.metas)
        for meta, tensor in zip(self.metas, self.state, strict=True):
            assert same_bits(whole[meta.name], tensor)
        assert combine(run(target.digest()) for target in targets) == self.digest()


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor whose every element has the bits 42."""
    tensor = torch.empty(shape, dtype=dtype)
    int_view(tensor).fill_(42)
    return tensor


def random_state(metas: Sequence[ParamMeta], seed: int) -> list[Tensor]:
    """Whole tensors of random bits."""
    generator = torch.Generator().manual_seed(seed)
    raws = [torch.randint(0, 256, (m.nbytes,), dtype=torch.uint8, generator=generator) for m in metas]
    return [raw.view(meta.dtype).reshape(meta.shape) for raw, meta in zip(raws, metas, strict=True)]


def cut_map(meta: ParamMeta, number: int, dim: int | None, rank: int, world: int) -> RowMap:
    """The map of runtime parameter ``p<number>``, cut along ``dim`` or replicated, for checkpoint tensor
    ``meta``.
    """
    layout = plain(meta, replicated=dim is None)
    values = {} if dim is None else {"tensor_model_parallel": True, "partition_dim": dim}
    name = f"p{number}"
    return row_map(layout, name, TPAttributes(values), rank, world, {meta.name: number})


@st.composite
def two_sides(draw: st.DrawFn) -> TwoSides:
    """Any dtypes, 0-dim and empty tensors; uneven cuts along any dimension, or none."""
    metas = tuple(draw(st.lists(param_metas(), min_size=1, max_size=4, unique_by=lambda meta: meta.name)))
    both = []
    for label in ("trainer", "rollout"):
        world = draw(st.integers(1, 3))
        event(f"{label} ranks: {world}")
        dims = [
            draw(st.none() | st.integers(0, len(m.shape) - 1)) if m.shape and world > 1 else None
            for m in metas
        ]
        maps: list[Mapping[str, RowMap]] = [
            {
                f"p{number}": cut_map(meta, number, dim, rank, world)
                for number, (meta, dim) in enumerate(zip(metas, dims, strict=True))
            }
            for rank in range(world)
        ]
        both.append(maps)
    bucket_bytes = draw(st.sampled_from([1, 110, 150, 300, 4096]))
    piece_elements = draw(st.sampled_from([5, 10, 25, 1 << 31]))
    state = random_state(metas, draw(st.integers(0, 1 << 32)))
    return TwoSides(metas, both[0], both[1], bucket_bytes, piece_elements, state)


@st.composite
def flips(draw: st.DrawFn, *, sides: TwoSides) -> list[list[tuple[int, int]]]:
    """What one optimizer step flips, per tensor: nothing, a few elements, or all of them."""
    chosen: list[list[tuple[int, int]]] = []
    for meta in sides.metas:
        kind = draw(st.sampled_from(["nothing", "few", "all"]))
        count = {"nothing": 0, "few": min(2, meta.numel), "all": meta.numel}[kind]
        last = max(meta.numel - 1, 0)
        several = st.lists(st.integers(0, last), min_size=count, max_size=count, unique=True)
        order = draw(several) if count < meta.numel else range(meta.numel)
        mask = draw(st.sampled_from([1, 0x7F]))
        chosen.append([(position, mask) for position in order])
    return chosen
