"""``status.json``: how a run stands, written into its folder after each update, and read by whoever asks.

The process that owns the run holds a lock on ``status.lock`` while it lives. The system takes the lock back when
that process ends, however it ends; so a file that says ``running`` beside a lock that nobody holds is of a dead run.
No clock and no process number is needed, and no other process can be taken for the owner.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from weightsync.cli.scenario import Scenario
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.members import RankId
from weightsync.reference.rollout import Rollout
from weightsync.reference.status import RankStatus, TrainerStatus, assemble
from weightsync.reference.trainer import Trainer

FILE, LOCK = "status.json", "status.lock"
FORMAT = 1
ERRORS = 20
"""How many of the latest errors a file keeps."""

RUNNING, ENDED, FAILED, DEAD = "running", "ended", "failed", "dead"
"""Where a run stands; ``dead`` is never written: its owner ended without a word."""


class FolderInUse(WeightSyncError):
    """Another run that still lives writes to the folder."""


class NoStatus(WeightSyncError):
    """A folder holds no run's status."""


class StatusFile:
    """The status of one run, owned by this process; a context manager around the run.

    Args:
        folder: where the file goes; made if it is not there. None writes nothing.
        about: what the run is, such as its scenario and backend; stands in the file as it is.

    Raises:
        FolderInUse: on entry, another run writes there.
    """

    def __init__(self, folder: Path | None, **about: Any) -> None:
        self.folder = folder
        self._data: dict[str, Any] = {
            "format": FORMAT, **about, "state": RUNNING, "verdict": None, "status": None, "errors": [],
        }  # fmt: skip
        self._lock: BinaryIO | None = None

    def __enter__(self) -> Self:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = (self.folder / LOCK).open("ab")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise FolderInUse(
                    f"a run that still goes on writes to {self.folder}; wait for it, or choose another folder"
                ) from None
            self._write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            said = str(error) if isinstance(error, Exception) else "it was interrupted"
            self._end(FAILED, f"the run failed: {said or type(error).__name__}")
        if self._lock is not None:
            self._lock.close()

    def told(self, status: Mapping[str, Any]) -> None:
        """An update is over; ``status`` is what ``TrainerStatus.to_dict`` writes."""
        self._data["status"] = dict(status)
        for error in _errors(status):
            if error["error"] not in [
                old["error"] for old in self._data["errors"] if old["of"] == error["of"]
            ]:
                self._data["errors"] = [*self._data["errors"], error][-ERRORS:]
        self._write()

    def ended(self, ok: bool, text: str) -> None:
        """The run came to its end, with this verdict."""
        self._end(ENDED if ok else FAILED, text)

    def _end(self, state: str, verdict: str) -> None:
        self._data |= {"state": state, "verdict": verdict}
        self._write()

    def _write(self) -> None:
        if self.folder is None:
            return
        new = self.folder / f"{FILE}.new"
        new.write_text(json.dumps(self._data, indent=1) + "\n", encoding="utf-8")
        new.replace(self.folder / FILE)


@dataclass(frozen=True)
class Found:
    """What a run's folder says.

    Attributes:
        data: the file.
        state: where the run stands: the file's own word, or ``dead``.
    """

    data: Mapping[str, Any]
    state: str

    @property
    def clean(self) -> bool:
        """True when the run goes on or ended well, and every rollout holds the trainer's version."""
        status = self.data["status"]
        return self.state in (RUNNING, ENDED) and status is not None and bool(status["clean"])

    def to_dict(self) -> dict[str, Any]:
        """The file, with where the run stands and whether all is clean."""
        return {**self.data, "state": self.state, "clean": self.clean}


def read(folder: Path) -> Found:
    """The status in a run's folder.

    Raises:
        NoStatus: there is none, or it is another format's.
    """
    held = _held(folder)  # before the file: a run that ends in between has written its last word by then
    try:
        data = json.loads((folder / FILE).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        inside = sorted(str(one.parent) for one in folder.glob(f"*/{FILE}"))
        hint = f"look in {' or '.join(inside)}" if inside else "run a scenario with --out FOLDER"
        raise NoStatus(f"{folder} holds no {FILE}, expected that of a run; {hint}") from None
    except ValueError as error:
        raise NoStatus(f"{folder / FILE} is no JSON: {error}; a run replaces it as a whole") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise NoStatus(
            f"{folder / FILE} has format {found!r}, expected {FORMAT}; read it with its own version"
        )
    state = data["state"]
    alive = held or _held(folder)  # again, for a run that began in between
    return Found(data, DEAD if state == RUNNING and not alive else state)


def status_of_run(folder: Path | None, scenario: Scenario, backend: str, seed: int | None) -> StatusFile:
    """The status file of a scenario's run; writes nothing in a process that another one reports for."""
    work = scenario.workload
    return StatusFile(
        folder if owns_run() else None,
        scenario=scenario.name, backend=backend, seed=work.seed if seed is None else seed, steps=work.steps,
    )  # fmt: skip


def look(trainer: Trainer, rollouts: Mapping[RankId, Rollout]) -> TrainerStatus:
    """The status of ranks that are all in this process: read, not asked, so that no time passes."""
    return assemble(trainer, {rank: RankStatus.of(half) for rank, half in rollouts.items()})


def owns_run(environ: Mapping[str, str] = os.environ) -> bool:
    """True in the process that reports for its run; with torchrun, which starts many, the first one's."""
    return "TORCHELASTIC_RUN_ID" not in environ or environ.get("RANK") == "0"


def _held(folder: Path) -> bool:
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False


def _errors(status: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What went wrong, by whom it is told: the last update, gone rollouts, and each rank's own word."""
    said: list[tuple[str, str | None]] = []
    if status["last"] is not None and not status["last"]["committed"]:
        said.append(("trainer", f"update {status['last']['update']}: {status['last']['reason']}"))
    for rollout in status["rollouts"]:
        said.append((f"rollout{rollout['rollout']}", rollout["gone"]))
        said += [(one["rank"], one.get("silent") or one.get("error")) for one in rollout["ranks"]]
    return [{"update": status["update"], "of": of, "error": error} for of, error in said if error]
