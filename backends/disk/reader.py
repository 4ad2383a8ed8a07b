"""Pulling: from the version that a checkpoint folder holds to a later one, in place, whole or not at all.

Everything slow comes before generation is paused: reading, decoding, proving, and the journal. The pause is the
in-place writes. What makes them durable comes after it.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

from weightsync.backends.disk import journal as journals
from weightsync.backends.disk.chains import cheapest_chain
from weightsync.backends.disk.checkpoint import (
    LOCK,
    Checkpoint,
    State,
    read_state,
    recover,
    write_state,
)
from weightsync.backends.disk.files import Files, LocalFiles
from weightsync.backends.disk.fresh import half_made, make_fresh
from weightsync.backends.disk.index import Index, Listing, listing
from weightsync.backends.disk.journal import Journal, Step
from weightsync.backends.disk.leases import Clock, Lease
from weightsync.backends.disk.names import KEPT
from weightsync.backends.disk.opened import Opened
from weightsync.backends.disk.prepared import Prepared
from weightsync.backends.disk.squash import squash
from weightsync.backends.disk.store import LocalStore, Progress, Store, unheard
from weightsync.reference.digest import wrap
from weightsync.reference.errors import PatchMismatch, StaleVersion

PREPARING = f"{KEPT}/preparing.lock"
STAGED = "staged-"
LEASE_NS = 600_000_000_000
_TRIES = 8


class CheckpointReader:
    """Keeps one checkpoint folder of this host at versions of a store.

    Args:
        store: where versions are published.
        folder: the checkpoint; made from a full version when it is empty.
        name: this reader's name for leases, unique among all readers; by default host and process. None for no
            lease, as on a store that cannot be written: a version may then go while it is read, which is noticed.
        lease_ns: how long what it needs is kept for it after its last sign of life.
        clock: for leases.
        progress: told the bytes read.
    """

    def __init__(
        self,
        store: Store,
        folder: Path | str | Files,
        name: str | None = "",
        lease_ns: int = LEASE_NS,
        clock: Clock = time.time_ns,
        progress: Progress = unheard,
    ) -> None:
        self.store = store
        self.files: Files = LocalFiles(folder) if isinstance(folder, str | os.PathLike) else folder
        self.name = f"{socket.gethostname()}-{os.getpid()}" if name == "" else name
        self._lease_ns, self._clock, self._progress = lease_ns, clock, progress
        self._known: dict[int, Index] = {}

    def newest(self) -> int:
        """The newest version published, or 0."""
        newest = self._listing().newest
        return newest.version if newest else 0

    def held(self) -> State | None:
        """What the checkpoint says it holds."""
        return read_state(self.files)

    def pull(self, target: int | None = None) -> Prepared:
        """Prepare, apply and settle in one; returns the step, closed."""
        for attempt in range(_TRIES):
            with self.prepare(target) as step:
                try:
                    step.apply()
                except StaleVersion:
                    # Another reader on this host went elsewhere since.
                    if attempt == _TRIES - 1:
                        raise
                    continue
                step.settle()
                break
        self.renew(step.version, ())
        return step

    def prepare(self, target: int | None = None, tries: int = 5) -> Prepared:
        """Read ahead to ``target``, by default the newest version; generation may run.

        A checkpoint without a version is first counted, and made from a full version when it is empty.

        Raises:
            StaleVersion: the target is older than what is held, is not there, or no chain leads to it.
            PatchMismatch: something read is damaged; nothing was changed.
        """
        self.files.make_folder("")
        held = read_state(self.files)
        self.renew(held.version if held else 0, None)
        with LocalStore(self.files).lock(PREPARING, wait=True):
            for attempt in range(tries):
                try:
                    return self._prepare(target)
                except (PatchMismatch, FileNotFoundError) as error:
                    # Another process may have applied a step, or a cleaner have come after our lease ended.
                    self.renew(0, None)
                    self._known.clear()
                    with LocalStore(self.files).lock(LOCK, wait=True):
                        now = read_state(self.files)
                    moved = now != held or isinstance(error, FileNotFoundError)
                    if not moved or attempt == tries - 1:
                        raise
                    held = now
        raise StaleVersion("no try to prepare was made, expected at least one; raise tries")

    def verify(self) -> tuple[State | None, int]:
        """What the checkpoint says it holds, and the digest of every bit as counted now."""
        with LocalStore(self.files).lock(LOCK, wait=True):
            checkpoint = Checkpoint(self.files)
            try:
                return recover(self.files, checkpoint), checkpoint.digest()
            finally:
                checkpoint.close()

    def renew(self, version: int, chain: tuple[int, ...] | None) -> None:
        """Say to the cleaner what this reader holds and reads; a sign of life."""
        if self.name is not None:
            Lease(self.name, version, chain, self._clock() + self._lease_ns).put(self.store)

    def leave(self) -> None:
        """This reader needs nothing any more."""
        if self.name is not None:
            Lease.drop(self.store, self.name)

    def _listing(self) -> Listing:
        found = listing(self.store, self._known)
        self._known = dict(found.indexes)
        return found

    def _prepare(self, target: int | None) -> Prepared:
        asked, there = target, self._listing().indexes
        newest = max(there, default=0)
        held = read_state(self.files)
        if target is None and held is not None and held.version > newest:
            there = self._listing().indexes  # another reader on this host knew a newer one
            newest = max(there, default=0)
        if not newest:
            raise StaleVersion("no version is published there; publish one, or name another folder")
        target = newest if target is None else target
        if target not in there:
            raise StaleVersion(
                f"version {target} is not published there; it is still to come, or was removed"
            )
        state = self._state(there, target)
        if target < state.version and newest == target and asked is None:
            return self._prepare(None)
        if target < state.version:
            raise StaleVersion(
                f"version {target} is older than {state.version}, which the checkpoint holds; pull it into an empty "
                "folder instead"
            )
        chain = cheapest_chain(there, target, state.version, state.digest)
        numbers = tuple(one.version for one in chain)
        self.renew(state.version or target, numbers)
        if not chain:
            return Prepared(self.files, state, None, "", ())
        step = Step(state.version, state.digest, target, there[target].after)
        name = (
            f"{KEPT}/{STAGED}{step.base}-{step.version}-{wrap(step.before ^ step.after) & (1 << 64) - 1:016x}"
        )
        if self._usable(name, step):
            return Prepared(self.files, state, step, name, ())
        self._stage(name, step, chain)
        return Prepared(self.files, state, step, name, numbers)

    def _state(self, there: dict[int, Index], target: int) -> State:
        """What the folder holds, after finishing what was left, counting, or making it; under its lock."""
        with LocalStore(self.files).lock(LOCK, wait=True):
            empty = not any(name.endswith(".safetensors") for name in self.files.list(""))
            if (empty and read_state(self.files) is None) or half_made(self.files):
                chain = cheapest_chain(there, target)
                self.renew(target, tuple(one.version for one in chain))
                return make_fresh(self.store, self.files, chain[0], self._progress)
            checkpoint = Checkpoint(self.files)
            try:
                state = recover(self.files, checkpoint)
                if state is not None and state.fingerprint == checkpoint.fingerprint:
                    return state
                digest, print_ = checkpoint.digest(), checkpoint.fingerprint
                same = [n for n, one in there.items() if (one.after, one.fingerprint) == (digest, print_)]
                state = State(max((n for n in same if n <= target), default=0), digest, print_)
                write_state(self.files, state)
                return state
            finally:
                checkpoint.close()

    def _usable(self, name: str, step: Step) -> bool:
        """True if another reader on this host has staged the step; what is staged for another base goes."""
        for staged in self.files.list(KEPT):
            if staged.startswith(STAGED) and not staged.startswith(f"{STAGED}{step.base}-"):
                self.files.remove(f"{KEPT}/{staged}")
        if name.rpartition("/")[2] not in self.files.list(KEPT):
            return False
        try:
            journal = Journal(self.files, name)
        except PatchMismatch:
            return False
        journal.close()
        return journal.step == step

    def _stage(self, name: str, step: Step, chain: tuple[Index, ...]) -> None:
        def proof(total: int) -> Step:
            if wrap(step.before + total) != step.after:
                raise PatchMismatch(
                    f"the digest of version {step.version} would be {wrap(step.before + total)} here, expected "
                    f"{step.after}; the checkpoint is not version {step.base}: count it with verify"
                )
            return step

        checkpoint = Checkpoint(self.files)
        try:
            opened = [Opened(self.store, one, self._progress) for one in chain]
            changes = squash(opened, checkpoint)
            LocalStore(self.files).put(name, journals.chunks(changes, proof))
        finally:
            checkpoint.close()
