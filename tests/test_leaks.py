"""Fifty updates, most of which fail, leave no thread, no descriptor and no memory behind."""

from __future__ import annotations

import gc
import logging
import threading
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest

from weightsync.reference.protocol import Outcome
from weightsync.testing.failing import FailingRun, Unwatched, Wrong

UPDATES = 50
WARM = 20
"""By then every cache is full: epochs, dead groups that are remembered, lazily made tables."""

GROWTH_BYTES = 200 << 10
"""Some of it are the test's own records, some what happens to be under way; what failed updates left was 800 KiB."""


class Held(NamedTuple):
    """What a process holds at one moment."""

    threads: int
    descriptors: int
    nbytes: int


def held() -> Held:
    gc.collect()
    return Held(
        threading.active_count(),
        len(list(Path("/proc/self/fd").iterdir())),
        tracemalloc.get_traced_memory()[0],
    )


@pytest.mark.parametrize("backend", ["inprocess", "gloo"])
@pytest.mark.parametrize(
    "wrong",
    [Wrong("rollout1.0", 0, "decode"), Wrong("trainer.0", 0, "send", 2), Wrong("trainer.1", 0, "gather")],
    ids=["a receiver refuses", "the sender fails", "a trainer rank fails"],
)
def test_nothing_is_left_by_fifty_updates_of_which_most_fail(backend: str, wrong: Wrong) -> None:
    found: list[Held] = []

    def each(outcome: Outcome) -> None:
        assert outcome.committed == (outcome.update % 3 == 0)
        if outcome.update in (WARM + 1, UPDATES - 2):  # after updates that committed: groups are open then
            found.append(held())

    before = threading.active_count()
    tracemalloc.start()
    logging.disable(logging.CRITICAL)  # pytest keeps what is logged
    try:
        run = FailingRun(backend, wrong, updates=UPDATES, trace=Unwatched(), each=each).run()
    finally:
        logging.disable(logging.NOTSET)
        tracemalloc.stop()
    warm, last = found
    assert last.threads <= warm.threads
    assert last.descriptors <= warm.descriptors
    assert last.nbytes - warm.nbytes < GROWTH_BYTES
    assert all(end is None for end in run.ends.values())
    assert getattr(run.world, "left_over", []) == []
    assert threading.active_count() == before
    assert run.torn == []
