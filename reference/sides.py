"""The two sides of a reshard as tensor-parallel attributes tell them, never names; and gathering by them.

How a shard is laid out is in its attributes: a gated fc1, [gate; up] on every rank, has ``partition_stride``
2, and packed blocks have ``partition_sizes``, those of ``packed_sizes``. A fc1 without a gate has neither and
stays in rank order, whatever it is called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from weightsync.reference.errors import MissingTPAttributes, PlanMismatch
from weightsync.reference.params import TPAttributes, compare, read
from weightsync.reference.reshard import reshard
from weightsync.reference.shards import Part, parts


@dataclass(frozen=True)
class Side:
    """How one side holds a parameter.

    Attributes:
        shapes: every rank's local shape, in rank order.
        attributes: the attributes that every rank's tensor carries.
    """

    shapes: tuple[tuple[int, ...], ...]
    attributes: TPAttributes

    @classmethod
    def of(cls, name: str, shards: Sequence[Tensor]) -> Side:
        """The side whose ranks hold ``shards``, in rank order. Reads no weights.

        Raises:
            PlanMismatch: no shards, or two ranks carry different attributes.
        """
        if not shards:
            raise PlanMismatch(
                f"parameter {name!r} has no shards, expected one per rank; pass every rank's shard in rank order"
            )
        for rank, shard in enumerate(shards):
            for difference in compare(shards[0], shard):
                raise PlanMismatch(
                    f"parameter {name!r} on ranks 0 and {rank}: {difference}, expected equal attributes; carry "
                    "them from the live parameter at every copy"
                )
        return cls(tuple(tuple(shard.shape) for shard in shards), read(shards[0]))

    @classmethod
    def cut(cls, shape: Sequence[int], attributes: TPAttributes, world: int) -> Side:
        """The side of ``world`` ranks that hold a parameter of full ``shape`` as ``attributes`` say.

        Raises:
            PlanMismatch: as ``shards.segments``.
        """
        stride, sizes = attributes.partition_stride, attributes.partition_sizes
        dim = attributes.partition_dim if attributes.sharded else None
        held = parts(shape, world, dim, stride=stride, sizes=sizes)
        return cls(tuple(part.local_shape for part in held), attributes)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.shapes)

    @property
    def dim(self) -> int | None:
        """The dimension that is cut; None where every rank holds all of it, or no attribute says which."""
        known = self.cut_up and 0 <= self.attributes.partition_dim < len(self.shapes[0])
        return self.attributes.partition_dim if known else None

    @property
    def cut_up(self) -> bool:
        """True when there are several ranks and each holds its own cut."""
        return self.world > 1 and self.attributes.sharded

    def full_shape(self, dim: int | None) -> tuple[int, ...]:
        """Full shape of what the ranks hold together when it is cut along ``dim``, or when each holds all."""
        if dim is None:
            return self.shapes[0]
        length = sum(shape[dim] for shape in self.shapes)
        return (*self.shapes[0][:dim], length, *self.shapes[0][dim + 1 :])

    def parts(self, name: str, dim: int | None) -> tuple[Part, ...]:
        """What each rank holds; with stride 1 and no sizes, its real length says where it begins, uneven or not.

        Raises:
            PlanMismatch: a local shape is not what stride, sizes or replication give it.
        """
        shape, sizes = self.full_shape(dim), self.attributes.partition_sizes
        stride = 1 if dim is None else self.attributes.partition_stride
        real = None if dim is None or sizes is not None or stride != 1 else [one[dim] for one in self.shapes]
        try:
            held = parts(
                shape, self.world, dim, stride=stride, sizes=sizes, blocks=None if real is None else [real]
            )
        except PlanMismatch as error:
            raise PlanMismatch(f"parameter {name!r}: {error}") from error
        for rank, (found, part) in enumerate(zip(self.shapes, held, strict=True)):
            if found != part.local_shape:
                raise PlanMismatch(
                    f"parameter {name!r} has shape {list(found)} on rank {rank} of {self.world}, expected "
                    f"{list(part.local_shape)} as part of {list(shape)}; correct the attributes or the shards"
                )
        return held


def agree(name: str, source: Side, destination: Side) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """Both sides' parts of parameter ``name``, for ``schedule`` and ``reshard``.

    Each side is cut along its own ``partition_dim``. Where the source's is missing or does not give the
    destination's full shape, that of a tensor-parallel destination wins. A side that is not marked
    tensor-parallel holds all of it on every rank.

    Raises:
        MissingTPAttributes: several ranks without ``tensor_model_parallel``, or marked and without a
            ``partition_dim`` that the shape has.
        PlanMismatch: the sides hold different numbers of elements, as a whole or in a packed block; the
            dimension does not tile by both strides; or it is cut by heads, which equal parts cannot tell.
    """
    for side in (source, destination):
        _require_told(name, side)
    dims = [dim for dim in (source.dim, destination.dim) if dim is not None]
    for side, known in ((source, bool(dims)), (destination, destination.dim is not None)):
        if side.cut_up and not known:
            raise MissingTPAttributes(
                f"parameter {name!r} of local shape {list(side.shapes[0])} is tensor-parallel with "
                f"partition_dim {side.attributes.partition_dim}; carry the attributes from the live parameter"
            )
    full = destination.full_shape(destination.dim)
    fitting = [dim for dim in dims if source.full_shape(dim) == full]
    dim = (*fitting, dims[-1])[0] if source.cut_up else None
    _require_equal_sizes(name, source, dim, destination)
    if dim is not None and dim == destination.dim:
        _require_tiling(name, source, destination, full[dim])
    return source.parts(name, dim), destination.parts(name, destination.dim)


def gather(name: str, shards: Sequence[Tensor]) -> Tensor:
    """The full tensor of all ranks' shards, by the attributes they carry: new contiguous storage, none on it.

    Raises:
        MissingTPAttributes: as ``agree``.
        PlanMismatch: as ``Side.of`` and ``Side.parts``; replicas are of one shape, and rank 0's is taken.
    """
    side = Side.of(name, shards)
    whole = Side((side.full_shape(side.dim),), TPAttributes({}))
    (full,) = reshard(shards, *agree(name, side, whole))
    return full


def packed_sizes(lengths: Sequence[int], world: int) -> tuple[int, ...]:
    """``partition_sizes`` of packed blocks of these full ``lengths``, each cut in equal parts.

    A gated delta net's ``conv1d`` has blocks q, k, v: ``packed_sizes((qk, qk, v), world)``; its ``in_proj``
    has six: ``packed_sizes((qk, qk, v, v, value_heads, value_heads), world)``.

    Raises:
        PlanMismatch: a length does not divide by ``world``.
    """
    if world < 1 or any(length % world for length in lengths):
        raise PlanMismatch(
            f"packed blocks of {list(lengths)} elements do not divide by {world} ranks; choose a "
            "tensor-parallel size that divides each of them"
        )
    return tuple(length // world for length in lengths)


def _require_told(name: str, side: Side) -> None:
    if side.world > 1 and "tensor_model_parallel" not in side.attributes.values:
        raise MissingTPAttributes(
            f"parameter {name!r} of local shape {list(side.shapes[0])} carries no tensor_model_parallel "
            f"attribute, so nobody can tell what each of {side.world} ranks holds; carry the attributes from "
            "the live parameter, or set it to False where every rank holds all of it"
        )
    if side.cut_up and "num_query_groups" in side.attributes.values:
        raise PlanMismatch(
            f"parameter {name!r} carries num_query_groups: it is cut by heads, which stride and sizes do not "
            "tell; make its parts from HeadCut.held"
        )


def _require_equal_sizes(name: str, source: Side, dim: int | None, destination: Side) -> None:
    found, expected = source.full_shape(dim), destination.full_shape(destination.dim)
    if found != expected:
        marked = "a side that is marked tensor-parallel probably holds all of it on every rank (replicated)"
        raise PlanMismatch(
            f"parameter {name!r} is {source.world} source ranks * {list(source.shapes[0])} = {list(found)} and "
            f"{destination.world} destination ranks * {list(destination.shapes[0])} = {list(expected)}, "
            f"expected equal; {marked if source.cut_up or destination.cut_up else 'the models differ'}: "
            "correct tensor_model_parallel, partition_dim or the shapes"
        )
    blocks = [
        [size * (side.world if side.cut_up else 1) for size in side.attributes.partition_sizes]
        for side in (source, destination)
        if side.attributes.partition_sizes is not None
    ]
    if len(blocks) == 2 and blocks[0] != blocks[1]:
        raise PlanMismatch(
            f"parameter {name!r} has packed blocks of {blocks[0]} elements on {source.world} source ranks and "
            f"of {blocks[1]} on {destination.world} destination ranks, expected equal blocks; correct "
            "partition_sizes"
        )


def _require_tiling(name: str, source: Side, destination: Side, length: int) -> None:
    """Strided cuts have no uneven form: the dimension is to tile by those of both sides."""
    told = [(side.world, side.attributes) for side in (source, destination)]
    strides = [
        (world, values.partition_stride)
        for world, values in told
        if values.partition_sizes is None and values.partition_stride > 1
    ]
    units = math.lcm(*(world * stride for world, stride in strides))
    if length % units:
        raise PlanMismatch(
            f"parameter {name!r}: {length} elements do not tile in {units} equal units, the least common "
            f"multiple of ranks * partition_stride {strides}; choose tensor-parallel sizes that divide it"
        )
