"""A state, or what changed in it, cut into shards."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from weightsync.backends.disk import sections
from weightsync.backends.disk.files import Bytes
from weightsync.backends.disk.index import FileEntry
from weightsync.backends.disk.names import HF_INDEX
from weightsync.backends.disk.shards import NAMES, Blob, write_shard
from weightsync.reference.digest import dtype_name, wrap
from weightsync.reference.params import ParamMeta, int_view

Put = Callable[[str, Iterable[Bytes]], int]


@dataclass(frozen=True, eq=False, slots=True)
class Changed:
    """What changed in one tensor.

    Attributes:
        meta: the tensor.
        positions: int64 (n,) ascending, n at least 1.
        new: unsigned bits (n,) now.
        old: unsigned bits (n,) before.
        digest_change: what to add to the state's digest.
    """

    meta: ParamMeta
    positions: NDArray[Any]
    new: NDArray[Any]
    old: NDArray[Any]
    digest_change: int


def fingerprint(tensors: Iterable[ParamMeta]) -> int:
    """Signed xxh3-64 over names, dtypes and shapes in the order of the names; equal where both sides mean the
    same tensors, whatever the order of their files.
    """
    ordered = sorted(tensors, key=lambda meta: meta.name)
    lines = (f"{m.name}\0{dtype_name(m.dtype)}\0{','.join(map(str, m.shape))}\n" for m in ordered)
    return wrap(xxhash.xxh3_64_intdigest("".join(lines).encode()))


def full_shards(
    put: Put, tensors: Sequence[ParamMeta], state: Mapping[str, Tensor], shard_bytes: int
) -> list[FileEntry]:
    """Write a whole state as shards of a Hugging Face checkpoint; returns their entries."""
    groups = _groups(tensors, shard_bytes, lambda meta: meta.nbytes)
    written = []
    for number, group in enumerate(groups, 1):
        blobs = [Blob(meta, lambda meta=meta: _bytes(state[meta.name])) for meta in group]  # type: ignore[misc]
        sums = {meta.name: xxhash.xxh3_128_hexdigest(_bytes(state[meta.name])) for meta in group}
        metadata = {"format": "pt", "weightsync": json.dumps(sums)}
        written.append(write_shard(put, _shard("model", number, len(groups)), blobs, metadata))
    return written


def weight_map(
    files: Sequence[FileEntry], tensors: Sequence[ParamMeta], shard_bytes: int
) -> dict[str, bytes]:
    """The Hugging Face index beside full shards, by its file name."""
    groups = _groups(tensors, shard_bytes, lambda meta: meta.nbytes)
    where = {meta.name: file.name for file, group in zip(files, groups, strict=True) for meta in group}
    total = sum(meta.nbytes for meta in tensors)
    return {HF_INDEX: json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=1).encode()}


def delta_shards(
    put: Put, moves: Sequence[Changed], shard_bytes: int, encodings: dict[str, int]
) -> list[FileEntry]:
    """Write changes as shards of sections, counting their encodings; returns their entries."""
    packed = []
    for one in moves:
        raw = sections.encode(one.positions, one.new, one.old)
        encodings[sections.GAPS] = encodings.get(sections.GAPS, 0) + 1
        packed.append((one, raw))
    groups = _groups(packed, shard_bytes, lambda pair: len(pair[1]))
    written = []
    for number, group in enumerate(groups, 1):
        table = {
            one.meta.name: [
                NAMES[one.meta.dtype], list(one.meta.shape), sections.GAPS, one.positions.size,
                xxhash.xxh3_128_hexdigest(raw),
            ]
            for one, raw in group
        }  # fmt: skip
        blobs = [
            Blob(replace(one.meta, dtype=torch.uint8, shape=(len(raw),)), lambda raw=raw: raw)  # type: ignore[misc]
            for one, raw in group
        ]
        metadata = {"weightsync": json.dumps(table, separators=(",", ":"))}
        written.append(write_shard(put, _shard("delta", number, len(groups)), blobs, metadata))
    return written


def _groups(items: Sequence[Any], most: int, nbytes: Callable[[Any], int]) -> list[list[Any]]:
    """Items in order, cut before a group exceeds ``most`` bytes."""
    groups: list[list[Any]] = []
    filled = 0
    for item in items:
        if not groups or filled + nbytes(item) > most:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += nbytes(item)
    return groups


def _shard(stem: str, number: int, of: int) -> str:
    return f"{stem}-{number:05d}-of-{of:05d}.safetensors"


def _bytes(tensor: Tensor) -> memoryview:
    return int_view(tensor).view(torch.uint8).numpy().data
