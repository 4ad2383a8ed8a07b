"""The lead's wait for rollouts that are on their way back: the last update is theirs, too."""

from __future__ import annotations

import asyncio
import contextlib

from weightsync.cli.desk import Desk
from weightsync.cli.scenario import Scenario
from weightsync.reference.errors import DeadlineExceeded
from weightsync.reference.members import RankId
from weightsync.reference.membership import until_back
from weightsync.reference.trainer import Trainer


async def await_returns(scenario: Scenario, desk: Desk, half: Trainer) -> None:
    """Return once every rollout that the launcher starts again can be taken in. To be called on the lead.

    A run that is over before they are back would say nothing about them, so this stands before its last update;
    the updates before go on without them. One that does not come is left out, and the run's checks say so.
    """
    kill = scenario.faults.kill
    killed = [] if kill is None else [RankId("rollout", kill.rollout, kill.rank)]
    back = await asyncio.to_thread(desk.all_back, killed)
    numbers = sorted({RankId.parse(name).rollout for name in back})
    with contextlib.suppress(DeadlineExceeded):
        await until_back(half, numbers, half.deadline_ns(half.settings.patience_ns))
