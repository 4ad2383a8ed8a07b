"""Parameters as metadata, their bits as integers, and Megatron's tensor-parallel attributes on them.

The attributes are plain Python attributes of a tensor: almost every operation that makes a new tensor leaves
them behind. Every copy in this package therefore goes through ``fresh_copy`` or ends with ``carry``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from weightsync.reference.attributes import ATTRIBUTES, BY_NAME
from weightsync.reference.attributes import TP_ATTRIBUTES as TP_ATTRIBUTES
from weightsync.reference.errors import MissingTPAttributes, UnsupportedCapability

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One checkpoint (Hugging Face) tensor, or one runtime parameter, without its bytes.

    Attributes:
        name: its name on its side.
        dtype: the dtype that travels: the bits of this dtype are diffed, sent and stored.
        shape: its full shape for a checkpoint tensor.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> ParamMeta:
        """The metadata of a tensor as it is."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, stored contiguously."""
        return self.numel * self.itemsize


@dataclass(frozen=True, eq=True)
class TPAttributes:
    """The tensor-parallel attributes of one tensor: those that are present, and no others.

    Attributes:
        values: attribute name -> value. An absent name stays absent; the properties below answer with
            Megatron's default for it and store nothing.
    """

    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.values) - set(TP_ATTRIBUTES))
        if unknown:
            raise ValueError(
                f"tensor-parallel attributes {unknown} are unknown; known are {list(TP_ATTRIBUTES)}"
            )
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))

    @property
    def sharded(self) -> bool:
        """True when each TP rank holds its own cut; the mode "duplicated" wins over the flag."""
        return bool(self.values.get("tensor_model_parallel", False)) and self.parallel_mode != "duplicated"

    @property
    def partition_dim(self) -> int:
        """The dimension that is cut, or -1."""
        return int(self.values.get("partition_dim", -1))

    @property
    def partition_stride(self) -> int:
        """Interleaved blocks per rank along ``partition_dim``."""
        return int(self.values.get("partition_stride", 1))

    @property
    def partition_sizes(self) -> tuple[int, ...] | None:
        """Local sizes of packed blocks that are each cut separately, or None."""
        sizes = self.values.get("partition_sizes")
        return None if sizes is None else tuple(int(size) for size in sizes)

    @property
    def parallel_mode(self) -> str | None:
        """Transformer Engine's mode: "column", "row", "duplicated" or None."""
        return self.values.get("parallel_mode")

    def uncut(self) -> TPAttributes:
        """What a gathered tensor carries: all but the attributes that tell how a shard is cut."""
        return TPAttributes({name: value for name, value in self.values.items() if not BY_NAME[name].cut})

    def stamp(self, tensor: Tensor) -> Tensor:
        """Make ``tensor`` carry exactly these attributes, and return the same object.

        Known names that are absent here are removed from it; other Python attributes are left alone. Values
        are copied, so that a list changed on one tensor does not change the other; a process group stays the
        same object.
        """
        for name in TP_ATTRIBUTES:
            if name in self.values:
                setattr(tensor, name, _copied(name, self.values[name]))
            elif hasattr(tensor, name):
                delattr(tensor, name)
        return tensor


def read(tensor: Tensor) -> TPAttributes:
    """The known attributes that are present on ``tensor``; nothing is filled in."""
    found = {name: getattr(tensor, name, _ABSENT) for name in TP_ATTRIBUTES}
    return TPAttributes({name: _copied(name, value) for name, value in found.items() if value is not _ABSENT})


def carry(src: Tensor, dst: Tensor) -> Tensor:
    """Give ``dst`` exactly the known attributes of ``src`` and return ``dst``, the same object.

    To be called at every copy, not only at the first allocation: a name that ``src`` has lost since, or never
    had, is removed from ``dst``. No bytes move.
    """
    return dst if dst is src else read(src).stamp(dst)


def differences(found: TPAttributes, expected: TPAttributes) -> tuple[tuple[str, str, str], ...]:
    """Name, found and expected value as text, of every attribute that differs; a missing one is "absent"."""

    def say(attributes: TPAttributes, name: str) -> str:
        return repr(attributes.values[name]) if name in attributes.values else "absent"

    return tuple(
        (name, say(found, name), say(expected, name))
        for name in TP_ATTRIBUTES
        if found.values.get(name, _ABSENT) != expected.values.get(name, _ABSENT)
    )


def compare(a: Tensor, b: Tensor) -> tuple[str, ...]:
    """One sentence per known attribute that differs between two tensors; empty when they agree."""
    return tuple(
        f"{name} is {left} on the first and {right} on the second"
        for name, left, right in differences(read(a), read(b))
    )


def require(
    tensor: Tensor,
    name: str,
    *,
    full_shape: tuple[int, ...],
    local_shape: tuple[int, ...] | None = None,
) -> TPAttributes:
    """The attributes of a parameter that is not declared replicated, or an error: never a guess.

    Args:
        tensor: the live parameter, or a copy that should have carried its attributes.
        name: its runtime name, for the error.
        full_shape: the shape of the whole parameter over all TP ranks.
        local_shape: the shape to report; the tensor's own when left out.

    Raises:
        MissingTPAttributes: ``tensor_model_parallel`` is absent, or true without a ``partition_dim`` that
            this shape has, or false (a default filled in over a lost attribute) although the shapes differ.
        UnsupportedCapability: the shard is cut once more over a GTP group.
    """
    attributes = read(tensor)
    if attributes.values.get("is_gtp_weight_remat", False):
        raise UnsupportedCapability(
            f"parameter {name!r} is a GTP shard of shape {list(tensor.shape)}, expected a TP shard; gather it "
            "over its GTP group, cut pad_length rows off, and stamp its attributes without the GTP ones"
        )
    local = tuple(tensor.shape) if local_shape is None else tuple(local_shape)
    if "tensor_model_parallel" not in attributes.values:
        problem = "carries no tensor_model_parallel attribute"
    elif attributes.sharded and not 0 <= attributes.partition_dim < len(full_shape):
        problem = f"is tensor-parallel with partition_dim {attributes.partition_dim}"
    elif not attributes.sharded and local != tuple(full_shape):
        problem = "is marked as replicated"
    else:
        return attributes
    raise MissingTPAttributes(
        f"parameter {name!r} of local shape {list(local)} {problem}, but stands for full shape "
        f"{list(full_shape)}; carry the attributes from the live parameter at every copy, or declare it "
        "replicated in the layout table"
    )


def backfill(tensor: Tensor, source: Tensor, name: str, *, replicated: bool = False) -> Tensor:
    """Carry ``source``'s attributes to ``tensor``, then store Megatron's defaults for what is still missing.

    Megatron's optimizers want every member of its table on every parameter. Defaults alone would turn a loud
    loss (no attribute) into a silent one (replicated), so the real attributes come first, and there must be
    some.

    Args:
        tensor: what is filled, and returned; may be ``source``.
        source: the live parameter, or a copy known to be whole.
        name: the parameter's name, for the error.
        replicated: True when the layout declares that the parameter is on every TP rank alike; only then may
            it be without ``tensor_model_parallel``.

    Raises:
        MissingTPAttributes: ``source`` cannot be told from a shard that lost its attributes, contradicts
            ``replicated``, or has lost one that ``tensor`` still has.
    """
    real, held = read(source), read(tensor).values
    lost = [key for key in held if key not in real.values and held[key] != BY_NAME[key].default]
    if "tensor_model_parallel" not in real.values and not replicated:
        problem = "carries no tensor_model_parallel attribute and is not declared replicated"
    elif real.sharded and replicated:
        problem = "is a shard although it is declared replicated"
    elif lost:
        problem = f"has lost {lost}, which the tensor to fill still has"
    else:
        carry(source, tensor)
        for one in ATTRIBUTES:
            if one.backfilled and one.name not in real.values:
                setattr(tensor, one.name, one.default)
        return tensor
    raise MissingTPAttributes(
        f"the source of parameter {name!r} {problem}; carry the real attributes from the live parameter "
        "first, fill in defaults afterwards"
    )


def int_view(tensor: Tensor) -> Tensor:
    """The bits of ``tensor`` as a flat, contiguous integer tensor of shape (numel,) and the same itemsize.

    Item sizes 1, 2, 4 and 8 give uint8, int16, int32 and int64. Elements stand in row-major order of the
    shape, whatever the strides. The result shares memory with a contiguous ``tensor`` and is a copy of any
    other, so writing through it is only meaningful on a contiguous one.

    Raises:
        UnsupportedCapability: the dtype has no integer of its size, as complex128 has not.
    """
    integer = _INTEGERS.get(tensor.dtype.itemsize)
    if integer is None:
        raise UnsupportedCapability(
            f"dtype {tensor.dtype} has {tensor.dtype.itemsize} bytes an element, expected 1, 2, 4 or 8; "
            "send it as two tensors of a smaller dtype"
        )
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # torch calls a slice of one element contiguous whatever its stride, and then refuses to view it as bytes.
    return flat.as_strided(flat.shape, (1,)).view(integer)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """True when dtype, shape and every bit are equal; NaN payloads and the sign of zero count."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(int_view(a), int_view(b))


def fresh_copy(
    tensor: Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> Tensor:
    """A new contiguous tensor with new storage and the same values, carrying the attributes of ``tensor``.

    Never the same object, also where ``tensor.to(device)`` would return its argument; never a view. Without a
    ``dtype`` the copy is bit-exact. The caller may overwrite ``tensor`` once this returns (device copies are
    blocking). The result takes no part in autograd.
    """
    source = tensor.detach()
    copy = torch.empty(source.shape, dtype=dtype or source.dtype, device=device or source.device)
    if copy.device.type != "meta" and source.device.type != "meta":
        copy.copy_(source)
    return carry(tensor, copy)


def _copied(name: str, value: Any) -> Any:
    return value if BY_NAME[name].reference else deepcopy(value)
