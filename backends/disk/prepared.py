"""A step that is read ahead: applied in place when nothing reads the checkpoint, made durable afterwards."""

from __future__ import annotations

from weightsync.backends.disk.checkpoint import (
    JOURNAL,
    LOCK,
    Checkpoint,
    State,
    drop_journal,
    read_state,
    recover,
    write_state,
)
from weightsync.backends.disk.files import Files
from weightsync.backends.disk.journal import Journal, Step
from weightsync.backends.disk.names import KEPT
from weightsync.backends.disk.store import LocalStore
from weightsync.reference.errors import StaleVersion


class Prepared:
    """A step that is read, decoded, proved and on this host's disk; nothing is applied yet.

    Attributes:
        version: where it leads.
        chain: the versions that were read for it, ascending; empty when another reader had prepared it already.
    """

    def __init__(
        self, files: Files, state: State, step: Step | None, name: str, chain: tuple[int, ...]
    ) -> None:
        self.version = step.version if step else state.version
        self.chain = chain
        self._files, self._state, self._step, self._name = files, state, step, name
        self._journal = Journal(files, name) if step else None
        self._checkpoint = Checkpoint(files)

    @property
    def elements(self) -> int:
        """Elements that it changes."""
        return self._journal.elements if self._journal else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the journal."""
        return self._journal.nbytes if self._journal else 0

    def apply(self) -> bool:
        """Write the new bits in place; to be called while nothing reads the checkpoint. O(changed).

        Returns True if this call wrote them, False if the checkpoint held the version already, as when another
        reader on this host was first. Killed anywhere, the next reader brings the old or the new version back.

        Raises:
            StaleVersion: the checkpoint holds neither the step's base nor its version; prepare again.
        """
        step, journal = self._step, self._journal
        if step is None or journal is None:
            return False
        with LocalStore(self._files).lock(LOCK, wait=True):
            state = read_state(self._files)
            if state is not None and (state.version, state.digest) == (step.version, step.after):
                return False
            state = recover(self._files, self._checkpoint)
            if (state.version, state.digest) != (step.base, step.before) if state else step.base != 0:
                now = "none" if state is None else str(state.version)
                raise StaleVersion(
                    f"step from version {step.base} to {step.version} does not fit the checkpoint, which holds {now}; "
                    "prepare again"
                )
            try:
                self._files.rename(self._name, JOURNAL)
            except FileNotFoundError:
                raise StaleVersion(
                    f"what was staged for version {step.version} is gone; prepare again"
                ) from None
            self._files.sync_folder(KEPT)
            for change in journal.changes():
                self._checkpoint.write(change, change.new)
            write_state(self._files, State(step.version, step.after, self._state.fingerprint))
        return True

    def settle(self) -> None:
        """Make the weights durable and drop the journal; while generation runs again. Once is enough per step."""
        if self._journal is None or self._step is None:
            return
        with LocalStore(self._files).lock(LOCK, wait=True):
            if JOURNAL.rpartition("/")[2] in self._files.list(KEPT):
                armed = Journal(self._files, JOURNAL)
                state, step = read_state(self._files), armed.step
                armed.close()
                if state is not None and step == self._step and state.version == step.version:
                    self._checkpoint.sync(self._journal.names())
                    drop_journal(self._files)

    def close(self) -> None:
        """Let the memory go; what was staged and not applied stays for the next reader."""
        if self._journal is not None:
            self._journal.close()
        self._checkpoint.close()

    def __enter__(self) -> Prepared:
        """Itself; closed at the end."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close it."""
        self.close()
