"""Many runs over a few processes: a run that hangs or takes its process down is a finding, not the end of the sweep."""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TextIO

BAR_CELLS = 40
GRACE_S = 5.0
"""How long a process may take to end when it is told to."""

START_S = 120.0
"""How long a process may take to come up, on a busy machine."""


@dataclass(frozen=True)
class Failure:
    """One item whose check did not pass.

    Attributes:
        item: what was checked.
        sentences: what was wrong with it.
    """

    item: Any
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return "\n  ".join([str(self.item), *self.sentences])


class Bar:
    """A progress bar of one line; silent where the stream is no terminal.

    Args:
        label: what is being done.
        total: how many steps there are.
        stream: by default the process's own stderr.
    """

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self.label = label
        self.total = total
        self.stream = stream if stream is not None else sys.__stderr__
        self.began = time.monotonic()

    def __call__(self, done: int, failed: int) -> None:
        """Show that ``done`` steps are over, ``failed`` of which failed."""
        if self.stream is None or not self.stream.isatty():
            return
        full = BAR_CELLS * done // max(1, self.total)
        bar = "#" * full + "." * (BAR_CELLS - full)
        words = f"{done}/{self.total}, {failed} failed, {time.monotonic() - self.began:.0f} s"
        self.stream.write(f"\r{self.label} [{bar}] {words}" + ("\n" if done == self.total else ""))
        self.stream.flush()


def require_none(failures: Sequence[Failure], total: int) -> None:
    """Raise AssertionError with every plan that failed; return when none of ``total`` did."""
    plans = "\n".join(map(str, failures))
    assert not failures, f"{len(failures)} of {total} plans break a promise:\n{plans}"


def sweep(
    check: Callable[[Any], Sequence[str]],
    items: Iterable[Any],
    *,
    workers: int = 2,
    limit_s: float = 120.0,
    renew: int = 500,
    progress: Callable[[int, int], None] | None = None,
) -> list[Failure]:
    """Check every item in ``workers`` spawned processes; what failed, in the order of the items.

    Args:
        check: what is wrong with an item, one sentence each; nothing when all is well. It, the items and the
            sentences are pickled, so it is a function of a module, or a ``partial`` of one. What it raises counts
            as a failure.
        items: what to check.
        workers: how many processes.
        limit_s: a check that takes longer counts as hung, and its process is ended.
        renew: after so many items a process gives way to a new one, so that nothing piles up in it.
        progress: called with the items done and the failures so far, after each.
    """
    waiting = deque(enumerate(items))
    found: dict[int, Failure] = {}
    done = 0
    crew = [_Worker(check, limit_s, renew) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(worker.busy for worker in crew):
            for worker in crew:
                if waiting and not worker.busy:
                    worker.give(*waiting.popleft())
            for worker in crew:
                if (over := worker.look()) is not None:
                    number, failure = over
                    done += 1
                    if failure is not None:
                        found[number] = failure
                    if progress is not None:
                        progress(done, len(found))
            wait([worker.pipe for worker in crew if worker.busy], timeout=0.5)
    finally:
        for worker in crew:
            worker.end()
    return [found[number] for number in sorted(found)]


class _Worker:
    """One process at a time, replaced when it died, hung, or did ``renew`` items."""

    def __init__(self, check: Callable[[Any], Sequence[str]], limit_s: float, renew: int) -> None:
        self._check = check
        self._limit_s = limit_s
        self._renew = renew
        self._given: tuple[int, Any] | None = None
        self._until = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, far = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(self._check, far), daemon=True)
        self._process.start()
        far.close()
        self._done, self._up = 0, False

    @property
    def busy(self) -> bool:
        """True while an item is being checked."""
        return self._given is not None

    def give(self, number: int, item: Any) -> None:
        """Have one item checked."""
        if self._done >= self._renew:
            self.end()
            self._start()
        self._given = number, item
        self._until = time.monotonic() + (self._limit_s if self._up else START_S)
        with contextlib.suppress(BrokenPipeError):  # it died meanwhile; look() will say so
            self.pipe.send(item)

    def look(self) -> tuple[int, Failure | None] | None:
        """The item's number and failure once it is over; None while it is not."""
        if self._given is None:
            return None
        number, item = self._given
        if self.pipe.poll():
            try:
                sentences = self.pipe.recv()
                if sentences is None:  # the process is up, and begins
                    self._up, self._until = True, time.monotonic() + self._limit_s
                    return None
            except EOFError:
                self._process.join(GRACE_S)
                code = self._process.exitcode
                sentences = (
                    f"it, or what an earlier one left behind, took its process down: exit code {code}",
                )
                self._replace()
        elif time.monotonic() > self._until:
            sentences = (f"it did not end within {self._limit_s if self._up else START_S} s",)
            self._replace()
        else:
            return None
        self._given = None
        self._done += 1
        return number, Failure(item, tuple(sentences)) if sentences else None

    def _replace(self) -> None:
        self.end()
        self._start()

    def end(self) -> None:
        """End the process, whatever it does."""
        self.pipe.close()
        self._process.kill()
        self._process.join(GRACE_S)


def _work(check: Callable[[Any], Sequence[str]], pipe: Connection) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:  # the processes have the cores to themselves already
        torch.set_num_threads(1)
    pipe.send(None)
    while True:
        try:
            item = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            sentences = tuple(check(item))
        except Exception as error:
            sentences = (f"its check failed: {type(error).__name__}: {error}",)
        pipe.send(sentences)
