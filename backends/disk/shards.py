"""Safetensors files, read and written with sizes checked first; no other serialisation is on the path.

A shard of a full version holds the tensors themselves and is a safetensors checkpoint like any other. One of a
delta holds a section per changed tensor, as bytes under the tensor's name. Checksums per tensor stand in the header.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from weightsync.backends.disk.files import Bytes
from weightsync.backends.disk.index import FileEntry
from weightsync.backends.disk.names import plain_name
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta

LARGEST_HEADER = 64 << 20
MOST_DIMENSIONS = 64
DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu, "I16": torch.int16, "U16": torch.uint16,
    "F16": torch.float16, "BF16": torch.bfloat16, "I32": torch.int32, "U32": torch.uint32, "F32": torch.float32,
    "I64": torch.int64, "U64": torch.uint64, "F64": torch.float64, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""dtype -> its name in safetensors."""

Reader = Callable[[int, int], bytes]
"""(offset, bytes) -> exactly these bytes of one file."""


@dataclass(frozen=True, slots=True)
class Held:
    """One tensor in a file: its metadata there, and where its bytes are, from the file's start."""

    meta: ParamMeta
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """What a safetensors file says about itself.

    Attributes:
        tensors: name -> where it is, in the order of the bytes.
        metadata: its ``__metadata__``.
        checksum: xxh3-128 of the header, length included, in hexadecimal.
    """

    tensors: Mapping[str, Held]
    metadata: Mapping[str, str]
    checksum: str

    def table(self, key: str = "weightsync") -> dict[str, Any]:
        """A JSON object kept in the metadata; PatchMismatch when there is none."""
        try:
            found = json.loads(self.metadata.get(key, ""))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise PatchMismatch(
                f"shard has no table {key!r} in its metadata; it was not written by weightsync"
            )
        return found


def read_header(read: Reader, size: int, name: str) -> ShardHeader:
    """The header of a safetensors file of ``size`` bytes.

    Raises:
        PatchMismatch: it is cut short, too large, no JSON, or its tensors do not fill the file exactly.
    """

    def wrong(why: str) -> PatchMismatch:
        return PatchMismatch(
            f"file {name!r} {why}, expected a whole safetensors file; it is damaged or cut short"
        )

    if size < 8:
        raise wrong(f"has {size} bytes")
    first = read(0, 8)
    length = int.from_bytes(first, "little")
    if length > min(size - 8, LARGEST_HEADER):
        raise wrong(f"says that its header has {length} bytes")
    raw = read(8, length)
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        raise wrong("has a header that is no JSON") from None
    if not isinstance(found, dict):
        raise wrong("has a header that is no JSON object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise wrong("has metadata that is no text")
    tensors = []
    for tensor, entry in found.items():
        held = _held(tensor, entry, 8 + length)
        if held is None:
            raise wrong(f"describes tensor {tensor[:80]!r} as {str(entry)[:80]}")
        tensors.append(held)
    end = 8 + length
    for held in sorted(tensors, key=lambda one: (one.offset, one.nbytes)):
        if held.offset != end:
            raise wrong(f"has a gap or an overlap before tensor {held.meta.name!r}")
        end += held.nbytes
    if end != size:
        raise wrong(f"has {size} bytes where its header needs {end}")
    tensors.sort(key=lambda one: one.offset)
    return ShardHeader(
        {one.meta.name: one for one in tensors}, metadata, xxhash.xxh3_128_hexdigest(first + raw)
    )


@dataclass(frozen=True, slots=True)
class Blob:
    """Something to write: a tensor of this metadata, and a function that gives its bytes again each time."""

    meta: ParamMeta
    data: Callable[[], Bytes]


def write_shard(
    put: Callable[[str, Iterable[Bytes]], int], name: str, blobs: Iterable[Blob], metadata: Mapping[str, str]
) -> FileEntry:
    """Write one safetensors file through ``put``, tensor after tensor; returns its entry for the index."""
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    blobs, offset = list(blobs), 0
    for blob in blobs:
        entries[blob.meta.name] = {
            "dtype": NAMES[blob.meta.dtype],
            "shape": list(blob.meta.shape),
            "data_offsets": [offset, offset + blob.meta.nbytes],
        }
        offset += blob.meta.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    whole = xxhash.xxh3_128(head)

    def chunks() -> Iterator[Bytes]:
        yield head
        for blob in blobs:
            data = blob.data()
            whole.update(data)
            yield data

    size = put(name, chunks())
    return FileEntry(plain_name(name), size, whole.hexdigest(), xxhash.xxh3_128_hexdigest(head))


def _held(name: str, entry: object, start: int) -> Held | None:
    """What one entry of a header says, or None when it contradicts itself."""
    if not isinstance(entry, dict):
        return None
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES or not isinstance(shape, list):
        return None
    if len(shape) > MOST_DIMENSIONS or not isinstance(offsets, list) or len(offsets) != 2:
        return None
    if not all(type(one) is int and 0 <= one < 1 << 62 for one in (*shape, *offsets)):
        return None
    meta = ParamMeta(name, DTYPES[dtype], tuple(shape))
    if math.prod(shape) * meta.itemsize != offsets[1] - offsets[0]:
        return None
    return Held(meta, start + offsets[0], meta.nbytes)
