"""What is promised of a run with faults, whatever clock it ran on, and the report of what was kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from weightsync.reference.deployment import Deployment
from weightsync.reference.errors import PeerLost
from weightsync.reference.members import RankId, RolloutRef
from weightsync.reference.protocol import Outcome
from weightsync.reference.rollout import Rollout
from weightsync.reference.target import Target
from weightsync.reference.trace import Trace
from weightsync.sim.faults import AnyFault, FaultPlan, describe
from weightsync.testing.history import History


@dataclass
class Report:
    """What one run showed.

    Attributes:
        faults: the plan.
        violations: broken promises, one sentence each; empty when the run was right.
        awaits: per rank, the verbs that began, in order.
        outcomes: per trainer rank that lived, its updates.
        trace: every span.
        hit: the faults that happened, with the verb that each hit.
    """

    faults: tuple[AnyFault, ...]
    violations: list[str] = field(default_factory=list)
    awaits: dict[str, list[str]] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    hit: list[tuple[AnyFault, str]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{describe(self.faults, self.hit)}\n  " + "\n  ".join(
            self.violations or ["every promise was kept"]
        )

    def violated(self, sentence: str) -> None:
        """Record a broken promise; the same sentence counts once."""
        if sentence not in self.violations:
            self.violations.append(sentence)


@dataclass
class Promises:
    """Holds one run against what was promised. What is broken goes into the report.

    Attributes:
        deployment: who holds what.
        history: what each version is.
        plan: the faults.
        report: of this run.
        alive: False for the name of a rank that was killed.
        generating: True while requests read the weights of the rollout of this number.
        rollouts: the protocol's half of each rollout rank; filled by the run.
        targets: each rollout rank's bytes; filled by the run.
        times: when each of the lead's updates began and ended, in ns; filled by the run.
    """

    deployment: Deployment
    history: History
    plan: FaultPlan
    report: Report
    alive: Callable[[str], bool]
    generating: Callable[[int], bool]
    rollouts: dict[RankId, Rollout] = field(default_factory=dict)
    targets: dict[RankId, Target] = field(default_factory=dict)
    times: list[tuple[int, int]] = field(default_factory=list)

    def check_bits(self, ref: RolloutRef, when: str) -> None:
        """A rollout that generates is clean, its ranks have one label, and the label tells the bits."""
        label = self.rollouts[ref.leader].version
        if self.rollouts[ref.leader].dirty is not None:
            self.report.violated(f"rollout {ref.number} generates {when} although it is dirty")
        for rank in ref.ranks:
            if not self.alive(str(rank)):
                continue
            if self.rollouts[rank].version != label:
                self.report.violated(
                    f"{rank} has label {self.rollouts[rank].version}, its leader {label}, {when}"
                )
            for difference in self.history.differences(label, rank, self.targets[rank].weights):
                self.report.violated(f"torn: {rank} under label {label}, {when}: {difference}")

    def check_end(self, ends: Mapping[str, BaseException | None], hung: Sequence[str]) -> None:
        """Nobody hangs or dies of another's fault, versions are used once, and the last update is everywhere.

        Args:
            ends: per rank that ended, what it raised, or None.
            hung: names of the ranks that neither ended nor were killed.
        """
        dead = [str(rank) for rank in self.deployment.ranks if not self.alive(str(rank))]
        for name in hung:
            self.report.violated(f"{name} hangs")
        for name, error in ends.items():
            if name not in dead:
                self._check_rank(name, error, dead)
        for version in self.history.reused:
            self.report.violated(f"version {version} was used twice")
        self._check_quiet_updates()
        trainers_live = not any(name.startswith("trainer") for name in dead)
        for ref in self.deployment.rollouts:
            if all(str(rank) not in dead for rank in ref.ranks):
                if self.generating(ref.number):
                    self.check_bits(ref, "at the end")
                if trainers_live and not hung:
                    self._check_last(ref)

    def _check_rank(self, name: str, error: BaseException | None, dead: Sequence[str]) -> None:
        if isinstance(error, PeerLost):
            if not (name.startswith("trainer") and error.peer.startswith("trainer") and error.peer in dead):
                self.report.violated(f"{name} ended because of {error.peer}: {error}")
        elif error is not None:
            self.report.violated(f"{name} died: {error!r}")
        else:
            lost = [peer for peer in dead if peer.startswith("trainer")]
            if name.startswith("trainer") and lost:
                self.report.violated(
                    f"{name} ended as if nothing had happened, although {', '.join(lost)} was killed"
                )

    def _check_last(self, ref: RolloutRef) -> None:
        outcomes = [found[-1] for found in self.report.outcomes.values() if found]
        for outcome in outcomes:
            if not outcome.committed:
                self.report.violated(f"the update after the last fault did not commit: {outcome.reason}")
                return
        if not outcomes:
            self.report.violated("no update ended")
            return
        version = outcomes[0].version
        for rank in ref.ranks:
            rollout = self.rollouts[rank]
            if rollout.version != version or rollout.dirty is not None:
                held = f"version {rollout.version} ({rollout.dirty or 'clean'})"
                self.report.violated(f"{rank} ended at {held}, not at {version}")
        if not self.generating(ref.number):
            self.report.violated(f"rollout {ref.number} does not generate at the end")

    def _check_quiet_updates(self) -> None:
        """With failures only, an update that none of them falls into commits, and sends nothing whole in vain."""
        if any(not fault.kind.startswith("fail") and verb != "post" for fault, verb in self.plan.hit):
            return
        holds: dict[int, bool] = {}
        outcomes = self.report.outcomes[str(self.deployment.trainers[0])]
        for (began, ended), outcome in zip(self.times, outcomes, strict=False):
            quiet = not any(began <= at <= ended for at in self.plan.times_ns)
            if quiet and not outcome.committed:
                self.report.violated(
                    f"update {outcome.update}, into which no fault fell, did not commit: {outcome.reason}"
                )
            for number in outcome.full:
                if holds.get(number, False):
                    self.report.violated(
                        f"update {outcome.update} was sent whole to rollout {number}, which held its base"
                    )
            if outcome.committed:
                holds = dict.fromkeys(outcome.members, True)
