"""The metrics callback on every backend: every update, every trainer rank, failed ones too; sums that hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weightsync.reference.errors import PeerLost
from weightsync.reference.metrics import UpdateMetrics
from weightsync.reference.protocol import Outcome
from weightsync.reference.trainer import Trainer
from weightsync.testing.scenario import RunResult, run_scenario
from weightsync.testing.tiny import tiny_deployment
from weightsync.testing.worlds import world_names

BACKENDS = pytest.mark.parametrize("backend", world_names())
Told = dict[str, list[UpdateMetrics]]
Inside = dict[str, list[tuple[int, int]]]


def telling(kind: type[Trainer] = Trainer) -> tuple[type[Trainer], Told, Inside]:
    """A trainer with a callback, what each rank was told, and when each was inside ``update``."""
    told: Told = {}
    inside: Inside = {}

    class Telling(kind):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.on_update = told.setdefault(str(self.verbs.me), []).append

        async def update(self) -> Outcome:
            start = self.verbs.now_ns()
            outcome: Outcome = await super().update()
            inside.setdefault(str(self.verbs.me), []).append((start, self.verbs.now_ns()))
            return outcome

    return Telling, told, inside


class FailsOnce(Trainer):
    """The second rank's source fails in the second update."""

    async def _make_job(self, made: list[Any], deadline_ns: int) -> None:
        if self.updates == 2 and not self.lead:
            raise OSError("out of memory")
        await super()._make_job(made, deadline_ns)


def problems(run: RunResult, told: Told, inside: Inside) -> list[str]:
    """Where what was told is not what the run's outcomes and trace say."""
    found = []
    elements = sum(meta.numel for meta in run.deployment.tensors)
    for rank, outcomes in run.outcomes.items():
        name, metrics = str(rank), told[str(rank)]
        lead = rank == run.deployment.trainers[0]
        if [(m.rank, m.update, m.version, m.committed, m.reason, m.members, m.full) for m in metrics] != [
            (name, o.update, o.version, o.committed, o.reason, o.members, o.full) for o in outcomes
        ]:
            found.append(f"{name}: other outcomes")
        if [m.wire_bytes for m in metrics] != [o.nbytes if lead else None for o in outcomes]:
            found.append(f"{name}: other bytes")
        if any(m.elements != elements for m in metrics):
            found.append(f"{name}: other elements")
        for one, (start, end) in zip(metrics, inside[name], strict=True):
            if not 0 <= one.exposed_ns == one.total_ns <= end - start:
                found.append(f"{name}: update {one.update} took {one.exposed_ns} ns of {end - start}")
        summed: dict[str, int] = {}
        for one in metrics:
            for phase, spent in one.phases_ns.items():
                summed[phase] = summed.get(phase, 0) + spent
        if summed != in_updates(run, name, inside[name]):
            found.append(f"{name}: other phases")
    return found


def in_updates(run: RunResult, name: str, inside: Sequence[tuple[int, int]]) -> dict[str, int]:
    """ns per phase of what a rank did inside ``update``: all but its goodbye."""
    summed: dict[str, int] = {}
    last = inside[-1][1]
    goodbye = ("post", "disconnect")
    spans = [span for span in run.trace.spans if span.rank == name]
    for number, span in enumerate(spans):
        if all(later.verb in goodbye for later in spans[number:]) and span.start_ns >= last:
            break
        summed[span.phase] = summed.get(span.phase, 0) + span.duration_ns
    return summed


@BACKENDS
def test_every_trainer_rank_is_told_of_every_update(backend: str) -> None:
    trainer, told, inside = telling()
    run = run_scenario(backend, tiny_deployment(), trainer=trainer)
    assert run.problems() == []
    assert sorted(told) == ["trainer.0", "trainer.1"]
    assert problems(run, told, inside) == []
    assert [m.kind for m in told["trainer.0"]] == ["full", "empty", "empty", "delta"]
    assert [m.highest for m in told["trainer.1"]] == [1, 2, 3, 4]


@BACKENDS
def test_a_failed_update_is_told_with_its_reason(backend: str) -> None:
    trainer, told, inside = telling(FailsOnce)
    run = run_scenario(backend, tiny_deployment(), trainer=trainer)
    assert problems(run, told, inside) == []
    for metrics in told.values():
        assert [m.committed for m in metrics] == [True, False, True, True]
        assert "out of memory" in metrics[1].reason
        assert (metrics[1].kind, metrics[1].version, metrics[1].members) == ("empty", None, (0, 1))


def test_metrics_that_count_another_rank_or_an_update_twice_are_seen() -> None:
    trainer, told, inside = telling()
    run = run_scenario("sim", tiny_deployment(), trainer=trainer)
    swapped = {"trainer.0": told["trainer.1"], "trainer.1": told["trainer.0"]}
    assert "trainer.0: other phases" in problems(run, swapped, inside)
    again = {**told, "trainer.0": [*told["trainer.0"][:3], told["trainer.0"][2]]}
    assert "trainer.0: other outcomes" in problems(run, again, inside)


@BACKENDS
def test_a_callback_that_raises_leaves_the_update_committed(backend: str) -> None:
    seen: list[tuple[bool, str]] = []

    class Interrupted(Trainer):
        async def update(self) -> Outcome:
            self.on_update = self.fail if self.lead and self.updates == 1 else None
            try:
                return await super().update()
            except OSError as error:
                assert self.last is not None
                seen.append((self.last.committed, str(error)))
                return self.last

        def fail(self, metrics: UpdateMetrics) -> None:
            raise OSError("dashboard is down")

    run = run_scenario(backend, tiny_deployment(), trainer=Interrupted)
    assert run.problems() == []
    assert seen == [(True, "dashboard is down")]


def test_an_update_that_ends_with_an_error_is_told_too() -> None:
    class Lost(Trainer):
        async def connect(self, deadline_ns: int) -> None:
            if self.updates == 3:
                raise PeerLost("rollout1.0", "connect")
            await super().connect(deadline_ns)

    trainer, told, _ = telling(Lost)

    class Goes(trainer):  # type: ignore[misc, valid-type]
        async def update(self) -> Outcome:
            try:
                outcome: Outcome = await super().update()
            except PeerLost:
                assert self.last is not None
                return self.last
            return outcome

    run = run_scenario("inprocess", tiny_deployment(), trainer=Goes)
    assert [outcome.committed for outcome in run.updates] == [True, True, False, True]
    for metrics in told.values():
        assert [m.committed for m in metrics] == [True, True, False, True]
        assert "rollout1.0 was lost" in metrics[2].reason
