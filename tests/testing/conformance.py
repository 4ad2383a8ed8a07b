"""The conformance kit: every test that the verbs of a backend must pass.

Subclass it in a test module::

    class TestMine(HostMemory, BackendConformance):
        def make_world(self):
            return MyWorld()

``World.run`` runs a program per rank over the backend's verbs. ``Memory`` makes each rank's bytes, and reads
and writes them past the verbs; a backend on a device overrides it. One basic fault turns many tests red, so
start with the failures of the first part, in the order of ``BackendConformance``'s bases.
"""

from __future__ import annotations

from weightsync.testing.conformance_base import ConformanceBase
from weightsync.testing.conformance_control import ControlConformance
from weightsync.testing.conformance_groups import GroupConformance
from weightsync.testing.conformance_losses import LossConformance
from weightsync.testing.conformance_source import SourceConformance
from weightsync.testing.conformance_target import TargetConformance
from weightsync.testing.conformance_update import UpdateConformance
from weightsync.testing.conformance_wire import WireConformance
from weightsync.testing.memory import HostMemory, Memory
from weightsync.testing.worlds import World

__all__ = ["BackendConformance", "ConformanceBase", "HostMemory", "Memory", "World"]


class BackendConformance(
    SourceConformance,
    WireConformance,
    TargetConformance,
    ControlConformance,
    GroupConformance,
    LossConformance,
    UpdateConformance,
):
    """Bytes of the trainer, wire, bytes of the rollout, control plane, data groups, losses, whole updates."""
