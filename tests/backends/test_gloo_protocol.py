"""A whole run over gloo groups and a real TCPStore: bits, versions and verbs as in process, and nothing left behind.

What it has in common with the other backends is tested in ``test_equivalence.py``, there over a store in memory.
"""

from __future__ import annotations

import threading

import pytest

from weightsync.backends.store import host_store
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.ranks import GlooRanks
from weightsync.testing.scenario import run_scenario
from weightsync.testing.tiny import tiny_deployment

DENSITIES = (1.0, 0.3, 0.0)


@pytest.mark.parametrize("receive", ["stage", "stream"])
def test_three_updates_over_a_tcp_store_are_those_of_one_process(receive: str) -> None:
    settings = ProtocolSettings(receive=receive)  # type: ignore[arg-type]
    before, store = threading.active_count(), host_store()
    world = GlooRanks(store=store)
    found = run_scenario(world, tiny_deployment(), settings, densities=DENSITIES)
    assert world.left_over == []
    assert threading.active_count() == before
    assert found.problems() == []
    wanted = run_scenario("inprocess", tiny_deployment(), settings, densities=DENSITIES)
    assert found.updates == wanted.updates
    assert found.verbs() == wanted.verbs()


def test_two_runs_share_a_store_under_different_prefixes() -> None:
    store = host_store()
    for prefix in ("first", "second"):
        world = GlooRanks(store=store, prefix=prefix)
        assert run_scenario(world, tiny_deployment(), densities=DENSITIES).problems() == []
