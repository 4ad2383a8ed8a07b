"""Which phase of an update each verb belongs to."""

from __future__ import annotations

PHASES = {
    "connect": "connect", "disconnect": "connect",
    "call": "control", "post": "control", "reply": "control", "agree": "control", "serve": "idle",
    "spawn": "control", "join": "wait", "until_found": "wait", "cancel": "control",
    "pause": "pause_flush", "resume": "continue",
    "snapshot": "snapshot", "diff": "diff", "squash": "diff", "exchange": "tp_gather", "gather": "tp_gather",
    "merge": "encode", "narrow": "encode", "encode": "encode", "decode": "decode",
    "send": "broadcast", "receive": "broadcast",
    "validate": "validate", "apply": "apply", "digest": "digest", "compare_digests": "digest",
    "commit": "commit", "rollback": "rollback",
}  # fmt: skip
"""The phase under which each verb's spans are summed."""
