"""What is promised when something goes wrong, promise by promise, on the simulated clock; and a hundred plans."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import pytest

from weightsync.reference.control import Request
from weightsync.reference.errors import PeerLost
from weightsync.reference.members import RankId
from weightsync.reference.protocol import Outcome
from weightsync.reference.trainer import Trainer
from weightsync.reference.transmit import Job
from weightsync.sim.backend import SimVerbs
from weightsync.sim.faults import Fault
from weightsync.testing.faults import FaultRun
from weightsync.testing.tiny import MS, SETTINGS, STALL_NS

SENDER, SECOND = "trainer.0", "trainer.1"
LEASE_NS = 2 * STALL_NS
STREAM = replace(SETTINGS, receive="stream")
BOTH_WAYS = pytest.mark.parametrize("settings", [SETTINGS, STREAM], ids=["stage", "stream"])


class Place(NamedTuple):
    """One await of a run without faults."""

    rank: str
    ordinal: int
    verb: str
    update: int


class Notes:
    """Hooks that note the place of every await on the way to the run's own."""

    def __init__(self, verbs: SimVerbs, places: list[Place]) -> None:
        self.verbs = verbs
        self.inner: Any = verbs.hooks
        self.places = places

    async def before(self, verb: str) -> int:
        ordinal: int = await self.inner.before(verb)
        self.places.append(Place(str(self.verbs.me), ordinal, verb, self.verbs.update))
        return ordinal

    async def after(self, verb: str, ordinal: int) -> None:
        await self.inner.after(verb, ordinal)


@lru_cache(maxsize=4)
def places(settings: Any = SETTINGS) -> tuple[Place, ...]:
    found: list[Place] = []

    def note(verbs: SimVerbs) -> None:
        verbs.hooks = Notes(verbs, found)

    assert FaultRun(settings=settings, verbs=note).run().violations == []
    return tuple(found)


def fault(kind: Any, rank: str, update: int, verb: str, nth: int = 1, settings: Any = SETTINGS) -> Fault:
    """A fault at the ``nth`` await of a kind in one update."""
    found = [p.ordinal for p in places(settings) if (p.rank, p.update, p.verb) == (rank, update, verb)]
    return Fault(rank, found[nth - 1], kind)


def label_tells_bits(run: FaultRun, rank: str, label: int) -> None:
    half, target = run.rollouts[RankId.parse(rank)], run.targets[RankId.parse(rank)]
    assert (half.version, half.dirty) == (label, None)
    assert run.history.differences(label, RankId.parse(rank), target.weights) == []


def status(run: FaultRun, rank: str) -> Mapping[str, Any]:
    return asyncio.run(run.rollouts[RankId.parse(rank)].status(Request("anybody", "status", {}, 1, None)))


def lead(run: FaultRun) -> Sequence[Outcome]:
    return run.report.outcomes[SENDER]


def watched() -> tuple[type[Trainer], list[tuple[str, PeerLost, int]]]:
    """A trainer that tells of the losses which end it: (rank, error, when)."""
    losses: list[tuple[str, PeerLost, int]] = []

    class Watched(Trainer):
        async def update(self) -> Outcome:
            try:
                return await super().update()
            except PeerLost as lost:
                losses.append((str(self.verbs.me), lost, self.verbs.now_ns()))
                raise

    return Watched, losses


# ---- inside an update ----------------------------------------------------------------------------------------------


def test_a_rollout_killed_between_two_buckets_of_a_delta_holds_the_old_version() -> None:
    run = FaultRun([fault("kill", "rollout1.1", 2, "receive", 2)])
    assert run.run().violations == []
    label_tells_bits(run, "rollout1.1", 1)
    said = status(run, "rollout1.0")
    assert said["lost"] == "rollout1.1"
    assert "rollout1.1" in said["dirty"]
    assert said["generating"] is False


@BOTH_WAYS
def test_the_survivor_of_a_rollout_killed_between_two_buckets_of_a_delta_is_rolled_back(
    settings: Any,
) -> None:
    run = FaultRun([fault("kill", "rollout1.1", 2, "receive", 2, settings)], settings=settings)
    assert run.run().violations == []
    survivor = run.targets[RankId.parse("rollout1.0")]
    assert run.history.differences(1, RankId.parse("rollout1.0"), survivor.weights) == []
    assert lead(run)[-1].committed
    label_tells_bits(run, "rollout0.0", lead(run)[-1].version or 0)


@BOTH_WAYS
def test_a_sender_killed_between_two_buckets_of_a_delta_leaves_the_old_version_generating(
    settings: Any,
) -> None:
    run = FaultRun([fault("kill", SENDER, 2, "send", 2, settings)], settings=settings)
    assert run.run().violations == []
    for rank in ("rollout0.0", "rollout1.0"):
        label_tells_bits(run, rank, 1)
        assert status(run, rank)["generating"] is True
    assert all(engine.generating for engine in run.engines.values())


@BOTH_WAYS
def test_a_sender_killed_inside_a_full_update_leaves_a_rollout_paused_that_says_why(settings: Any) -> None:
    run = FaultRun([fault("kill", SENDER, 1, "send", 3, settings)], settings=settings)
    assert run.run().violations == []
    for rank in ("rollout0.0", "rollout1.0"):
        said = status(run, rank)
        assert said["generating"] is False
        assert said["dirty"] == (
            "full update 1 is not committed" if settings is STREAM else "it holds no weights yet"
        )
    assert not any(engine.generating for engine in run.engines.values())


def test_a_sender_killed_before_a_full_update_commits_leaves_applied_weights_dirty() -> None:
    run = FaultRun([fault("kill", SENDER, 1, "call", 7)])
    assert run.run().violations == []
    assert status(run, "rollout0.0")["dirty"] == "full update 1 is not committed"
    assert not run.engines[0].generating


def test_a_follower_killed_inside_a_full_update_makes_its_rollout_dirty_and_names_itself() -> None:
    run = FaultRun([fault("kill", "rollout1.1", 1, "receive", 2, STREAM)], settings=STREAM)
    assert run.run().violations == []
    said = status(run, "rollout1.0")
    assert said["generating"] is False
    assert said["dirty"] == "full update 1 is not committed"
    assert said["lost"] == "rollout1.1"
    assert not run.engines[1].generating
    assert run.engines[0].generating


# ---- losses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detect_ms", [0, 40])
@pytest.mark.parametrize("verb", ["agree", "snapshot", "exchange", "gather"])
@pytest.mark.parametrize(("killed", "other"), [(SENDER, SECOND), (SECOND, SENDER)])
def test_a_killed_trainer_rank_ends_the_run_by_the_deadline_and_is_named(
    killed: str, other: str, verb: str, detect_ms: int
) -> None:
    trainer, losses = watched()
    settings = replace(SETTINGS, connect_ns=2 * LEASE_NS, update_ns=2 * LEASE_NS)
    run = FaultRun(
        [fault("kill", killed, 2, verb)], trainer=trainer, settings=settings, detect_ns=detect_ms * MS
    )
    assert run.run().violations == []
    assert [(rank, lost.peer) for rank, lost, _ in losses] == [(other, killed)]
    assert LEASE_NS <= losses[0][2] - run.plan.times_ns[0] <= settings.update_ns


@BOTH_WAYS
def test_with_continue_the_run_goes_on_without_a_lost_rollout(settings: Any) -> None:
    run = FaultRun([fault("kill", "rollout1.0", 2, "decode", 1, settings)], settings=settings)
    assert run.run().violations == []
    assert lead(run)[-1].committed
    assert lead(run)[-1].members == (0,)


def test_with_continue_a_rollout_that_failed_is_back_in_the_next_update() -> None:
    run = FaultRun([fault("fail", "rollout1.0", 2, "decode")])
    assert run.run().violations == []
    assert [outcome.committed for outcome in lead(run)] == [True, False, True, True]
    assert lead(run)[2].members == (0, 1)


@pytest.mark.parametrize("killed", ["rollout0.0", "rollout1.0", "rollout1.1"])
def test_with_fail_a_lost_rollout_ends_the_run_on_every_trainer_rank_named(killed: str) -> None:
    settings = replace(SETTINGS, on_rollout_loss="fail")
    trainer, losses = watched()
    run = FaultRun([fault("kill", killed, 2, "decode")], trainer=trainer, settings=settings)
    run.run()
    assert sorted((rank, lost.peer) for rank, lost, _ in losses) == [(SENDER, killed), (SECOND, killed)]
    assert {rank.rollout for rank in run.rollouts if run.rollouts[rank].dirty is None} >= {0} - {
        RankId.parse(killed).rollout
    }


# ---- the decision ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [5, 6])
def test_a_commit_whose_reply_was_lost_is_done_once(nth: int) -> None:
    run = FaultRun([fault("fail-after", SENDER, 2, "call", nth)])
    assert run.run().violations == []
    assert [outcome.version for outcome in lead(run)] == [1, 2, 3, 4]
    assert all(outcome.committed for outcome in lead(run))


def test_a_prepared_rollout_whose_lease_ends_resumes_under_its_old_label_and_refuses_the_late_commit() -> (
    None
):
    seen: list[tuple[int, bool]] = []

    class Late(Trainer):
        async def commit(self, job: Job, deadline_ns: int) -> None:
            if self.updates == 2:
                await self.verbs.clock.sleep_until(
                    self.verbs.now_ns() + SETTINGS.lease_ns + SETTINGS.update_ns
                )
                deadline_ns = self.deadline_ns(SETTINGS.update_ns)
                if self.lead:
                    for ref in run.deployment.rollouts:
                        label_tells_bits(run, str(ref.leader), 1)
                        seen.append((run.rollouts[ref.leader].version, run.engines[ref.number].generating))
            await super().commit(job, deadline_ns)

    run = FaultRun(trainer=Late)
    late = [sentence for sentence in run.run().violations if not sentence.startswith("update 2, into which")]
    assert late == []
    assert seen == [(1, True), (1, True)]
    assert [outcome.committed for outcome in lead(run)] == [True, False, True, True]
    assert "version 2 is not in progress" in lead(run)[1].reason
    assert lead(run)[2].full == ()


@pytest.mark.parametrize("stale", [1, 2])
def test_a_late_abort_ends_nothing(stale: int) -> None:
    class Aborting(Trainer):
        async def transfer(self, job: Job, deadline_ns: int) -> None:
            if self.lead and self.updates == 3:
                for ref in self.rollouts.values():
                    await self.verbs.post(ref.leader, "abort", {"version": stale, "reason": "late"})
            await super().transfer(job, deadline_ns)

    run = FaultRun(trainer=Aborting)
    assert run.run().violations == []
    assert [outcome.version for outcome in lead(run)] == [1, 2, 3, 4]


# ---- versions and bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["gather", "send", "call"])
def test_a_version_that_was_tried_is_never_tried_again(verb: str) -> None:
    run = FaultRun([fault("fail", SENDER, 2, verb)])
    assert run.run().violations == []
    assert [outcome.version for outcome in lead(run)] == [1, 2, 3, 4]
    assert not lead(run)[1].committed
    assert all(half.highest == 4 for half in run.rollouts.values())


@pytest.mark.parametrize("rank", [SENDER, SECOND, "rollout0.0", "rollout1.1"])
def test_after_a_delta_that_failed_nobody_is_sent_everything(rank: str) -> None:
    verb = "gather" if rank.startswith("trainer") else "decode"
    run = FaultRun([fault("fail", rank, 2, verb)])
    assert run.run().violations == []
    assert [outcome.full for outcome in lead(run)[:1]] == [(0, 1)]
    assert all(outcome.full == () for outcome in lead(run)[1:])


def test_an_update_without_a_change_advances_the_version_and_sends_its_trailer_only() -> None:
    class Still(FaultRun):
        async def _optimize(self, rank: int, step: int) -> None:
            await super()._optimize(rank, 0)

    run = Still()
    assert run.run().violations == []
    assert [(outcome.version, outcome.changed) for outcome in lead(run)] == [
        (1, None),
        (2, 0),
        (3, 0),
        (4, 0),
    ]
    sends = [span.update for span in run.report.trace.spans if span.verb == "send"]
    assert [sends.count(update) for update in (2, 3, 4)] == [1, 1, 1]
    assert not any(span.verb == "apply" and span.update > 1 for span in run.report.trace.spans)
