"""The disk layout that slime, miles and SGLang's ``pull_weights`` share: its facts, and writing it.

``weight_v000002/`` holds safetensors files whose tensors are zstd (level 1) blobs of byte deltas, the new state's
checksum per tensor in their metadata, and an index named as Hugging Face's, written last. ``xor`` is new xor old;
``overwrite`` is a count, byte positions (u4 each) and the new bytes. Unchanged tensors are left out.
"""

from __future__ import annotations

import importlib
import json
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from torch import Tensor

from weightsync.backends.disk.names import HF_INDEX, version_folder
from weightsync.backends.disk.shards import Blob, write_shard
from weightsync.backends.disk.store import Store
from weightsync.reference.errors import PlanMismatch, UnsupportedCapability
from weightsync.reference.params import ParamMeta, fresh_copy, int_view

XOR, OVERWRITE = "xor", "overwrite"
CHECKSUMS = ("xxh3-128", "blake3", "adler32")
WIDEST_OVERWRITE = 1 << 32
"""Bytes of a tensor from which on u4 positions do not reach."""

Raw = NDArray[np.uint8]


class Hasher(Protocol):
    """What ``hashlib`` has too."""

    def update(self, data: Any, /) -> object:
        """Take bytes in."""

    def hexdigest(self) -> str:
        """What they come to, in hexadecimal."""


class _Adler32:
    def __init__(self) -> None:
        self._value = 1

    def update(self, data: Any, /) -> None:
        self._value = zlib.adler32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def hasher(name: str) -> Hasher:
    """A fresh checksum by the field's name for it.

    Raises:
        UnsupportedCapability: the name is unknown, or ``blake3`` is not installed.
    """
    if name == "xxh3-128":
        return xxhash.xxh3_128()
    if name == "adler32":
        return _Adler32()
    if name == "blake3":
        try:
            return importlib.import_module("blake3").blake3()  # type: ignore[no-any-return]
        except ImportError:
            raise UnsupportedCapability(
                "checksum 'blake3' needs the package blake3, which is not installed; install it, or use 'xxh3-128'"
            ) from None
    raise UnsupportedCapability(f"checksum {name!r} is unknown, expected one of {', '.join(CHECKSUMS)}")


def checksum(name: str, raw: Raw) -> str:
    """The checksum of bytes, in hexadecimal."""
    one = hasher(name)
    one.update(raw.data)
    return one.hexdigest()


def encode(encoding: str, new: Raw, old: Raw, name: str) -> bytes:
    """The blob that leads from ``old`` to ``new``, uint8 (n,) each.

    Raises:
        UnsupportedCapability: an unknown encoding, or a tensor whose byte positions do not fit u4.
    """
    if encoding == XOR:
        body = new ^ old
    elif encoding == OVERWRITE:
        if new.size >= WIDEST_OVERWRITE:
            raise UnsupportedCapability(
                f"tensor {name!r} has {new.size} bytes, expected fewer than {WIDEST_OVERWRITE} for 'overwrite'; use "
                "'xor'"
            )
        positions = np.flatnonzero(new != old).astype("<u4")
        count = np.array([positions.size], "<u4")
        body = np.concatenate([count.view(np.uint8), positions.view(np.uint8), new[positions]])
    else:
        raise UnsupportedCapability(f"encoding {encoding!r} is unknown, expected {XOR!r} or {OVERWRITE!r}")
    return zstandard.ZstdCompressor(level=1).compress(body.tobytes())


class FieldPublisher:
    """Publishes in the field's layout; version 0 is the checkpoint that every reader starts from.

    Args:
        store: where versions go.
        state: that checkpoint; copied.
        encoding: "xor" or "overwrite".
        checksum_name: one of ``CHECKSUMS``.
        version: the version that ``state`` is.

    Attributes:
        version: the last version published. It moves, with the baseline, once that is durable.
    """

    def __init__(
        self,
        store: Store,
        state: Mapping[str, Tensor],
        encoding: str = XOR,
        checksum_name: str = "xxh3-128",
        version: int = 0,
    ) -> None:
        hasher(checksum_name)
        encode(encoding, np.zeros(1, np.uint8), np.zeros(1, np.uint8), "")
        self.store, self.encoding, self.checksum_name, self.version = store, encoding, checksum_name, version
        self._baseline = {name: fresh_copy(tensor) for name, tensor in state.items()}

    def publish(self, state: Mapping[str, Tensor]) -> int:
        """Publish ``state`` as a delta on the last version; returns its number.

        Raises:
            PlanMismatch: other tensors than the baseline's.
        """
        if {n: ParamMeta.of(n, t) for n, t in state.items()} != {
            n: ParamMeta.of(n, t) for n, t in self._baseline.items()
        }:
            raise PlanMismatch(
                "the state to publish has other tensors than the one before; start a new publisher"
            )
        blobs: dict[str, bytes] = {}
        sums: dict[str, str] = {}
        for name, tensor in state.items():
            new, old = field_bytes(tensor), field_bytes(self._baseline[name])
            if not np.array_equal(new, old):
                blobs[name] = encode(self.encoding, new, old, name)
                sums[name] = checksum(self.checksum_name, new)
        version, file = self.version + 1, "model-00000-of-00001.safetensors"
        folder = version_folder(version)
        if blobs:
            parts = [
                Blob(ParamMeta(name, torch.uint8, (len(blob),)), lambda blob=blob: blob)  # type: ignore[misc]
                for name, blob in blobs.items()
            ]
            write_shard(lambda name, chunks: self.store.put(f"{folder}/{name}", chunks), file, parts, sums)
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{self.version:06d}",
            "delta_encoding": self.encoding,
            "compression_format": "zstd",
            "checksum_format": self.checksum_name,
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(blobs, file)}
        self.store.put(f"{folder}/{HF_INDEX}", [json.dumps(index).encode()])
        for name in blobs:
            int_view(self._baseline[name]).copy_(int_view(state[name]))
        self.version = version
        return version


def field_bytes(tensor: Tensor) -> Raw:
    """A tensor's bytes in row-major order, uint8 (nbytes,)."""
    found: Raw = int_view(tensor).view(torch.uint8).numpy()
    return found
