"""What a result says of each update beside its bytes: its times, and how its tensors travelled."""

from __future__ import annotations

from typing import Any

from weightsync.cli.lanes import pauses
from weightsync.cli.record import RunRecord
from weightsync.reference.metrics import exposed_ns, total_ns
from weightsync.reference.plan import TransferPlan
from weightsync.reference.protocol import Outcome
from weightsync.reference.wire.forms import Positions


def update_times(record: RunRecord) -> list[dict[str, Any]]:
    """Per update ``total_ns`` and ``exposed_ns``, and ``paused_ns`` of each rollout under its leader's name."""
    paused: dict[int, dict[str, int]] = {}
    for one in pauses(record.trace.spans):
        mine = paused.setdefault(one.update, {})
        mine[one.rank] = mine.get(one.rank, 0) + one.duration_ns
    found = []
    for number, outcome in enumerate(record.outcomes):
        calls = [one.inside[number] for one in record.trainers]
        found.append(
            {
                "total_ns": total_ns(calls),
                "exposed_ns": exposed_ns(calls),
                "paused_ns": dict(sorted(paused.get(outcome.update, {}).items())),
            }
        )
    return found


def tensors_sent(outcome: Outcome, plan: TransferPlan) -> dict[str, int] | None:
    """How many tensors travelled whole (``dense``), as changed elements (``sparse``) and not at all (``unchanged``).

    The plan decides, from the counts; where some rollouts got a full update beside a delta, these are the delta's.
    None where nothing was planned, and where the plan cuts a tensor into pieces: an outcome counts whole tensors.
    """
    if (outcome.counts is None and not outcome.full) or len(plan.pieces) != len(plan.tensors):
        return None
    dense = [one for group in plan.groups(outcome.counts) for one in group.dense]
    return {
        "dense": sum(dense),
        "sparse": len(dense) - sum(dense),
        "unchanged": len(plan.tensors) - len(dense),
    }


def forms_sent(outcome: Outcome, plan: TransferPlan) -> dict[str, dict[str, int | float]] | None:
    """Per form that the plan asks for, its ``tensors``, ``elements``, and ``likely_bytes`` of their sections.

    ``likely_bytes`` are the plan's estimate; exact for fixed forms. A range that is no smaller in its form goes out
    in the fixed one. None as for ``tensors_sent``.
    """
    if (outcome.counts is None and not outcome.full) or len(plan.pieces) != len(plan.tensors):
        return None
    found: dict[str, dict[str, int | float]] = {}
    for group in plan.groups(outcome.counts):
        for number, form in zip(group.pieces, group.forms, strict=True):
            meta = plan.tensors[plan.pieces[number].tensor]
            counts = None if form.positions is Positions.DENSE else outcome.counts
            count = meta.numel if counts is None else counts[number]
            row = found.setdefault(form.name, {"tensors": 0, "elements": 0, "likely_bytes": 0})
            row["tensors"] += 1
            row["elements"] += count
            row["likely_bytes"] += plan.wire.likely_bytes(form, count, meta.numel, meta.itemsize)
    for row in found.values():
        row["likely_bits_per_element"] = 8 * row["likely_bytes"] / row["elements"]
    return dict(sorted(found.items()))
