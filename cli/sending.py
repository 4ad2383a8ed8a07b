"""What the lead would send on each route, bucket by bucket, from counts alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from weightsync.reference.buckets import END_BYTES
from weightsync.reference.deployment import Deployment
from weightsync.reference.plan import TransferPlan
from weightsync.reference.routes import Route, one_route

Way: TypeAlias = Route


def sending(layout: Deployment, route: str) -> tuple[Way, ...]:
    """The routes to all rollout ranks under ``policy.route``."""
    ranks = [rank for rollout in layout.rollouts for rank in rollout.ranks]
    return layout.routes(route) or one_route(layout.plan, ranks)


def sent(plan: TransferPlan, way: Way, counts: Sequence[int] | None) -> list[int]:
    """Bytes of each bucket of one update on one route, trailer last; estimated where they are no function of counts.

    Args:
        plan: the transfer plan.
        way: the route.
        counts: changed elements per piece, taken to be spread evenly over each; None for a full update.
    """
    found = []
    for group in plan.groups(counts):
        joined = [plan.pieces[number].count if counts is None else counts[number] for number in group.pieces]
        shares = joined if way.is_whole else way.estimate(group, joined)
        found += [bucket.likely for bucket in way.cuts(group, shares)]
    return [*found, END_BYTES]
