"""The hybrid loop: whose weights are live when, what is pushed, and what it refuses."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from weightsync.reference.devices import TorchDevice
from weightsync.reference.errors import PlanMismatch, TagError
from weightsync.reference.loop import HybridLoop, LoopParts
from weightsync.reference.push import Pushed, PushSchedule, PushSettings
from weightsync.reference.tags import TaggedSnapshots
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors

STEPS = 4


@dataclass
class Story:
    """One run of the loop, whose weights are whole numbers: the actor is the number of steps taken."""

    settings: PushSettings = field(default_factory=PushSettings)
    forwards: tuple[str, ...] = ("ref", "actor")
    ref_interval: int | None = None
    fail_at: int = 0
    seen: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    held: list[float] = field(default_factory=list)
    pushed: tuple[Pushed, ...] = ()

    def run(self) -> Story:
        asyncio.run(self._run())
        return self

    async def _run(self) -> None:
        async with InprocessRun(WholeTensors.of({"w": torch.zeros(4)})) as run:
            live = run.params[0]
            places: Any = dict.fromkeys(("actor", "ref", "old_actor"), "host")
            tags = TaggedSnapshots(lambda: live, places, TorchDevice("cpu"), "actor", [].append)
            tags.backup("actor")
            tags.load("ref", lambda: live["w"].data.fill_(-1.0))
            tags.switch("actor")
            tags.copy("actor", "old_actor")
            target = next(iter(run.targets.values()))

            async def collect(step: int) -> int:
                self.held.append(float(target.weights["w"][0]))
                return step

            async def forward(tag: str, batch: int) -> float:
                return float(live["w"][0])

            def merge(batch: int, scores: Any) -> int:
                self.seen.append((batch, dict(scores)))
                return batch

            async def train(step: int, batch: int) -> None:
                if step == self.fail_at:
                    raise OSError("no data")
                live["w"].data.add_(1.0)

            schedule = PushSchedule(run.lead, self.settings)
            run.closes_trainers = False
            loop = HybridLoop(
                tags, schedule, LoopParts(collect, forward, merge, train), self.forwards, self.ref_interval
            )
            try:
                self.pushed = await loop.run(STEPS)
            except OSError:
                await asyncio.gather(*run._served)
                raise
            assert tags.active == "actor"
            assert run.violations == []
            assert float(target.weights["w"][0]) == STEPS


def test_forwards_run_under_their_own_weights_and_no_step_is_lost() -> None:
    story = Story().run()
    assert story.seen == [(step, {"ref": -1.0, "actor": step - 1.0}) for step in range(1, STEPS + 1)]
    assert story.held == [0.0, 1.0, 2.0, 3.0]
    assert [(one.step, one.outcome.committed) for one in story.pushed] == [(n, True) for n in (1, 2, 3, 4)]


def test_in_the_background_the_forwards_are_the_same_and_rollouts_one_step_late() -> None:
    behind = Story(PushSettings("async")).run()
    assert behind.seen == Story().run().seen
    assert [one.step for one in behind.pushed] == [1, 2, 3, 4]
    assert all(step - 2 <= held <= step - 1 for step, held in enumerate(behind.held, start=1))


def test_ref_follows_the_actor_every_second_step() -> None:
    assert [scores["ref"] for _, scores in Story(ref_interval=2).run().seen] == [-1.0, -1.0, 2.0, 2.0]


def test_old_actor_is_the_actor_before_the_last_step() -> None:
    story = Story(PushSettings(old_actor=True), forwards=("old_actor", "actor")).run()
    assert [scores["old_actor"] for _, scores in story.seen] == [0.0, 0.0, 1.0, 2.0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_part_that_fails_ends_the_loop_and_releases_the_rollouts(mode: Any) -> None:
    with pytest.raises(OSError, match="no data"):
        Story(PushSettings(mode), fail_at=3).run()


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ({"forwards": ("ref", "ref")}, PlanMismatch, "name a tag twice"),
        ({"forwards": ("actor",), "ref_interval": 2}, PlanMismatch, "nothing would read"),
        ({"ref_interval": 0}, PlanMismatch, "expected 1 or more"),
        ({"forwards": ("old_actor",)}, PlanMismatch, "would race with its queue"),
        ({"forwards": ("teacher",)}, TagError, "'teacher' is unknown"),
    ],
)
def test_an_option_that_cannot_apply_raises(more: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Story(**more).run()
