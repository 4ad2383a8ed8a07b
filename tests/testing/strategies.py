"""Hypothesis strategies for weights: arbitrary bits, strides and aliases, TP cuts, updates, model shapes.

Values are drawn as bytes, so NaN payloads, both zeros, infinities and subnormal numbers all occur; compare
them with ``weightsync.reference.params.same_bits``. Every argument is by keyword.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import event
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.attributes import TP_ATTRIBUTES
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.model import ModelShape
from weightsync.reference.params import ParamMeta, TPAttributes, int_view
from weightsync.reference.shards import split

DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int8,
)
"""Dtypes that weights travel in."""

_ATTRIBUTE_VALUES: dict[str, st.SearchStrategy[object]] = {
    "partition_dim": st.integers(-1, 2),
    "partition_stride": st.integers(1, 3),
    "partition_sizes": st.lists(st.integers(0, 4), max_size=3),
    "parallel_mode": st.sampled_from(["column", "row", "duplicated", None]),
    "qkv_split_shapes": st.none() | st.lists(st.integers(1, 4), min_size=3, max_size=3),
    "grad_norm_group": st.none() | st.sampled_from(["mtp", "other"]),
    "pad_length": st.integers(0, 3),
    "group": st.none() | st.builds(object),
    "gtp_replica_group": st.none() | st.builds(object),
    "num_attention_heads": st.integers(1, 9),
    "num_query_groups": st.integers(1, 3),
}


@dataclass(frozen=True)
class TPLayout:
    """How a full tensor of ``shape`` is cut along ``dim`` for ``world`` ranks, by ``stride`` or ``sizes``."""

    shape: tuple[int, ...]
    dim: int
    world: int
    stride: int = 1
    sizes: tuple[int, ...] | None = None

    @property
    def attributes(self) -> TPAttributes:
        """The attributes that say so."""
        values: dict[str, object] = {"tensor_model_parallel": True, "partition_dim": self.dim}
        values["partition_stride"] = self.stride
        if self.sizes is not None:
            values["partition_sizes"] = list(self.sizes)
        return TPAttributes(values)


@dataclass(frozen=True)
class ShardedParam:
    """A full tensor, and every rank's shard of it with its attributes stamped on, in rank order."""

    full: Tensor
    layout: TPLayout
    shards: tuple[Tensor, ...]


@dataclass(frozen=True)
class Update:
    """Contiguous bits before and after an optimizer step, and the sorted flat positions whose bits differ."""

    old: Tensor
    new: Tensor
    positions: tuple[int, ...]


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """The dtypes that weights travel in."""
    return st.sampled_from(DTYPES)


def shapes(*, min_dims: int = 0, max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes, also of no dimensions and with sides of length zero."""
    return st.lists(st.integers(0, max_side), min_size=min_dims, max_size=max_dims).map(tuple)


def param_metas(*, max_dims: int = 3, max_side: int = 5) -> st.SearchStrategy[ParamMeta]:
    """Metadata of one tensor with a dotted name."""
    words = st.text("abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=6)
    names = st.lists(words, min_size=1, max_size=3).map(".".join)
    return st.builds(ParamMeta, names, dtypes(), shapes(max_dims=max_dims, max_side=max_side))


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    strided: bool = False,
) -> Tensor:
    """Tensors of arbitrary bits; contiguous, or with ``strided`` of any strides and storage offset.

    Left out, ``dtype`` is any of ``DTYPES`` and ``shape`` any of ``shapes()``.
    """
    chosen = draw(dtypes()) if dtype is None else dtype
    sides = draw(shapes()) if shape is None else shape
    size = math.prod(sides)
    raw = bytearray(draw(st.binary(min_size=size * chosen.itemsize, max_size=size * chosen.itemsize)))
    bits = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    tensor = bits.clone().view(chosen).reshape(sides)
    if size:
        spots = st.tuples(st.integers(0, size - 1), st.sampled_from(special_bits(chosen)))
        for position, pattern in draw(st.lists(spots, max_size=3)):
            int_view(tensor)[position] = pattern
    return draw(_restrided(tensor)) if strided else tensor


@st.composite
def named_tensors(
    draw: st.DrawFn, *, dtype: torch.dtype | None = None, max_size: int = 4
) -> dict[str, Tensor]:
    """Named tensors of which later ones may alias an earlier one: the same object, or its storage."""
    named: dict[str, Tensor] = {}
    for number in range(draw(st.integers(1, max_size))):
        kind = draw(st.sampled_from(["own", "same", "view"])) if named else "own"
        event(f"tensor: {kind}")
        if kind == "own":
            named[f"w{number}"] = draw(tensors(dtype=dtype, strided=True))
        else:
            first = named[draw(st.sampled_from(sorted(named)))]
            named[f"w{number}"] = first if kind == "same" else first.detach()
    return named


def tp_attributes() -> st.SearchStrategy[TPAttributes]:
    """Any subset of the known attributes, with any values that make sense for one of them alone."""
    values = {name: _ATTRIBUTE_VALUES.get(name, st.booleans()) for name in TP_ATTRIBUTES}
    return st.fixed_dictionaries({}, optional=values).map(TPAttributes)


@st.composite
def tp_layouts(draw: st.DrawFn, *, max_world: int = 4, max_dims: int = 3, uneven: bool = True) -> TPLayout:
    """Cuts of tensors of one to ``max_dims`` dimensions: plain (also ``uneven``), strided, or by blocks."""
    sides = list(draw(shapes(min_dims=1, max_dims=max_dims)))
    dim = draw(st.integers(0, len(sides) - 1))
    world = draw(st.integers(1, max_world))
    kind = draw(st.sampled_from(["plain", "strided", "blocks"]))
    stride, sizes = 1, None
    if kind == "plain":
        sides[dim] = draw(st.integers(0, 9)) if uneven else world * draw(st.integers(0, 3))
        kind = "even" if sides[dim] % world == 0 else "uneven"
    elif kind == "strided":
        stride = draw(st.integers(1, 3))
        sides[dim] = world * stride * draw(st.integers(0, 2))
    else:
        sizes = tuple(draw(st.lists(st.integers(0, 3), min_size=1, max_size=3)))
        sides[dim] = world * sum(sizes)
    event(f"cut: {kind}, world {'1' if world == 1 else 'more'}")
    return TPLayout(tuple(sides), dim, world, stride, sizes)


@st.composite
def sharded_params(draw: st.DrawFn, *, dtype: torch.dtype | None = None, max_world: int = 4) -> ShardedParam:
    """Full tensors with their shards, attributes on every shard."""
    layout = draw(tp_layouts(max_world=max_world))
    full = draw(tensors(dtype=dtype, shape=layout.shape))
    shards = tuple(
        layout.attributes.stamp(split(full, layout.world, rank, layout.dim, layout.stride, layout.sizes))
        for rank in range(layout.world)
    )
    return ShardedParam(full, layout, shards)


@st.composite
def updates(
    draw: st.DrawFn,
    *,
    dtype: torch.dtype | None = None,
    shape: tuple[int, ...] | None = None,
    max_changed: int | None = None,
) -> Update:
    """Old and new bits that differ in a drawn number of elements, from none to all; shrinks to few."""
    old = draw(tensors(dtype=dtype, shape=shape))
    bits = int_view(old)
    width = 8 * old.dtype.itemsize
    most = len(bits) if max_changed is None else min(max_changed, len(bits))
    count = draw(st.integers(0, most))
    every = st.sets(st.integers(0, max(len(bits) - 1, 0)), min_size=count, max_size=count)
    positions = sorted(draw(every)) if count < len(bits) else list(range(len(bits)))
    new = old.clone()
    for position in positions:
        flipped = draw(st.integers(1, 2**width - 1) | st.just(1 << (width - 1)))
        raw = (int(bits[position]) ^ flipped) & (2**width - 1)
        int_view(new)[position] = _signed(raw, old.dtype)
    event("update: " + ("nothing" if not count else "everything" if count == len(bits) else "something"))
    return Update(old, new, tuple(positions))


@st.composite
def model_shapes(
    draw: st.DrawFn, *, tp: Sequence[int] = (1, 2), dtype: torch.dtype = torch.bfloat16
) -> ModelShape:
    """Small decoders that every TP size in ``tp`` can cut, on trainer and rollout alike.

    Among them: heads that no TP size divides, fewer key/value heads than ranks, tied and untied heads, biases,
    norms on heads.
    """
    kv_heads, widest = draw(st.integers(1, 4)), max(tp)
    fewest = -(-widest // kv_heads)
    heads = kv_heads * draw(st.integers(fewest, fewest + 2))
    even = all(heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0) for size in tp)
    event("heads: " + ("uneven" if not even else "replicated" if kv_heads < widest else "cut"))
    return ModelShape(
        vocab=draw(st.integers(1, 12)),
        hidden=draw(st.integers(1, 5)),
        intermediate=math.lcm(*tp) * draw(st.integers(1, 3)),
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.integers(1, 3)),
        tied=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        dtype=dtype,
    )


@st.composite
def deployments(draw: st.DrawFn, *, max_tp: int = 3, dtype: torch.dtype = torch.bfloat16) -> Deployment:
    """A small decoder on a trainer of 1 to ``max_tp`` ranks and on one or two rollouts, fused or not."""
    sizes = st.integers(1, max_tp)
    tp = draw(sizes)
    layouts = draw(
        st.lists(st.builds(RolloutLayout, sizes, st.booleans(), st.just(1)), min_size=1, max_size=2)
    )
    model = draw(model_shapes(tp=(tp, *(layout.tp for layout in layouts)), dtype=dtype))
    event(f"trainer ranks: {tp}")
    bucket_bytes = draw(st.sampled_from([200, 1000, 1 << 20]))
    return Deployment(model, tp, tuple(layouts), bucket_bytes, trainer_multiple=2, rollout_multiple=4)


@st.composite
def checkpoints(draw: st.DrawFn, *, model: ModelShape) -> dict[str, Tensor]:
    """Whole checkpoints of ``model``: random bits from one drawn seed, since they are too many to draw."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    named = {}
    for meta in model.tensors():
        raw = torch.randint(0, 256, (meta.nbytes,), dtype=torch.uint8, generator=generator)
        named[meta.name] = raw.view(meta.dtype).reshape(meta.shape)
    return named


def special_bits(dtype: torch.dtype) -> tuple[int, ...]:
    """Bit patterns, as ``int_view`` shows them, where a comparison or a copy by value goes wrong.

    Both zeros, 1, both infinities, quiet and signalling NaNs with payloads; for integers the two extremes.
    """
    width = 8 * dtype.itemsize
    sign = 1 << (width - 1)
    if not dtype.is_floating_point:
        return tuple(_signed(raw, dtype) for raw in (0, 1, sign - 1, sign, 2 * sign - 1))
    (one,) = int_view(torch.ones(1, dtype=dtype)).tolist()
    infinity = int_view(torch.full((1,), math.inf).to(dtype)).tolist()[0]
    raws = (0, sign, infinity, infinity | sign, infinity | 1, sign - 1, 2 * sign - 1, 1)
    return (one, *(_signed(raw & (2 * sign - 1), dtype) for raw in raws))


def _signed(raw: int, dtype: torch.dtype) -> int:
    """The pattern ``raw`` as ``int_view`` holds it: one byte is unsigned, more are signed."""
    width = 8 * dtype.itemsize
    return raw - (1 << width) if width > 8 and raw >= 1 << (width - 1) else raw


@st.composite
def _restrided(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """The same shape and bits in another arrangement of memory."""
    kind = draw(st.sampled_from(["contiguous", "permuted", "stepped", "offset"]))
    event(f"strides: {kind}")
    if kind == "permuted":
        order = draw(st.permutations(range(tensor.dim())))
        inverse = [order.index(dim) for dim in range(tensor.dim())]
        return tensor.permute(order).contiguous().permute(inverse)
    if kind == "stepped" and tensor.dim():
        room = torch.zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]), dtype=tensor.dtype)
        return room[..., ::2].copy_(tensor)
    if kind == "offset":
        room = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)
        return room[1:].reshape(tensor.shape).copy_(tensor)
    return tensor
