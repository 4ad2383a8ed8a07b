"""A checkpoint of 1 GB through a folder at 1 %: publish, pull and bytes, beside xor + zstd of dense bytes.

What it is compared with is the layout that slime, miles and SGLang share, written by stock numpy, zstandard and
xxhash as they do: xor of all bytes, zstd level 1, a checksum of the new state per tensor; applied in place on a map of
the file, in blocks, with a running checksum. Neither side's apply waits for the disk: ours has its journal on disk
before, and makes the weights durable after. One thread on both sides.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
import xxhash
import zstandard
from harness import Row
from safetensors.torch import save_file
from torch import Tensor

from weightsync.backends.disk import CheckpointReader, LocalStore, Publisher, PublisherSettings
from weightsync.backends.disk.checkpoint import Checkpoint
from weightsync.backends.disk.field import FieldPublisher
from weightsync.backends.disk.files import LocalFiles
from weightsync.backends.disk.shards import read_header
from weightsync.reference.params import ParamMeta, int_view

TENSORS, SHAPE = 32, (4096, 4096)
DENSITY = 0.01
BLOCK = 2 << 20
ROUNDS = 3


def rows() -> Iterator[Row]:
    tensors = int(os.environ.get("WEIGHTSYNC_BENCH_TENSORS", TENSORS))
    folder = Path(tempfile.mkdtemp(prefix="weightsync-bench-"))
    try:
        yield from _rows(folder, tensors)
    finally:
        shutil.rmtree(folder)


def _rows(folder: Path, tensors: int) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    state = {
        f"layers.{number}.weight": torch.randn(SHAPE, generator=generator).to(torch.bfloat16)
        for number in range(tensors)
    }
    metas = [ParamMeta.of(name, tensor) for name, tensor in state.items()]
    (folder / "theirs").mkdir()
    save_file(state, folder / "theirs" / "model.safetensors")
    store = LocalStore(folder / "ours-out")
    theirs = FieldPublisher(LocalStore(folder / "theirs-out"), state)
    reader = CheckpointReader(store, folder / "ours")
    times: dict[str, list[float]] = {}
    sizes = {"ours": 0, "theirs": 0}

    def timed(name: str, call: Callable[[], object]) -> object:
        gc.collect()
        start = time.perf_counter_ns()
        found = call()
        times.setdefault(name, []).append((time.perf_counter_ns() - start) / 1e6)
        return found

    with Publisher(store, metas, PublisherSettings(anchor_every=100)) as publisher:
        publisher.publish(state)
        reader.pull()
        changed = 0
        for number in range(1, ROUNDS + 1):
            changed = sum(step(tensor, generator) for tensor in state.values())
            index = timed("publish ours", lambda: publisher.publish(state))
            timed("publish theirs", lambda: theirs.publish(state))
            sizes["ours"] = index.nbytes  # type: ignore[attr-defined]
            shard = folder / "theirs-out" / f"weight_v{number:06d}" / "model-00000-of-00001.safetensors"
            sizes["theirs"] = shard.stat().st_size
            prepared = timed("prepare ours", reader.prepare)
            timed("apply ours", prepared.apply)  # type: ignore[attr-defined]
            timed("settle ours", prepared.settle)  # type: ignore[attr-defined]
            prepared.close()  # type: ignore[attr-defined]
            timed("apply theirs", lambda shard=shard: apply_theirs(shard, folder / "theirs"))
            require_equal(state, folder / "ours")
            require_equal(state, folder / "theirs")
    found = {name: median(values) for name, values in times.items()}
    conditions = {
        "checkpoint_bytes": sum(meta.nbytes for meta in metas),
        "dtype": "bfloat16",
        "changed_elements": changed,
        "changes": "one or two ulp, uniformly at random, seed 0",
        "threads": 1,
        "statistic": f"median of {ROUNDS}",
        "theirs": "xor of dense bytes, zstd level 1, xxh3-128 of the new state",
        "prepare_ms": round(found["prepare ours"], 1),
        "settle_ms": round(found["settle ours"], 1),
    }
    stock = "xor + zstd of dense bytes"
    yield Row("disk bytes 1.0%", "B", sizes["ours"], stock, sizes["theirs"], conditions)
    bits = {side: 8 * size / max(changed, 1) for side, size in sizes.items()}
    yield Row("disk bits per change 1.0%", "bit", bits["ours"], stock, bits["theirs"], conditions)
    yield Row("disk publish 1.0%", "ms", found["publish ours"], stock, found["publish theirs"], conditions)
    yield Row("disk apply, paused 1.0%", "ms", found["apply ours"], stock, found["apply theirs"], conditions)
    pulled = found["prepare ours"] + found["apply ours"]
    yield Row("disk prepare and apply 1.0%", "ms", pulled, stock, found["apply theirs"], conditions)


def step(tensor: Tensor, generator: torch.Generator) -> int:
    """Move about 1 % of the elements by one or two ulp, in place; returns how many."""
    bits = int_view(tensor)
    chosen = torch.randint(0, bits.numel(), (round(DENSITY * bits.numel()),), generator=generator).unique()
    sign = torch.randint(0, 2, (chosen.numel(),), generator=generator) * 2 - 1
    size = 1 + (torch.rand(chosen.numel(), generator=generator) < 0.1).long()
    bits[chosen] += (sign * size).to(bits.dtype)
    return chosen.numel()


def apply_theirs(shard: Path, folder: Path) -> None:
    """A version applied as the field's reader does."""
    checkpoint = Checkpoint(LocalFiles(folder))
    where = {name: held.offset for name, (_, held) in checkpoint._where.items()}
    live = np.memmap(folder / "model.safetensors", np.uint8, "r+")
    raw = np.memmap(shard, np.uint8, "r")
    files = LocalFiles(shard.parent)
    header = read_header(lambda at, n: files.read(shard.name, at, n), raw.size, shard.name)
    for name, held in header.tensors.items():
        blob, hasher, at = raw[held.offset : held.offset + held.nbytes], xxhash.xxh3_128(), where[name]
        with zstandard.ZstdDecompressor().stream_reader(blob.data) as stream:
            while block := stream.read(BLOCK):
                part = live[at : at + len(block)]
                part ^= np.frombuffer(block, np.uint8)
                hasher.update(part.data)
                at += len(block)
        if hasher.hexdigest() != header.metadata[name]:
            raise AssertionError(f"{name} has another checksum, so the times mean nothing")


def require_equal(state: dict[str, Tensor], folder: Path) -> None:
    checkpoint = Checkpoint(LocalFiles(folder))
    for name, tensor in state.items():
        if checkpoint.read(name).tobytes() != int_view(tensor).numpy().tobytes():
            raise AssertionError(
                f"{name} differs in {folder.name}, so the times mean nothing; fix that first"
            )
    checkpoint.close()
