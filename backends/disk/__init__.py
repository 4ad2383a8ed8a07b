"""Weights through a folder or an object store: versions published as folders, pulled in place, safe to retry."""

from weightsync.backends.disk.chains import cheapest_chain
from weightsync.backends.disk.checkpoint import Checkpoint, State, reading
from weightsync.backends.disk.cleaner import clean, plan_cleaning
from weightsync.backends.disk.files import LocalFiles
from weightsync.backends.disk.index import Index, listing
from weightsync.backends.disk.leases import Lease
from weightsync.backends.disk.live import LiveReader, update_buckets
from weightsync.backends.disk.names import FolderLocked
from weightsync.backends.disk.prepared import Prepared
from weightsync.backends.disk.publisher import Publisher, PublisherSettings
from weightsync.backends.disk.reader import CheckpointReader
from weightsync.backends.disk.store import LocalStore, Store

__all__ = [
    "Checkpoint",
    "CheckpointReader",
    "FolderLocked",
    "Index",
    "Lease",
    "LiveReader",
    "LocalFiles",
    "LocalStore",
    "Prepared",
    "Publisher",
    "PublisherSettings",
    "State",
    "Store",
    "cheapest_chain",
    "clean",
    "listing",
    "plan_cleaning",
    "reading",
    "update_buckets",
]
