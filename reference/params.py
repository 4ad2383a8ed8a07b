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

from weightsync.reference.errors import MissingTPAttributes, UnsupportedCapability

TP_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "parallel_mode",
    "allreduce",
    "sequence_parallel",
    "average_gradients_across_tp_domain",
    "shared",
    "shared_embedding",
    "expert_tp",
    "is_qkv",
    "qkv_split_shapes",
    "is_embedding_or_output_parameter",
    "is_embedding_parameter",
    "num_attention_heads",
    "num_query_groups",
)
"""Every attribute name that a copy carries, letter for letter Megatron's and Transformer Engine's.

The last two are ours, named after Megatron's settings: heads that do not divide are cut by these counts.
"""

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

    def stamp(self, tensor: Tensor) -> Tensor:
        """Make ``tensor`` carry exactly these attributes, and return the same object.

        Known names that are absent here are removed from it; other Python attributes are left alone. Values
        are copied, so that a list changed on one tensor does not change the other.
        """
        for name in TP_ATTRIBUTES:
            if name in self.values:
                setattr(tensor, name, deepcopy(self.values[name]))
            elif hasattr(tensor, name):
                delattr(tensor, name)
        return tensor


def read(tensor: Tensor) -> TPAttributes:
    """The known attributes that are present on ``tensor``; nothing is filled in."""
    found = {name: getattr(tensor, name, _ABSENT) for name in TP_ATTRIBUTES}
    return TPAttributes({name: deepcopy(value) for name, value in found.items() if value is not _ABSENT})


def carry(src: Tensor, dst: Tensor) -> Tensor:
    """Give ``dst`` exactly the known attributes of ``src`` and return ``dst``, the same object.

    To be called at every copy, not only at the first allocation: a name that ``src`` has lost since, or never
    had, is removed from ``dst``. No bytes move.
    """
    return dst if dst is src else read(src).stamp(dst)


def compare(a: Tensor, b: Tensor) -> tuple[str, ...]:
    """One sentence per known attribute that differs between two tensors; empty when they agree."""
    left, right = read(a).values, read(b).values

    def say(values: Mapping[str, Any], name: str) -> str:
        return repr(values[name]) if name in values else "absent"

    return tuple(
        f"{name} is {say(left, name)} on the first and {say(right, name)} on the second"
        for name in TP_ATTRIBUTES
        if left.get(name, _ABSENT) != right.get(name, _ABSENT)
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
    """
    attributes = read(tensor)
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
