"""Ranks as threads of this process, for the tests of the RL job."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from weightsync.cli.rl.local import at_once, groups
from weightsync.cli.rl.parallel import TensorParallel

OnRanks = Callable[[int, Callable[[TensorParallel], Any]], list[Any]]


@pytest.fixture(scope="session")
def on_ranks() -> OnRanks:
    """Have a function called on each rank of a group, at once; what it returned, per rank. Groups serve again."""
    idle: dict[int, list[TensorParallel]] = {}

    def run(size: int, call: Callable[[TensorParallel], Any]) -> list[Any]:
        tps = idle.pop(size, None) or groups(size)
        found = at_once([partial(call, tp) for tp in tps], tps)
        idle[size] = tps
        return found

    return run
