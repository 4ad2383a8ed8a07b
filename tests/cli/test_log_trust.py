"""A log is trustworthy: what a run's result lists can be told again from its lines, whatever fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from weightsync.cli.log_check import faults_of, gone_of, lines, outcomes_of, rows_of
from weightsync.cli.record import RankRecord, RunRecord
from weightsync.cli.result import make_result
from weightsync.cli.scenario_files import load
from weightsync.reference.errors import UpdateAborted
from weightsync.reference.events import TRAINER
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.trainer import Trainer
from weightsync.reference.transmit import Job
from weightsync.reference.watched import Watched
from weightsync.sim.faults import AnyFault, Fault, Restart
from weightsync.testing.faults import FaultRun
from weightsync.testing.tiny import SETTINGS


def told(
    faults: Sequence[AnyFault], trainer: type[Trainer] = Trainer, settings: ProtocolSettings = SETTINGS
) -> tuple[FaultRun, list[dict[str, Any]], list[dict[str, Any]]]:
    """A run with faults on simulated time: the run, its log, and the updates that its result lists."""
    faulty = FaultRun(faults, trainer=trainer, settings=settings)
    with lines() as found:
        report = faulty.run()
    elements = sum(meta.numel for meta in faulty.deployment.tensors)
    outcomes = list(report.outcomes["trainer.0"])
    lead = RankRecord(outcomes=outcomes, inside=[(0, 0)] * len(outcomes))
    record = RunRecord("sim", 0, report.trace, [lead])
    rows = rows_of(make_result(load("tiny-fault"), record))
    assert {row["elements"] for row in rows} <= {elements}
    return faulty, found, rows


faults = st.builds(
    Fault,
    st.sampled_from(["trainer.0", "trainer.1", "rollout0.0", "rollout1.0", "rollout1.1"]),
    st.integers(1, 150),
    st.sampled_from(["fail", "fail-after", "stall"]),
)
kills = st.builds(Fault, st.sampled_from(["rollout0.0", "rollout1.1"]), st.integers(1, 150), st.just("kill"))
"""Of a rank; its rollout stays gone, or is started again so many ms later."""


@settings(deadline=None, max_examples=60)
@given(st.lists(faults, max_size=3), st.none() | kills, st.none() | st.sampled_from([5, 80, 700]))
def test_the_log_of_a_run_with_faults_tells_its_outcomes_again_and_who_is_gone(
    planted: list[Fault], kill: Fault | None, back_ms: int | None
) -> None:
    again = [] if kill is None or back_ms is None else [Restart(kill.rank, back_ms)]
    faulty, found, rows = told([*planted, *([kill] if kill else []), *again])
    assert outcomes_of(found) == rows
    assert [fault for line in found for fault in faults_of(line)] == []
    event(f"aborted: {sum(not row['committed'] for row in rows)}")
    lead = next(half for half in faulty.trainers if half.lead)
    assert gone_of(found) == lead.gone
    back = [(line["update"], line["rollout"]) for line in found if line["event"] == "rollout_back"]
    assert back == [(row["update"], number) for row in rows for number in row["rejoined"]]
    event(f"back: {len(back)}")
    times: dict[str, int] = {}
    for line in found:
        assert times.get(line["rank"], 0) <= line["time_ns"]
        times[line["rank"]] = line["time_ns"]
    assert "INFO" not in {line["level"] for line in found if line["event"] == "update_aborted"}


class FailsOnce(Trainer):
    """Its second update fails."""

    async def commit(self, job: Job, deadline_ns: int) -> None:
        if self.updates == 2:
            raise UpdateAborted("commit", "somebody said no")
        await super().commit(job, deadline_ns)


class Forgets(Watched):
    """Does not log an update that failed."""

    def _log_end(self, metrics: Any, digest: int | None, error: Exception | None) -> None:
        if metrics.committed:
            super()._log_end(metrics, digest, error)


class Embellishes(Watched):
    """Logs every update as committed."""

    def _log(self, level: int, event: str, **data: Any) -> None:
        super()._log(level, event.replace("aborted", "committed"), **data)


@pytest.mark.parametrize("wrong", [Forgets, Embellishes])
def test_a_log_that_leaves_out_or_changes_an_update_is_seen(
    wrong: type[Watched], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, right, rows = told([], FailsOnce)
    assert outcomes_of(right) == rows
    assert not all(row["committed"] for row in rows)
    monkeypatch.setattr("weightsync.reference.trainer.Watched", wrong)
    _, found, rows = told([], FailsOnce)
    assert outcomes_of(found) != rows


def test_a_loss_that_ends_the_run_is_logged_with_the_update_that_it_ended() -> None:
    ends = ProtocolSettings(**{f: getattr(SETTINGS, f) for f in SETTINGS.__slots__ if f != "on_rollout_loss"})
    assert ends.on_rollout_loss == "fail"
    _, found, _ = told([Fault("rollout1.0", 40, "kill")], settings=ends)
    last = [line for line in found if line["logger"] == TRAINER][-2:]
    assert [line["event"] for line in last] == ["rollout_lost", "update_aborted"]
    assert last[0]["rollout"] == 1
    assert "rollout1.0 was lost" in last[1]["reason"]


@pytest.mark.parametrize("back_ms", [5, 80])
def test_a_rollout_that_is_started_again_is_said_to_be_lost_and_to_be_back(back_ms: int) -> None:
    _, found, rows = told([Fault("rollout1.1", 40, "kill"), Restart("rollout1.1", back_ms)])
    (lost,) = [line for line in found if line["event"] == "rollout_lost"]
    (back,) = [line for line in found if line["event"] == "rollout_back"]
    (row,) = [row for row in rows if row["rejoined"]]
    assert (lost["rollout"], back["rollout"], back["full"]) == (1, 1, True)
    assert lost["update"] <= back["update"] == row["update"]
    assert (row["committed"], row["rejoined"], row["gone"]) == (True, [1], [])


class QuietReturn(Watched):
    """Does not log that a rollout is back."""

    def _log(self, level: int, event: str, **data: Any) -> None:
        if event != "rollout_back":
            super()._log(level, event, **data)


class QuietLoss(Watched):
    """Does not log that a rollout was lost."""

    def _log(self, level: int, event: str, **data: Any) -> None:
        if event != "rollout_lost":
            super()._log(level, event, **data)


def test_a_log_that_leaves_out_a_return_or_a_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted = [Fault("rollout1.1", 40, "kill"), Restart("rollout1.1", 80)]
    faulty, found, _ = told(planted)
    assert gone_of(found) == faulty.trainers[0].gone == {}
    monkeypatch.setattr("weightsync.reference.trainer.Watched", QuietReturn)
    assert set(gone_of(told(planted)[1])) == {1}
    monkeypatch.setattr("weightsync.reference.trainer.Watched", QuietLoss)
    with pytest.raises(ValueError, match="rollout_back of rollout 1, gone are"):
        gone_of(told(planted)[1])


def test_dirty_rollouts_and_given_up_updates_say_why() -> None:
    _, found, _ = told([Fault("rollout1.1", 60, "kill")])
    dirty = [line for line in found if line["event"] == "rollout_dirty"]
    assert {line["rank"] for line in dirty} == {"rollout1.0"}
    assert "rollout1.1" in dirty[0]["why"]
    assert [line["version"] for line in found if line["event"] == "update_given_up"][:1] != []


def test_an_outcome_that_never_began_is_told_too() -> None:
    class Nobody(Trainer):
        async def connect(self, deadline_ns: int) -> None:
            if self.updates == 2:
                await self.stage("connect", self.nobody(), deadline_ns)
            await super().connect(deadline_ns)

        async def nobody(self) -> None:
            raise OSError("the network is down")

    _, found, rows = told([], Nobody)
    assert outcomes_of(found) == rows
    assert rows[1]["version"] is None
    assert Outcome(2, None, False, rows[1]["reason"]).reason.count("the network is down") == 2
