"""The additive, position-sensitive digest of a state: one formula, here for numpy and for torch.

    h(key, position, bits) = finalise(key + position * POSITION + bits * BITS)      all in wrap-around 64 bits

``finalise`` is splitmix64's (logical right shifts), ``key`` tells tensors apart, ``position`` is flat in the
checkpoint tensor, ``bits`` are the element's bits, zero-extended. A state's digest is the wrap-around sum
over its elements, as a signed int64: any sharding gives the same number when each element is counted once,
and after a change only the changed elements need be read. ``docs/wire.md`` shows a worked example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.rowmap import RowMap

POSITION = 0x9E3779B97F4A7C15
BITS = 0xD6E8FEB86659FD93
ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""Each round is ``z ^= z >> shift; z *= factor``."""

Integers: TypeAlias = NDArray[Any]

_CHUNK = 1 << 15
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def wrap(value: int) -> int:
    """``value`` reduced to a signed 64-bit integer, as wrap-around addition would leave it."""
    return ((value + (1 << 63)) & ((1 << 64) - 1)) - (1 << 63)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name as it enters keys and fingerprints: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def key(meta: ParamMeta) -> int:
    """The tensor's key, a signed int64: xxh3_64 over name, dtype and full shape, separated by zero bytes."""
    shape = ",".join(map(str, meta.shape))
    return wrap(xxhash.xxh3_64_intdigest(f"{meta.name}\0{dtype_name(meta.dtype)}\0{shape}".encode()))


def element_hash(tensor_key: int, positions: Tensor, bits: Tensor) -> Tensor:
    """Hash of each element in torch, on any device: int64 of the broadcast shape.

    Args:
        tensor_key: what ``key`` answered.
        positions: int64 flat positions in the checkpoint tensor.
        bits: the elements' integer views (uint8, int16, int32 or int64), broadcastable to ``positions``.
    """
    wide = bits.to(torch.int64)
    if bits.itemsize < 8:
        wide = wide & ((1 << 8 * bits.itemsize) - 1)
    hashed = positions * wrap(POSITION) + wide * wrap(BITS) + tensor_key
    for shift, factor in ROUNDS:
        hashed = (hashed ^ ((hashed >> shift) & ((1 << 64 - shift) - 1))) * wrap(factor)
    return hashed


def element_hash_numpy(tensor_key: int, positions: Integers, bits: Integers) -> Integers:
    """The same hash in numpy, as uint64 of the broadcast shape; ``bits`` of any integer dtype."""
    offsets = _spread(positions) + np.uint64(tensor_key & ((1 << 64) - 1))
    hashed = _unsigned(bits).astype(np.uint64)
    hashed *= np.uint64(BITS)
    return _finalise(hashed + offsets)


def digest_sum(tensor_key: int, positions: Tensor, bits: Tensor) -> int:
    """Signed int64 sum of the hashes of single elements, by flat position; scratch memory is bounded.

    Args:
        tensor_key: what ``key`` answered.
        positions: integer flat positions (n,) in the checkpoint tensor.
        bits: integer view (n,) of the elements at these positions.
    """
    return digest_rows(tensor_key, bits.reshape(-1, 1), positions)


def digest_mixed(tensor_keys: Sequence[int], sizes: Sequence[int], positions: Tensor, bits: Tensor) -> int:
    """As ``digest_sum``, of the elements of several tensors one after the other, on the host, in one go.

    Args:
        tensor_keys: what ``key`` answered for each tensor.
        sizes: how many of the elements are each tensor's.
        positions: int64 flat positions (n,), each in its own tensor.
        bits: integer view (n,) of the elements, of one itemsize.
    """
    keys = np.repeat(np.array(tensor_keys, dtype=np.int64).view(np.uint64), sizes)
    hashed = _unsigned(bits.numpy()).astype(np.uint64)
    hashed *= np.uint64(BITS)
    hashed += _spread(positions.numpy())
    hashed += keys
    return wrap(int(_finalise(hashed).sum(dtype=np.uint64)))


def digest_rows(tensor_key: int, bits: Tensor, bases: Tensor, rows: Tensor | None = None) -> int:
    """Signed int64 sum of the hashes of rows whose elements lie side by side in the checkpoint tensor.

    Args:
        tensor_key: what ``key`` answered.
        bits: integer view (r, w).
        bases: int64 (n,) flat position of each hashed row's first element.
        rows: int64 (n,) which rows of ``bits`` are hashed; None for all of them, in order.
    """
    if bits.numel() == 0 or bases.numel() == 0:
        return 0
    width = bits.shape[1]
    columns_at_once = min(width, _CHUNK)
    rows_at_once = max(1, _CHUNK // columns_at_once)
    on_host = bits.device.type == "cpu"
    total = 0
    for left in range(0, width, columns_at_once):
        strip = bits[:, left : left + columns_at_once]
        columns = torch.arange(left, left + strip.shape[1], device=bits.device)
        block_sum = (_numpy_block if on_host else _torch_block)(tensor_key, strip, columns)
        for top in range(0, bases.numel(), rows_at_once):
            taken = slice(top, top + rows_at_once)
            total += block_sum(bases[taken], taken if rows is None else rows[taken])
    return wrap(total)


def tensor_digest(meta: ParamMeta, tensor: Tensor) -> int:
    """Digest of one whole checkpoint tensor, of any strides."""
    bits = int_view(tensor)
    return digest_rows(key(meta), bits.reshape(1, -1), torch.zeros(1, dtype=torch.int64, device=bits.device))


def state_digest(tensors: Iterable[tuple[ParamMeta, Tensor]]) -> int:
    """Digest of a dense checkpoint: the wrap-around sum over its tensors."""
    return combine(tensor_digest(meta, tensor) for meta, tensor in tensors)


def combine(shares: Iterable[int]) -> int:
    """The digest of a whole state from its ranks' shares."""
    return wrap(sum(shares))


class OwnedDigest:
    """Share of the digest that one runtime parameter tells: the rows it owns, in checkpoint coordinates.

    Args:
        row_map: the parameter's map.
        metas: the plan's checkpoint tensors, by number.
    """

    def __init__(self, row_map: RowMap, metas: Sequence[ParamMeta]) -> None:
        self._width = row_map.width
        self._tables: list[tuple[int, Tensor, Tensor | None]] = []
        if self._width:
            for number, (bases, local) in zip(row_map.outputs, row_map.tables.owned_starts, strict=True):
                if bases.numel():
                    self._tables.append((key(metas[number]), bases, local))

    def of(self, tensor: Tensor) -> int:
        """The share of ``tensor``: the parameter, or a copy of it, of the map's dtype and shape."""
        bits = int_view(tensor).view(-1, self._width) if self._tables else None
        return combine(
            digest_rows(k, bits, bases, local) for k, bases, local in self._tables if bits is not None
        )


def _unsigned(bits: Integers) -> Integers:
    return bits.view(_UNSIGNED[bits.dtype.itemsize])


def _spread(positions: Integers) -> Integers:
    return positions.astype(np.int64).view(np.uint64) * np.uint64(POSITION)


def _finalise(hashed: Integers) -> Integers:
    """In place; a second array of the same size is the only scratch."""
    shifted = np.empty_like(hashed)
    for shift, factor in ROUNDS:
        np.right_shift(hashed, np.uint64(shift), out=shifted)
        hashed ^= shifted
        if factor != 1:
            hashed *= np.uint64(factor)
    return hashed


def _numpy_block(tensor_key: int, strip: Tensor, columns: Tensor) -> Callable[[Tensor, Tensor | slice], int]:
    bits = _unsigned(strip.numpy())
    spread = _spread(columns.numpy()) + np.uint64(tensor_key & ((1 << 64) - 1))

    def block_sum(bases: Tensor, rows: Tensor | slice) -> int:
        hashed = bits[rows if isinstance(rows, slice) else rows.numpy()].astype(np.uint64)
        hashed *= np.uint64(BITS)
        hashed += _spread(bases.numpy())[:, None]
        hashed += spread
        return int(_finalise(hashed).sum(dtype=np.uint64))

    return block_sum


def _torch_block(tensor_key: int, strip: Tensor, columns: Tensor) -> Callable[[Tensor, Tensor | slice], int]:
    return lambda bases, rows: int(
        element_hash(tensor_key, bases[:, None].to(torch.int64) + columns, strip[rows]).sum()
    )
