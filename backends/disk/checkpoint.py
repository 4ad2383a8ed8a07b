"""A checkpoint folder on this host, changed in place: what is in it, at which version, and proof of that."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightsync.backends.disk.files import Files, LocalFiles
from weightsync.backends.disk.journal import Journal
from weightsync.backends.disk.mapped import Mapped
from weightsync.backends.disk.names import HF_INDEX, KEPT, plain_name
from weightsync.backends.disk.pack import fingerprint
from weightsync.backends.disk.shards import Held, read_header
from weightsync.backends.disk.squash import Change, signed
from weightsync.backends.disk.store import LocalStore
from weightsync.reference.digest import combine, tensor_digest
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.params import ParamMeta

LOCK = f"{KEPT}/lock"
STATE = f"{KEPT}/state.json"
JOURNAL = f"{KEPT}/journal"
_LARGEST_STATE = 1 << 16
_LARGEST_MAP = 256 << 20


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds: version, digest of its bits, fingerprint of its tensors."""

    version: int
    digest: int
    fingerprint: int


class Checkpoint:
    """The safetensors files of one folder, mapped; written in place.

    Args:
        files: the folder.

    Raises:
        PatchMismatch: a file is damaged, is a link, or two files hold one tensor.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._maps: dict[str, Mapped] = {}
        self._where: dict[str, tuple[str, Held]] = {}
        for name in _weight_files(files):
            header = read_header(
                lambda offset, nbytes, name=name: files.read(name, offset, nbytes),  # type: ignore[misc]
                files.size(name),
                name,
            )
            for tensor, held in header.tensors.items():
                if tensor in self._where:
                    raise PatchMismatch(f"tensor {tensor!r} is in {self._where[tensor][0]!r} and in {name!r}")
                self._where[tensor] = (name, held)

    @property
    def metas(self) -> Mapping[str, ParamMeta]:
        """Name -> metadata of every tensor."""
        return {name: held.meta for name, (_, held) in self._where.items()}

    @property
    def fingerprint(self) -> int:
        """Of its tensors."""
        return fingerprint(self.metas.values())

    def read(self, name: str, positions: NDArray[Any] | None = None) -> NDArray[Any]:
        """A copy of the unsigned bits at flat positions (n,), or of the whole tensor (numel,)."""
        bits = self._bits(name)
        return bits.copy() if positions is None else bits[positions]

    def write(self, change: Change, bits: NDArray[Any]) -> None:
        """Put ``bits`` where ``change`` says; not durable before ``sync``."""
        file, held = self._where[change.meta.name]
        where = slice(0, bits.size) if change.positions is None else change.positions
        self._map(file).scatter(held.offset, where, bits)

    def sync(self, names: list[str]) -> None:
        """Return once what was written to these tensors is durable."""
        for file in sorted({self._where[name][0] for name in names}):
            self._map(file).sync()

    def digest(self) -> int:
        """Digest of every bit, read now: O(size)."""
        return combine(tensor_digest(meta, signed(self._bits(name))) for name, meta in self.metas.items())

    def fits(self, change: Change) -> bool:
        """True if the tensor of ``change`` is here, as it is."""
        found = self._where.get(change.meta.name)
        return found is not None and found[1].meta == change.meta

    def close(self) -> None:
        """Let the files' memory go."""
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()

    def _bits(self, name: str) -> NDArray[Any]:
        file, held = self._where[name]
        raw = self._map(file).view(held.offset, held.nbytes)
        bits = np.dtype(f"u{held.meta.itemsize}")
        return raw.view(bits) if held.offset % bits.itemsize == 0 else raw.copy().view(bits)

    def _map(self, file: str) -> Mapped:
        if file not in self._maps:
            self._maps[file] = self.files.map(file)
        return self._maps[file]


def read_state(files: Files) -> State | None:
    """What the folder says it holds, or None."""
    try:
        found = json.loads(LocalStore(files).read_whole(STATE, _LARGEST_STATE))
        return State(*(int(found[key]) for key in ("version", "digest", "fingerprint")))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise PatchMismatch(f"{STATE} is damaged; remove it, and the next pull counts every bit") from None


def write_state(files: Files, state: State) -> None:
    """Say what the folder holds; durable when this returns."""
    LocalStore(files).put(STATE, [json.dumps(asdict(state)).encode()])


def recover(files: Files, checkpoint: Checkpoint) -> State | None:
    """Finish what a killed process left, holding the lock; returns what the folder holds then.

    With a journal beside a state of its base the old bits come back; beside a state of its version the new bits are
    written again, since they may not have become durable. Both may be repeated.
    """
    state = read_state(files)
    if JOURNAL.rpartition("/")[2] not in files.list(KEPT):
        return state
    journal = Journal(files, JOURNAL)
    done = state is not None and state.version == journal.step.version and state.digest == journal.step.after
    for change in journal.changes():
        if not checkpoint.fits(change):
            raise PatchMismatch(
                f"the journal changes {change.meta.name!r}, which is not here as it was; pull anew"
            )
        checkpoint.write(change, change.new if done else change.old)
    checkpoint.sync(journal.names())
    journal.close()
    drop_journal(files)
    return state


def drop_journal(files: Files) -> None:
    """The weights are durable: the journal goes."""
    files.remove(JOURNAL)
    files.sync_folder(KEPT)


@contextmanager
def reading(folder: Path | Files) -> Iterator[tuple[State | None, Checkpoint]]:
    """The checkpoint while nobody changes it, whole: what a killed process left is finished first."""
    files = LocalFiles(folder) if isinstance(folder, Path) else folder
    with LocalStore(files).lock(LOCK, wait=True):
        checkpoint = Checkpoint(files)
        try:
            yield recover(files, checkpoint), checkpoint
        finally:
            checkpoint.close()


def _weight_files(files: Files) -> list[str]:
    """The safetensors files that the folder's index names, or all of them when it has none."""
    there = files.list("")
    if HF_INDEX not in there:
        return [name for name in there if name.endswith(".safetensors")]
    try:
        found = json.loads(LocalStore(files).read_whole(HF_INDEX, _LARGEST_MAP))["weight_map"]
        names = sorted({plain_name(name) for name in found.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        raise PatchMismatch(f"{HF_INDEX} has no weight map; the checkpoint is damaged") from None
    return names
