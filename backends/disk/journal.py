"""The changes of one step of a checkpoint in a file: old and new bits, so that it can be undone and done again.

It is written before generation is paused, and durable before the first weight is touched. Afterwards it stays until
the weights are durable too. Layout: for each tensor positions, old and new bits, each padded to 8 bytes; then a table
as JSON, its length (u64) and the xxh3-128 of everything before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from weightsync.backends.disk.files import Bytes, Files
from weightsync.backends.disk.shards import DTYPES, NAMES
from weightsync.backends.disk.squash import Change
from weightsync.reference.detect import WIDE
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta

_FORMAT = "weightsync-journal-1"
_TAIL = 24


@dataclass(frozen=True, slots=True)
class Step:
    """What a journal leads from and to: versions and the digests of their states."""

    base: int
    before: int
    version: int
    after: int


def chunks(changes: Iterable[Change], proof: Callable[[int], Step]) -> Iterator[Bytes]:
    """The file's bytes, tensor after tensor. ``proof`` gets the digest change of them all, before the table is
    written, and answers what the step is; whatever it raises ends the file.
    """
    hasher, offset, table, total = xxhash.xxh3_128(), 0, [], 0
    for change in changes:
        total += change.digest_change
        entry = [
            change.meta.name,
            NAMES[change.meta.dtype],
            list(change.meta.shape),
            int(change.new.size),
            offset,
        ]
        table.append([*entry, change.positions is None])
        width = np.int64 if change.meta.numel >= WIDE else np.int32
        arrays = [change.old, change.new]
        if change.positions is not None:
            arrays.insert(0, change.positions.astype(width))
        for array in arrays:
            raw = np.ascontiguousarray(array).view(np.uint8).data
            for part in (raw, b"\0" * (-raw.nbytes % 8)):
                hasher.update(part)
                yield part
            offset += raw.nbytes + -raw.nbytes % 8
    step = proof(total)
    head = {"format": _FORMAT, "step": [step.base, step.before, step.version, step.after], "changes": table}
    text = json.dumps(head).encode()
    end = text + len(text).to_bytes(8, "little")
    hasher.update(end)
    yield end + hasher.digest()


class Journal:
    """A journal file, mapped.

    Args:
        files: where it is.
        name: its name.

    Raises:
        PatchMismatch: it is not whole. It was never armed then, and no weight was touched under it.
    """

    def __init__(self, files: Files, name: str) -> None:
        size = files.size(name)
        self._mapped = files.map(name)
        whole = self._mapped.view(0, size)
        good = size > _TAIL and xxhash.xxh3_128_digest(whole[:-16].data) == bytes(whole[-16:])
        length = int.from_bytes(bytes(whole[-_TAIL:-16]), "little") if good else 0
        head = json.loads(bytes(whole[size - _TAIL - length : size - _TAIL])) if good else {}
        if head.get("format") != _FORMAT:
            raise PatchMismatch(
                f"journal {name!r} is not whole; it is left over from a kill and can be removed"
            )
        self.step = Step(*head["step"])
        self._table = head["changes"]
        self.nbytes = size

    def changes(self) -> Iterator[Change]:
        """Every change, its arrays in the file's memory."""
        for name, dtype, shape, count, offset, dense in self._table:
            meta = ParamMeta(name, DTYPES[dtype], tuple(shape))
            width = 8 if meta.numel >= WIDE else 4
            bits = np.dtype(f"u{meta.itemsize}")
            positions = None
            if not dense:
                positions = self._mapped.view(offset, count * width).view(f"i{width}")
                offset += -(-count * width // 8) * 8
            old = self._mapped.view(offset, count * bits.itemsize).view(bits)
            offset += -(-old.nbytes // 8) * 8
            yield Change(meta, positions, old, self._mapped.view(offset, old.nbytes).view(bits))

    def names(self) -> list[str]:
        """Tensors that it changes."""
        return [str(entry[0]) for entry in self._table]

    @property
    def elements(self) -> int:
        """Elements that it changes."""
        return sum(int(entry[3]) for entry in self._table)

    def close(self) -> None:
        """Let the file's memory go."""
        self._mapped.close()
