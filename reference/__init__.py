"""What is right: the pure core of a weight update, its protocol and its oracles."""

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.audit import AuditReport
from weightsync.reference.buckets import Bucket
from weightsync.reference.capture import Captured
from weightsync.reference.delta import SparsePatch, UndoLog
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.errors import (
    AttributeMismatch,
    BackendUnavailable,
    DeadlineExceeded,
    GroupBroken,
    MissingTPAttributes,
    PatchMismatch,
    PeerLost,
    PlanMismatch,
    ProbeError,
    RemoteError,
    StaleVersion,
    UnsupportedCapability,
    UpdateAborted,
    WeightSyncError,
)
from weightsync.reference.members import Group, RankId, RolloutRef
from weightsync.reference.metrics import UpdateMetrics, update_metrics
from weightsync.reference.model import ModelShape
from weightsync.reference.modules import Model, Module
from weightsync.reference.parallel import TrainerLayout
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.plan import TransferPlan
from weightsync.reference.probe import Probe, Probed
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.rowmap import RowMap
from weightsync.reference.snapshot import BaselineSlots
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trace import Span, Trace
from weightsync.reference.trainer import Trainer

__all__ = [
    "AttributeLedger",
    "AttributeMismatch",
    "AuditReport",
    "BackendUnavailable",
    "BaselineSlots",
    "Bucket",
    "Captured",
    "DeadlineExceeded",
    "Deployment",
    "Group",
    "GroupBroken",
    "MissingTPAttributes",
    "Model",
    "ModelShape",
    "Module",
    "Outcome",
    "ParamMeta",
    "PatchMismatch",
    "PeerLost",
    "PlanMismatch",
    "Probe",
    "ProbeError",
    "Probed",
    "ProtocolSettings",
    "RankId",
    "RemoteError",
    "Rollout",
    "RolloutLayout",
    "RolloutRef",
    "RowMap",
    "Source",
    "Span",
    "SparsePatch",
    "StaleVersion",
    "TPAttributes",
    "Target",
    "Trace",
    "Trainer",
    "TrainerLayout",
    "TransferPlan",
    "UndoLog",
    "UnsupportedCapability",
    "UpdateAborted",
    "UpdateMetrics",
    "Verbs",
    "WeightSyncError",
    "update_metrics",
]
