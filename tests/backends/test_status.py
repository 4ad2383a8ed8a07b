"""The trainer's status: true, complete, in time, and without a trace in the run that was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from weightsync.reference.errors import PeerLost, RemoteError
from weightsync.reference.members import RankId
from weightsync.reference.protocol import Outcome
from weightsync.reference.rank import Verbs
from weightsync.reference.rollout import Rollout
from weightsync.reference.status import RankStatus, TrainerStatus
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import Fault
from weightsync.testing.faults import FaultRun
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors
from weightsync.testing.scenario import run_scenario
from weightsync.testing.tiny import tiny_deployment
from weightsync.testing.worlds import world_names, world_of

BACKENDS = pytest.mark.parametrize("backend", world_names())
LEAD, LEADER, FOLLOWER = RankId("trainer", 0, 0), RankId("rollout", 1, 0), RankId("rollout", 1, 1)
SECOND_NS = 1_000_000_000
STATE = {"w": torch.tensor([1.0, -0.0, float("nan")])}


def asking(kind: type[Trainer] = Trainer) -> tuple[type[Trainer], list[TrainerStatus]]:
    """A trainer whose lead asks after every update, and what it heard."""
    heard: list[TrainerStatus] = []

    class Asking(kind):  # type: ignore[misc, valid-type]
        async def update(self) -> Outcome:
            outcome: Outcome = await super().update()
            if self.lead:
                heard.append(await self.status(self.deadline_ns(20 * SECOND_NS)))
            return outcome

    return Asking, heard


@BACKENDS
def test_after_each_update_every_rank_says_what_it_holds_and_the_run_shows_no_sign_of_it(
    backend: str,
) -> None:
    trainer, heard = asking()
    asked, plain = (
        run_scenario(backend, tiny_deployment(), trainer=trainer),
        run_scenario(backend, tiny_deployment()),
    )
    assert asked.problems() == []
    assert [status.version for status in heard] == [1, 2, 3, 4]
    for number, status in enumerate(heard, 1):
        assert status.clean
        assert (status.update, status.highest, status.members) == (number, number, (0, 1))
        assert status.last is not None
        assert status.last["version"] == number
        ranks = {rank: said for rollout in status.rollouts for rank, said in rollout.ranks.items()}
        assert list(ranks) == [rank for ref in asked.deployment.rollouts for rank in ref.ranks]
        for rank, said in ranks.items():
            assert isinstance(said, RankStatus)
            generating = True if rank.rank == 0 else None
            assert said == RankStatus(number, None, number, 1, generating, None, 0, False, None)
    assert (asked.outcomes, asked.verbs()) == (plain.outcomes, plain.verbs())


def test_who_asks_all_the_time_changes_no_span_of_an_update() -> None:
    looks: list[TrainerStatus] = []

    class Watched(Trainer):
        async def update(self) -> Outcome:
            if self.lead and self.updates == 0:
                self.verbs.spawn(self.look(), "look")
            return await super().update()

        async def look(self) -> None:
            while self.version < 4:
                looks.append(await self.status(self.deadline_ns(SECOND_NS)))

    asked, plain = (
        run_scenario("sim", tiny_deployment(), trainer=Watched),
        run_scenario("sim", tiny_deployment()),
    )
    assert asked.trace.spans == plain.trace.spans
    assert asked.outcomes == plain.outcomes
    seen = [s for look in looks for r in look.rollouts for s in r.ranks.values() if isinstance(s, RankStatus)]
    assert any(said.receiving is not None for said in seen)
    assert any(said.prepared for said in seen)
    assert any(said.buckets for said in seen)
    assert any(said.generating is False for said in seen)


@BACKENDS
def test_a_rank_that_serves_nobody_answers_and_one_that_discloses_nothing_says_so(backend: str) -> None:
    async def busy(verbs: Verbs) -> None:
        verbs.disclose(lambda: {"version": 7})
        await verbs.post(LEAD, "ready", {})
        request = await verbs.serve(None, LEAD)  # the goodbye; the inquiry is none
        assert request.op == "bye"

    async def mute(verbs: Verbs) -> None:
        await verbs.post(LEAD, "ready", {})
        await verbs.serve(None, LEAD)

    async def inquire(verbs: Verbs) -> tuple[Mapping[str, Any], str]:
        for rank in (LEADER, FOLLOWER):
            await verbs.serve(None, rank)
        try:
            said = await verbs.inquire(LEADER, verbs.now_ns() + 20 * SECOND_NS)
            with pytest.raises(RemoteError) as refused:
                await verbs.inquire(FOLLOWER, verbs.now_ns() + 20 * SECOND_NS)
            return said, str(refused.value)
        finally:
            for rank in (LEADER, FOLLOWER):
                await verbs.post(rank, "bye", {})

    said, refused = world_of(backend)().run({LEAD: inquire, LEADER: busy, FOLLOWER: mute})[LEAD]
    assert said == {"version": 7}
    assert "rollout1.1 has nothing to say" in refused


# ---- it is true -------------------------------------------------------------------------------------------------


def disclosed(
    faults: Sequence[Fault], rollout: type[Rollout] = Rollout
) -> tuple[list[str], list[TrainerStatus]]:
    """A run with faults on simulated time whose lead asks again and again: what was untrue when said; all answers."""
    untrue: list[str] = []
    heard: list[TrainerStatus] = []

    class Checked(rollout):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            disclose = self.verbs.control._disclose
            self.verbs.disclose(lambda: self.check(RankStatus(**disclose())).to_dict())

        def check(self, said: RankStatus) -> RankStatus:
            me = self.verbs.me
            if said.dirty is None and said.receiving is None:
                bits = run.history.differences(said.version, me, run.targets[me].weights)
                untrue.extend(f"{me} says it holds {said.version}: {difference}" for difference in bits)
            if said.generating is False and run.engines[me.rollout].generating:
                untrue.append(f"{me} says that it is paused")
            return said

    class Asking(Trainer):
        async def update(self) -> Outcome:
            looking = self.verbs.spawn(self.look(), "look")
            outcome = await super().update()
            await self.verbs.clock.join([looking], None)
            return outcome

        async def look(self) -> None:
            for _ in range(12 if self.lead else 0):
                heard.append(await self.status(self.deadline_ns(SECOND_NS // 1000)))
                await self.verbs.clock.sleep_until(self.deadline_ns(900_000))

    run = FaultRun(faults, trainer=Asking, rollout=Checked)
    assert run.run().violations == []
    return untrue, heard


faults = st.builds(
    Fault,
    st.sampled_from(["trainer.0", "trainer.1", "rollout0.0", "rollout1.0", "rollout1.1"]),
    st.integers(1, 120),
    st.sampled_from(["fail", "fail-after", "stall"]),
)


@settings(deadline=None, max_examples=40)
@given(st.lists(faults, max_size=3), st.none() | st.integers(1, 120))
def test_whatever_fails_a_status_is_true_when_it_is_said(planted: list[Fault], kill: int | None) -> None:
    kills = [] if kill is None else [Fault("rollout1.1", kill, "kill")]
    untrue, heard = disclosed([*planted, *kills])
    assert untrue == []
    for status in heard[::10]:
        event(f"clean: {status.clean}")
        assert json.loads(json.dumps(status.to_dict())) == status.to_dict()


class SaysClean(Rollout):
    """Never admits that it is dirty."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.verbs.disclose(lambda: RankStatus.of(self).to_dict() | {"dirty": None, "version": self.highest})


class SaysItIsPaused(Rollout):
    """Says that it is paused while it generates."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.verbs.disclose(
            lambda: RankStatus.of(self).to_dict() | {"generating": False if self.leader else None}
        )


@pytest.mark.parametrize(
    ("liar", "sentence"), [(SaysClean, "says it holds"), (SaysItIsPaused, "says that it is paused")]
)
def test_a_rollout_that_lies_is_found(liar: type[Rollout], sentence: str) -> None:
    planted = [Fault("rollout1.0", 30, "fail")]
    assert any(sentence in one for one in disclosed(planted, liar)[0])
    assert disclosed(planted)[0] == []


def test_dirty_and_the_last_error_say_why() -> None:
    async def story() -> TrainerStatus:
        async with InprocessRun(WholeTensors.of(STATE, rollouts=2)) as run:
            run.set(STATE)
            run.plant("rollout1.0", "apply", times=9, error=OSError("disk full"))
            await run.push()
            return await run.lead.status(run.lead.deadline_ns(20 * SECOND_NS))

    status = asyncio.run(story())
    said = status.rollouts[1].ranks[LEADER]
    assert isinstance(said, RankStatus)
    assert said.dirty is not None
    assert "full update 1 is not committed" in said.dirty
    assert said.error is not None
    assert said.error.startswith("update 1: ")
    assert "disk full" in said.error
    assert status.last is not None
    assert "disk full" in status.last["reason"]
    assert not status.clean
    assert status.version == 0


# ---- lost ranks, and ranks that say nothing ---------------------------------------------------------------------


def killed(rank: str, ordinal: int) -> list[TrainerStatus]:
    trainer, heard = asking()
    FaultRun([Fault(rank, ordinal, "kill")], trainer=trainer).run()
    return heard


@pytest.mark.parametrize("rank", ["rollout1.0", "rollout1.1"])
def test_a_lost_rollout_is_said_to_be_gone_and_why_and_the_other_is_clean(rank: str) -> None:
    status = killed(rank, 30)[-1]
    lost = status.rollouts[1]
    assert lost.gone is not None
    assert rank in lost.gone
    assert "its lease ended" in str(lost.ranks[RankId.parse(rank)])
    assert status.rollouts[0].clean(status.version)
    assert not status.clean
    assert status.members == (0,)


def test_a_rank_that_does_not_answer_is_silent_by_the_deadline() -> None:
    class Deaf(Rollout):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if not self.leader:
                self.verbs.control.reply = self.drop  # type: ignore[method-assign]

        def drop(self, request: Any, *args: Any, **more: Any) -> None:
            if request.op != "inquire":
                type(self.verbs.control).reply(self.verbs.control, request, *args, **more)

    late: list[int] = []

    class Asking(Trainer):
        async def update(self) -> Outcome:
            outcome = await super().update()
            if self.lead:
                deadline_ns = self.deadline_ns(SECOND_NS)
                heard.append(await self.status(deadline_ns))
                late.append(self.verbs.now_ns() - deadline_ns)
            return outcome

    heard: list[TrainerStatus] = []
    run_scenario("sim", tiny_deployment(), trainer=Asking, rollout=Deaf)
    said = heard[0].rollouts[1].ranks
    assert "did not finish by its deadline" in str(said[FOLLOWER])
    assert isinstance(said[LEADER], RankStatus)
    assert late == [0] * 4


def test_asking_a_rank_whose_lease_ended_does_not_wait() -> None:
    async def inquire(verbs: Verbs) -> str:
        verbs.control.lost(str(LEADER))
        with pytest.raises(PeerLost) as lost:
            await verbs.inquire(LEADER, verbs.now_ns() + SECOND_NS)
        return str(lost.value)

    programs: dict[RankId, Callable[[Verbs], Any]] = {LEAD: inquire}
    assert "rollout1.0 was lost" in world_of("sim")().run(programs)[LEAD]
