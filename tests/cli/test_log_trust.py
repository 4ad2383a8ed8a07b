"""A log is trustworthy: what a run's result lists can be told again from its lines, whatever fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from weightsync.cli.log_check import faults_of, lines, outcomes_of
from weightsync.cli.record import RankRecord, RunRecord
from weightsync.cli.result import make_result
from weightsync.cli.scenario_files import load
from weightsync.reference.errors import UpdateAborted
from weightsync.reference.events import TRAINER
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.trainer import Trainer
from weightsync.reference.transmit import Job
from weightsync.reference.watched import Watched
from weightsync.sim.faults import Fault
from weightsync.testing.faults import FaultRun
from weightsync.testing.tiny import SETTINGS


def without_digests(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "digests"} for row in result["updates"]]


def told(
    faults: Sequence[Fault], trainer: type[Trainer] = Trainer, settings: ProtocolSettings = SETTINGS
) -> tuple[FaultRun, list[dict[str, Any]], list[dict[str, Any]]]:
    """A run with faults on simulated time: the run, its log, and the updates that its result lists."""
    faulty = FaultRun(faults, trainer=trainer, settings=settings)
    with lines() as found:
        report = faulty.run()
    elements = sum(meta.numel for meta in faulty.deployment.tensors)
    record = RunRecord("sim", 0, report.trace, [RankRecord(outcomes=list(report.outcomes["trainer.0"]))])
    rows = without_digests(make_result(load("tiny-fault"), record))
    assert {row["elements"] for row in rows} <= {elements}
    return faulty, found, rows


faults = st.builds(
    Fault,
    st.sampled_from(["trainer.0", "trainer.1", "rollout0.0", "rollout1.0", "rollout1.1"]),
    st.integers(1, 150),
    st.sampled_from(["fail", "fail-after", "stall"]),
)
kills = st.builds(Fault, st.sampled_from(["rollout0.0", "rollout1.1"]), st.integers(1, 150), st.just("kill"))


@settings(deadline=None, max_examples=60)
@given(st.lists(faults, max_size=3), st.none() | kills)
def test_the_log_of_a_run_with_faults_tells_its_outcomes_again(
    planted: list[Fault], kill: Fault | None
) -> None:
    faulty, found, rows = told([*planted, *([kill] if kill else [])])
    assert outcomes_of(found) == rows
    assert [fault for line in found for fault in faults_of(line)] == []
    event(f"aborted: {sum(not row['committed'] for row in rows)}")
    lead = next(half for half in faulty.trainers if half.lead)
    assert {line["rollout"]: line["why"] for line in found if line["event"] == "rollout_lost"} == lead.gone
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


def test_a_rollout_that_missed_an_update_is_said_to_be_back() -> None:
    class Skips(Trainer):
        async def connect(self, deadline_ns: int) -> None:
            everybody = self.rollouts
            if self.updates == 2:
                self.members, self.rollouts = (), {0: everybody[0]}
            try:
                await super().connect(deadline_ns)
            finally:
                self.rollouts = everybody

    _, found, rows = told([], Skips)
    assert [sorted(row["members"]) for row in rows] == [[0, 1], [0], [0, 1], [0, 1]]
    back = [(line["update"], line["rollout"]) for line in found if line["event"] == "rollout_back"]
    assert back == [(3, 1)]


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
