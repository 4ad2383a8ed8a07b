"""The verbs on a modelled cluster."""

from weightsync.sim.backend import SimCluster, SimEngine, SimVerbs
from weightsync.sim.clock import SimClock
from weightsync.sim.faults import Fault, FaultPlan
from weightsync.sim.fluid import FluidNet, Link
from weightsync.sim.hardware import Profile, load_profile, profile_names
from weightsync.sim.ledger import Ledger
from weightsync.sim.world import SimWorld

__all__ = [
    "Fault",
    "FaultPlan",
    "FluidNet",
    "Ledger",
    "Link",
    "Profile",
    "SimClock",
    "SimCluster",
    "SimEngine",
    "SimVerbs",
    "SimWorld",
    "load_profile",
    "profile_names",
]
