"""Fault plans: what hooks make of them, and that they are drawn alike from equal seeds."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.sim.faults import (
    CLEANUP,
    KINDS,
    AnyFault,
    Fault,
    FaultHooks,
    FaultPlan,
    Followup,
    InjectedFault,
    Restart,
    describe,
    drawn,
    exhaustive,
)

AWAITS = {"trainer.0": 30, "trainer.1": 12, "rollout0.0": 25, "rollout1.0": 40, "rollout1.1": 20}


class Noted:
    """Effects that only note what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, ...]] = []

    async def kill(self, rank: str) -> None:
        self.asked.append(("kill", rank))

    async def stall(self, rank: str, verb: str, index: int) -> None:
        self.asked.append(("stall", rank, verb, str(index)))

    def now_ns(self) -> int:
        return 17


def play(plan: FaultPlan, rank: str, verbs: list[str]) -> tuple[list[str], Noted]:
    """What became of each verb of one rank: "ok", "before" or "after"."""
    effects, ends = Noted(), []
    hooks = FaultHooks(rank, plan, effects)

    async def main() -> None:
        for verb in verbs:
            try:
                ordinal = await hooks.before(verb)
            except InjectedFault:
                ends.append("before")
                continue
            try:
                await hooks.after(verb, ordinal)
            except InjectedFault:
                ends.append("after")
            else:
                ends.append("ok")

    asyncio.run(main())
    assert hooks.verbs == verbs
    return ends, effects


def test_a_failure_falls_before_or_after_the_effect_of_the_verb_that_is_planned() -> None:
    plan = FaultPlan((Fault("trainer.0", 2, "fail"), Fault("trainer.0", 3, "fail-after")))
    ends, effects = play(plan, "trainer.0", ["snapshot", "diff", "digest", "exchange"])
    assert ends == ["ok", "before", "after", "ok"]
    assert effects.asked == []
    assert [verb for _, verb in plan.hit] == ["diff", "digest"]
    assert plan.times_ns == [17, 17]


def test_kill_and_stall_are_the_executors_work() -> None:
    plan = FaultPlan((Fault("rollout0.0", 1, "stall"), Fault("rollout0.0", 2, "kill")))
    ends, effects = play(plan, "rollout0.0", ["serve", "reply"])
    assert ends == ["ok", "ok"]
    assert effects.asked == [("stall", "rollout0.0", "serve", "1"), ("kill", "rollout0.0")]


def test_a_rank_sees_its_own_faults_only_and_none_once_the_plan_is_disarmed() -> None:
    faults = (Fault("trainer.1", 1, "fail"), Fault("trainer.0", 2, "fail"))
    assert play(FaultPlan(faults), "trainer.0", ["join", "call"])[0] == ["ok", "before"]
    plan = FaultPlan(faults)
    plan.disarm()
    assert play(plan, "trainer.0", ["join", "call"])[0] == ["ok", "ok"]
    assert plan.hit == []


def test_awaits_that_overlap_keep_their_numbers() -> None:
    plan = FaultPlan((Fault("trainer.0", 1, "fail-after"),))
    hooks = FaultHooks("trainer.0", plan, Noted())

    async def main() -> None:
        first, second = await hooks.before("call"), await hooks.before("send")
        await hooks.after("send", second)
        with pytest.raises(InjectedFault, match=r"trainer\.0 call, after it took effect"):
            await hooks.after("call", first)

    asyncio.run(main())


def test_a_followup_counts_clean_up_verbs_from_the_first_fault_on() -> None:
    verbs = ["post", "call", "call", "cancel", "send", "post", "post"]
    plan = FaultPlan((Fault("trainer.0", 3, "fail"), Followup("trainer.0", 2, "fail")))
    assert play(plan, "trainer.0", verbs)[0] == ["ok", "ok", "before", "ok", "ok", "before", "ok"]
    assert [verb for _, verb in plan.hit] == ["call", "post"]


def test_a_followup_alone_never_happens() -> None:
    plan = FaultPlan((Followup("trainer.0", 1, "fail"),))
    assert play(plan, "trainer.0", sorted(CLEANUP))[0] == ["ok"] * len(CLEANUP)


def test_exhaustive_is_every_await_times_every_kind_once() -> None:
    plans = list(exhaustive(AWAITS))
    assert len(plans) == len(set(plans)) == len(KINDS) * sum(AWAITS.values())
    assert set(plans) == {
        (Fault(rank, index, kind),)
        for rank, count in AWAITS.items()
        for index in range(1, count + 1)
        for kind in KINDS
    }
    assert [fault.kind for (fault,) in exhaustive({"trainer.0": 2}, ["kill"])] == ["kill", "kill"]


@given(st.integers(0, 2**32))
def test_a_drawn_plan_is_a_function_of_its_seed_and_kills_at_most_one_rank(seed: int) -> None:
    plan = drawn(AWAITS, seed)
    assert plan == drawn(dict(reversed(AWAITS.items())), seed)
    faults = [fault for fault in plan if not isinstance(fault, Restart)]
    assert 1 <= len(faults) <= 2
    assert len(set(plan)) == len(plan)
    assert plan[: len(faults)] == tuple(faults), "a restart before the fault that it follows"
    assert sum(fault.kind == "kill" for fault in plan) <= 1
    for fault in faults:
        assert fault.rank in AWAITS
        assert (fault.count if isinstance(fault, Followup) else fault.index) >= 1
    killed = {fault.rank for fault in faults if fault.kind == "kill" and fault.rank.startswith("rollout")}
    assert {fault.rank for fault in plan if isinstance(fault, Restart)} <= killed
    assert isinstance(plan[0], Fault), "a followup with nothing to follow"


def test_a_thousand_seeds_reach_every_rank_and_every_pair_of_kinds_but_two_kills() -> None:
    plans: list[tuple[AnyFault, ...]] = [drawn(AWAITS, seed) for seed in range(1000)]
    faults = [tuple(one for one in plan if not isinstance(one, Restart)) for plan in plans]
    pairs = [two for two in faults if len(two) == 2]
    assert len(pairs) > 850
    kinds = Counter((first.kind, second.kind) for first, second in pairs)
    assert len(kinds) == len(KINDS) ** 2 - 1
    assert {fault.rank for plan in plans for fault in plan} == set(AWAITS)
    assert sum(isinstance(second, Followup) for _, second in pairs) > 500
    assert len(set(plans)) > 900


def test_a_plan_is_described_with_the_verbs_it_hit() -> None:
    first, second = Fault("trainer.1", 4, "kill"), Followup("rollout1.0", 2, "fail-after")
    assert describe((), []) == "no fault"
    assert describe((first, second), [(first, "exchange")]) == (
        "kill trainer.1 at await 4 (exchange); fail-after rollout1.0 at clean-up await 2 after that (not reached)"
    )
