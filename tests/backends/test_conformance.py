"""The conformance kit on every backend that needs no device."""

from __future__ import annotations

from weightsync.testing.conformance import BackendConformance, HostMemory
from weightsync.testing.worlds import InprocessRanks, SimRanks, World, world_of


class TestInprocess(HostMemory, BackendConformance):
    def make_world(self) -> World:
        return InprocessRanks()


class TestSim(HostMemory, BackendConformance):
    def make_world(self) -> World:
        return SimRanks()


class TestGloo(HostMemory, BackendConformance):
    def make_world(self) -> World:
        return world_of("gloo")()
