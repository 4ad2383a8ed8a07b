"""The index of a version: what its folder holds, from which version to which, and how to prove it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from weightsync.backends.disk.names import INDEX, KEPT, plain_name, version_folder, version_of
from weightsync.backends.disk.store import Store
from weightsync.reference.errors import PatchMismatch
from weightsync.reference.protocol import DELTA, FULL

FORMAT = "weightsync-disk-1"
LARGEST_INDEX = 64 << 20
_WIDE = 1 << 63


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a version.

    Attributes:
        name: in the version's folder.
        bytes: its exact size.
        checksum: xxh3-128 of it, in hexadecimal.
        header: xxh3-128 of a shard's header, length included; empty for other files.
    """

    name: str
    bytes: int
    checksum: str
    header: str = ""


@dataclass(frozen=True, slots=True)
class Index:
    """What ``weightsync.json`` says.

    Attributes:
        version: the version that the folder leads to.
        base: the version that it starts from, 0 for a full one.
        kind: "full" or "delta".
        fingerprint: of the tensors' names, dtypes and shapes, as ``TransferPlan.fingerprint``.
        before: digest of the state that its delta starts from; 0 for a full version without one.
        after: digest of the version's state.
        files: all its files but this one.
        changed: elements that differ from the version before; all of them when nobody knew that.
        elements: elements of the whole checkpoint.
        encodings: how many tensors came in which encoding.
        delta: in a full version, the files of the same step as a delta, for readers that hold its base.
        delta_base: the version that this delta starts from, or 0.
    """

    version: int
    base: int
    kind: str
    fingerprint: int
    before: int
    after: int
    files: tuple[FileEntry, ...]
    changed: int
    elements: int
    encodings: Mapping[str, int] = field(default_factory=dict)
    delta: tuple[FileEntry, ...] = ()
    delta_base: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its files, without those of a delta beside a full version."""
        return sum(one.bytes for one in self.files)

    def ways(self) -> tuple[Index, ...]:
        """The ways to this version that the folder holds: itself, and the delta beside a full version."""
        if not self.delta_base:
            return (self,)
        step = replace(self, kind=DELTA, files=self.delta, base=self.delta_base, delta=(), delta_base=0)
        return (self, step)

    @property
    def folder(self) -> str:
        """The version's folder."""
        return version_folder(self.version)

    def dump(self) -> bytes:
        """The file's bytes."""
        return (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode()

    @classmethod
    def load(cls, raw: bytes, version: int) -> Index:
        """The index in ``raw``, found in the folder of ``version``.

        Raises:
            PatchMismatch: no JSON of this format, a value of another type or out of range, or a file name that
                leaves the folder.
        """
        where = f"index of version {version}"
        try:
            found = json.loads(raw)
        except (ValueError, RecursionError):
            raise PatchMismatch(f"{where} is no JSON; it is damaged, publish a new version") from None
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            raise PatchMismatch(f"{where} is not of format {FORMAT!r}; use the same release on both sides")
        kind = found.get("kind")
        if kind not in (FULL, DELTA):
            raise PatchMismatch(f"{where} has kind {kind!r}, expected {FULL!r} or {DELTA!r}")
        files, delta = found.get("files"), found.get("delta")
        if not isinstance(files, list) or not isinstance(delta, list):
            raise PatchMismatch(f"{where} has no list of files; it is damaged, publish a new version")
        number = {key: _number(found, key, where) for key in _NUMBERS}
        index = cls(
            **number,
            kind=kind,
            files=tuple(_entry(one, where) for one in files),
            delta=tuple(_entry(one, where) for one in delta),
            encodings=_counts(found.get("encodings"), where),
        )
        names = [one.name for one in (*index.files, *index.delta)]
        if len(set(names)) != len(names) or INDEX in names:
            raise PatchMismatch(
                f"{where} names a file twice, or itself; it is damaged, publish a new version"
            )
        if index.version != version or not 0 <= index.base < version or (index.base == 0) != (kind == FULL):
            wrong = True
        else:
            wrong = not 0 <= index.delta_base < version or (index.delta_base > 0 and kind != FULL)
        if wrong:
            raise PatchMismatch(
                f"{where} says version {index.version} on base {index.base} ({kind}); the folder was renamed"
            )
        return index


_NUMBERS = ("version", "base", "fingerprint", "before", "after", "changed", "elements", "delta_base")


def read_index(store: Store, version: int) -> Index:
    """The index of one version; FileNotFoundError if there is none, PatchMismatch if it is damaged."""
    return Index.load(store.read_whole(f"{version_folder(version)}/{INDEX}", LARGEST_INDEX), version)


def folders(store: Store) -> list[int]:
    """Versions that have a folder, ascending, whole or not."""
    found = (version_of(name[:-1]) for name in store.list("") if name.endswith("/"))
    return sorted(version for version in found if version is not None)


@dataclass(slots=True)
class Listing:
    """The versions that are there.

    Attributes:
        indexes: version -> its index, ascending.
        damaged: version -> why its index cannot be read.
        unfinished: versions with a folder of ours and no index.
    """

    indexes: dict[int, Index] = field(default_factory=dict)
    damaged: dict[int, str] = field(default_factory=dict)
    unfinished: tuple[int, ...] = ()

    @property
    def newest(self) -> Index | None:
        """The newest version, or None."""
        return self.indexes[max(self.indexes)] if self.indexes else None


def listing(store: Store, known: Mapping[int, Index] | None = None) -> Listing:
    """What is there now; indexes in ``known`` are not read again, since an index never changes."""
    found = Listing()
    unfinished = []
    for version in folders(store):
        if known and version in known and INDEX in store.list(version_folder(version)):
            found.indexes[version] = known[version]
            continue
        try:
            found.indexes[version] = read_index(store, version)
        except FileNotFoundError:
            unfinished.append(version)
        except PatchMismatch as error:
            found.damaged[version] = str(error)
    found.unfinished = tuple(unfinished)
    return found


def highest_tried(store: Store) -> int:
    """The highest version number that was ever tried here, as far as the folder remembers."""
    marks = [name for name in store.list(KEPT) if name.startswith("highest-")]
    numbers = [int(name[8:]) for name in marks if name[8:].isdigit()]
    return max([0, *numbers, *folders(store)])


def remember_highest(store: Store, version: int) -> None:
    """Keep ``version`` as tried, also once its folder is gone."""
    store.put(f"{KEPT}/highest-{version}", [b""])
    for name in store.list(KEPT):
        if name.startswith("highest-") and name[8:].isdigit() and int(name[8:]) < version:
            store.remove(f"{KEPT}/{name}")


def _number(found: Mapping[str, Any], key: str, where: str) -> int:
    value = found.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not -_WIDE <= value < _WIDE:
        raise PatchMismatch(f"{where} has {key} {value!r}, expected an int64; it is damaged")
    return value


def _entry(found: object, where: str) -> FileEntry:
    if not isinstance(found, dict):
        raise PatchMismatch(f"{where} lists a file as {found!r}, expected an object; it is damaged")
    size, checksum, header = _number(found, "bytes", where), found.get("checksum"), found.get("header", "")
    if size < 0 or not isinstance(checksum, str) or not isinstance(header, str):
        raise PatchMismatch(f"{where} lists a file without size or checksum; it is damaged")
    return FileEntry(plain_name(found.get("name")), size, checksum, header)


def _counts(found: object, where: str) -> dict[str, int]:
    if not isinstance(found, dict):
        raise PatchMismatch(f"{where} has encodings {found!r}, expected an object; it is damaged")
    return {str(name): _number(found, name, where) for name in found}
