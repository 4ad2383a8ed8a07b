"""A trainer and its rollouts as a state machine: Hypothesis draws what happens, a model says what must be so."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weightsync.reference.deployment import RolloutLayout
from weightsync.reference.protocol import Outcome
from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import AnyFault, Fault, FaultKind, Followup
from weightsync.testing.driven import DrivenRun, same_state, small_deployment
from weightsync.testing.states import KINDS
from weightsync.testing.tiny import MS, SETTINGS

LAYOUTS = (RolloutLayout(1, False), RolloutLayout(2, True), RolloutLayout(2, False))
LIVING: tuple[FaultKind, ...] = ("fail", "fail-after", "stall")
QUIET_MS = 3000
"""After this long every lease, stall and late message is over."""

UPDATE_MS = 200
"""Three rollouts at three versions, with two routes each, make seven groups of 20 ms on the simulated laptop."""

AWAITS = 30
"""About as many awaits a rank makes in one update."""


class SyncMachine(RuleBasedStateMachine):
    """Optimizer steps, pushes with and without faults, rollouts that go, come back and forget; see ``docs/testing.md``.

    The model knows each version's bits, which labels each rollout may have now, and whether bits were flipped in it.
    A wrong protocol is planted in a subclass.
    """

    trainer: ClassVar[type[Trainer]] = Trainer
    rollout: ClassVar[type[Rollout]] = Rollout

    def __init__(self) -> None:
        super().__init__()
        self.run: DrivenRun | None = None
        self.tried = 0
        self.doubtful: set[int] = set()
        self.settled = False

    @initialize(
        trainers=st.integers(1, 2),
        layouts=st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3),
        receive=st.sampled_from(["stage", "stream"]),
        route=st.sampled_from(["all", "owned"]),
        late=st.booleans(),
        detect_ms=st.sampled_from([0, 40]),
        seed=st.integers(0, 1000),
    )
    def begin(
        self,
        trainers: int,
        layouts: list[RolloutLayout],
        receive: Literal["stage", "stream"],
        route: Literal["all", "owned"],
        late: bool,
        detect_ms: int,
        seed: int,
    ) -> None:
        """A trainer of 1 or 2 ranks, 1 to 3 rollouts of TP 1 or 2, the last of which may come late."""
        said = replace(SETTINGS, receive=receive, route=route, verify_every=1, update_ns=UPDATE_MS * MS)
        absent = [len(layouts) - 1] if late else []
        self.run = DrivenRun(
            small_deployment(trainers, tuple(layouts)), said, trainer=self.trainer,
            rollout=self.rollout, absent=absent, detect_ns=detect_ms * MS, seed=seed,
        )  # fmt: skip

    # ---- what may happen -------------------------------------------------------------------------------------

    @rule(kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    def step(self, kinds: list[str]) -> None:
        """The optimizer writes: nothing, one element, some, all; NaNs and -0.0 among them."""
        self.driven.step(kinds)

    @rule()
    def push(self) -> None:
        """A push without a fault, while what earlier ones left behind may still go on."""
        self._push()

    @rule(
        victim=st.integers(0, 99),
        index=st.integers(1, AWAITS),
        kind=st.sampled_from([*LIVING, "kill"]),
        then=st.none() | st.tuples(st.integers(0, 99), st.integers(1, 6), st.sampled_from(LIVING)),
    )
    def push_with_faults(
        self, victim: int, index: int, kind: FaultKind, then: tuple[int, int, FaultKind] | None
    ) -> None:
        """One fault at any await of any rank, and perhaps another in the clean-up after it."""
        names = [str(rank) for rank in self.driven.deployment.ranks]
        name = names[victim % len(names)]
        faults: list[AnyFault] = [Fault(name, index, "stall" if kind == "kill" and name[0] == "t" else kind)]
        if then is not None:
            faults.append(Followup(names[then[0] % len(names)], *then[1:]))
        self.settled = False
        self._push(faults)

    @rule(count=st.integers(1, 9))
    def push_and_lose_replies(self, count: int) -> None:
        """Rollouts, or ranks of one, commit, and nobody hears of it."""
        self.settled = False
        self.driven.drops = count
        self._push()
        self.driven.drops = 0

    @rule(which=st.integers(0, 2))
    def lose(self, which: int) -> None:
        """All ranks of a rollout end."""
        live = self.driven.live()
        if live:
            self.settled = False
            self.driven.lose(live[which % len(live)])

    @rule(which=st.integers(0, 2))
    def come_back(self, which: int) -> None:
        """A rollout that is not there, or not all of it, is started: again, or for the first time."""
        gone = [ref for ref in self.driven.deployment.rollouts if not self.driven.alive(ref)]
        if gone:
            self.settled = False
            self.driven.start(gone[which % len(gone)])

    @rule(which=st.integers(0, 2), after_ms=st.sampled_from([0, 20, 250, 900]), pushed=st.booleans())
    def restart(self, which: int, after_ms: int, pushed: bool) -> None:
        """A rollout ends and is started again, soon or late; perhaps a push goes on without it meanwhile."""
        self.lose(which)
        if pushed:
            self._push()
        self.driven.wait(after_ms)
        self.come_back(which)

    @rule(which=st.integers(0, 2), element=st.integers(0, 1000))
    def flip(self, which: int, element: int) -> None:
        """A bit flips in the memory of a rollout that holds a version and is at rest."""
        resting = [
            ref
            for ref in self.driven.live()
            if all(
                (one := self.driven.rollouts[rank]).update is None and one.dirty is None for rank in ref.ranks
            )
            and ref.number not in self.driven.damaged
        ]
        if resting:
            self.settled = False
            self.driven.flip(resting[which % len(resting)], element)

    @rule(for_ms=st.sampled_from([5, 60, 300, 900]))
    def wait(self, for_ms: int) -> None:
        """Deadlines pass, leases end."""
        self.driven.wait(for_ms)

    @rule()
    def audit(self) -> None:
        """What the ranks say of themselves is so, or was when they were asked."""
        run = self.driven
        before = {rank: (half.version, half.dirty is None) for rank, half in run.rollouts.items()}
        said = run.ask()
        assert said.highest >= self.tried
        for one in said.rollouts:
            if not run.alive(run.deployment.rollouts[one.number]) or one.number in run.damaged:
                continue
            for rank, status in one.ranks.items():
                if isinstance(status, str):
                    continue  # it was lost, and the lead has not heard that it is back
                half = run.rollouts[rank]
                now = (half.version, half.dirty is None)
                assert (status.version, status.dirty is None) in (before[rank], now)
                if half.update is None and half.dirty is None:
                    assert run.differences(rank, half.version) == []

    @rule()
    def heal(self) -> None:
        """Once everything is quiet, one push brings every live rollout to the trainer's bits.

        One more for every rollout in which bits were flipped, since the digest that finds them ends an update.
        """
        run = self.driven
        run.wait(QUIET_MS)
        settled = self.settled
        outcomes = self._push()
        for _ in range(len(run.damaged)):
            if not outcomes[0].committed:
                outcomes = self._push()
        live = run.live()
        if not live:
            return
        for outcome in outcomes:
            assert outcome.committed, f"the update after the last fault did not commit: {outcome.reason}"
            assert set(outcome.members) == {ref.number for ref in live}
        assert not (settled and outcomes[0].full), f"{outcomes[0].full} were sent everything in vain"
        assert same_state(run.history.versions[outcomes[0].version or 0], run.state)
        for ref in live:
            assert run.engines[ref.number].generating, f"rollout {ref.number} does not generate"
            assert [run.rollouts[rank].dirty for rank in ref.ranks] == [None] * len(ref.ranks)
            assert {run.rollouts[rank].version for rank in ref.ranks} == {outcomes[0].version}
        self.settled = True

    # ---- what must be so -------------------------------------------------------------------------------------

    @invariant()
    @precondition(lambda self: self.run is not None)
    def every_promise_is_kept(self) -> None:
        """Labels tell bits, dirty rollouts pause, numbers are used once, the baseline is what it is taken for."""
        assert self.driven.problems() + self.driven.baseline() == []

    def teardown(self) -> None:
        """The run ends, whatever is under way, and nobody hangs."""
        if self.run is not None:
            run, self.run = self.run, None
            assert run.close() == []

    # ---- inner -----------------------------------------------------------------------------------------------

    @property
    def driven(self) -> DrivenRun:
        """The run."""
        assert self.run is not None
        return self.run

    def _push(self, faults: list[AnyFault] | None = None) -> list[Outcome]:
        run = self.driven
        lead = run.trainers[0]
        before = {rank: (half, half.version) for rank, half in run.rollouts.items()}
        acknowledged, live = lead.version, run.live()
        outcomes = run.push(faults or ())
        outcome = outcomes[0]
        if outcome.version is not None:
            assert outcome.version > self.tried, f"{outcome.version} was tried already, {self.tried} was"
            self.tried = outcome.version
        for rank, (half, version) in before.items():
            # A rank that was stalled in an earlier commit may end it now.
            allowed = {version, outcome.version if outcome.version is not None else version, *self.doubtful}
            assert half.version in allowed, f"{rank} has label {half.version}, expected one of {allowed}"
        if not outcome.committed:
            assert lead.version == acknowledged, "the acknowledged version moved without an acknowledgement"
            self.doubtful |= {outcome.version} if outcome.version is not None else set()
            return outcomes
        if {ref.number for ref in live} <= set(outcome.members):
            self.doubtful.clear()
        assert lead.version == outcome.version
        for ref in live:
            if ref.number in outcome.members:
                run.damaged.discard(ref.number)  # its digest was proved
                for rank in ref.ranks if run.alive(ref) else ():
                    assert run.rollouts[rank].version == outcome.version
                    assert run.differences(rank, outcome.version or 0) == []
        return outcomes


def machine_settings(examples: int, steps: int = 12, *, fixed: bool = False) -> settings:
    """Settings of one run of a machine; ``fixed`` draws the same every time, and does not shrink what fails."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        **({"derandomize": True, "database": None, "phases": [Phase.generate]} if fixed else {}),  # type: ignore[arg-type]
    )
