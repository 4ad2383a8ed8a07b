"""An independent reader of the field's disk layout, in plain Python: what any host of theirs would end up with.

It shares no code with the backend. Whole folders are read into memory, and state is a dict of bytes.
"""

from __future__ import annotations

import importlib
import json
import struct
import zlib
from pathlib import Path

import xxhash
import zstandard
from safetensors import deserialize, safe_open


def pull(source: Path, state: dict[str, bytes], applied: int, target: int) -> int:
    """Lead ``state`` from version ``applied`` to ``target``, version by version; returns ``target``.

    Raises:
        RuntimeError: out of order, or a wrong checksum.
    """
    for version in range(applied + 1, target + 1):
        folder = source / f"weight_v{version:06d}"
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        metadata = index["metadata"]
        if int(metadata["base_version"]) != version - 1 or metadata["compression_format"] != "zstd":
            raise RuntimeError(f"out of order: {metadata}")
        for file in sorted(set(index["weight_map"].values())):
            with safe_open(folder / file, framework="np") as opened:
                sums = opened.metadata()
            for name, entry in deserialize((folder / file).read_bytes()):  # type: ignore[no-untyped-call]
                body = zstandard.ZstdDecompressor().decompress(bytes(entry["data"]))
                new = _applied(metadata["delta_encoding"], body, state[name])
                if _checksum(metadata["checksum_format"], new) != sums[name]:
                    raise RuntimeError(f"checksum of {name}")
                state[name] = new
    return target


def _applied(encoding: str, body: bytes, old: bytes) -> bytes:
    if encoding == "xor":
        return bytes(a ^ b for a, b in zip(body, old, strict=True))
    (count,) = struct.unpack_from("<I", body)
    new = bytearray(old)
    for position, value in zip(struct.unpack_from(f"<{count}I", body, 4), body[4 + 4 * count :], strict=True):
        new[position] = value
    return bytes(new)


def _checksum(name: str, raw: bytes) -> str:
    if name == "adler32":
        return f"{zlib.adler32(raw):08x}"
    if name == "blake3":
        return str(importlib.import_module("blake3").blake3(raw).hexdigest())
    return xxhash.xxh3_128_hexdigest(raw)
