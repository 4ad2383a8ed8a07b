"""Fuzzing a protocol: seeded or exhaustive fault plans, and reducing a plan that fails to what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from weightsync.reference.rollout import Rollout
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import AnyFault, drawn, exhaustive, returning
from weightsync.testing.faults import FaultRun
from weightsync.testing.promises import Report
from weightsync.testing.sweep import Failure, sweep
from weightsync.testing.tiny import MS, SETTINGS


class Protocol(NamedTuple):
    """The two halves under test."""

    trainer: type[Trainer] = Trainer
    rollout: type[Rollout] = Rollout


@dataclass(frozen=True, slots=True)
class Case:
    """One run to make.

    Attributes:
        faults: what goes wrong.
        updates: how many updates the faults may hit.
        seed: the seed that drew it, and that of the weights.
        receive: ``stage`` or ``stream``.
        detect_ms: how long after a kill its data groups break.
        route: ``all`` or ``owned``.
        baseline: what the trainer tells changes by.
    """

    faults: tuple[AnyFault, ...]
    updates: int = 3
    seed: int = 0
    receive: str = "stage"
    detect_ms: int = 0
    route: str = "all"
    baseline: str = "whole"

    def run(self, protocol: Protocol) -> Report:
        """Make the run."""
        settings = replace(SETTINGS, receive=self.receive, route=self.route)  # type: ignore[arg-type]
        return FaultRun(
            self.faults, trainer=protocol.trainer, rollout=protocol.rollout, updates=self.updates, seed=self.seed,
            settings=settings, detect_ns=self.detect_ms * MS, baseline=self.baseline,
        ).run()  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A plan under which the protocol broke a promise, reduced until dropping any part of it makes it pass.

    Attributes:
        case: the reduced plan, with its seed.
        report: what it showed.
        runs: runs made until it was found.
    """

    case: Case
    report: Report
    runs: int

    def __str__(self) -> str:
        case = self.case
        head = f"seed {case.seed}, {case.updates} updates, receive = {case.receive}, route = {case.route}"
        head += f", groups break after {case.detect_ms} ms"
        lines = [f"found in run {self.runs}: {head}", f"  {self.report}", "  its trace:"]
        for span in self.report.trace.spans:
            mark = "" if span.ok else "  failed"
            lines.append(
                f"    {span.start_ns:>12} to {span.end_ns:>12} ns  {span.rank:<12} {span.verb}{mark}"
            )
        return "\n".join(lines)


def awaits(protocol: Protocol = Protocol(), **settings: object) -> dict[str, int]:  # noqa: B008 - immutable
    """How many awaits each rank makes in a run without faults."""
    report = replace(Case(()), **settings).run(protocol)  # type: ignore[arg-type]
    return {rank: len(verbs) for rank, verbs in report.awaits.items()}


def seeded_cases(seeds: Iterable[int], counts: dict[str, int]) -> Iterable[Case]:
    """One case per seed: a fault or two, perhaps a restart; both ways to receive; groups that break at once or late."""
    for seed in seeds:
        receive = "stream" if seed % 2 else "stage"
        yield Case(drawn(counts, seed), seed=seed, receive=receive, detect_ms=40 if seed % 4 > 1 else 0)


def exhaustive_cases(counts: dict[str, int], receive: str = "stage", route: str = "all") -> Iterable[Case]:
    """Every await of every rank times every kind of fault; a killed rollout also with a restart, soon and late."""
    for faults in (*exhaustive(counts), *returning(counts, (20, 700))):
        yield Case(faults, receive=receive, route=route)


def fuzz(
    protocol: Protocol | type[Trainer] | type[Rollout] = Protocol(),  # noqa: B008 - immutable
    cases: Iterable[Case] | None = None,
    *,
    seeds: int = 100,
    progress: Callable[[int], None] | None = None,
) -> Finding | None:
    """The first case under which the protocol breaks a promise, reduced; None when it keeps them in all.

    Args:
        protocol: both halves, or a subclass of one of them.
        cases: what to run; by default ``seeds`` seeded plans.
        seeds: how many seeded plans, from seed 0.
        progress: called with the number of runs made, after each.
    """
    halves = _halves(protocol)
    if cases is None:
        cases = seeded_cases(range(seeds), awaits())
    for number, case in enumerate(cases, start=1):
        report = case.run(halves)
        if progress is not None:
            progress(number)
        if report.violations:
            smaller = reduce(case, halves)
            return Finding(smaller, smaller.run(halves), number)
    return None


def violations(case: Case, protocol: Protocol = Protocol()) -> tuple[str, ...]:  # noqa: B008 - immutable
    """The promises that one run broke, with the verbs that its faults hit."""
    report = case.run(protocol)
    return (str(report),) if report.violations else ()


def sweep_cases(
    cases: Iterable[Case],
    protocol: Protocol = Protocol(),  # noqa: B008 - immutable
    *,
    workers: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> list[Failure]:
    """Every case that breaks a promise, over processes; the protocol is of a module that they can import."""
    return sweep(partial(violations, protocol=protocol), cases, workers=workers, progress=progress)


def reduce(case: Case, protocol: Protocol) -> Case:
    """The smallest case that still fails: no fault and no update can be dropped from it."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(case):
            if smaller.run(protocol).violations:
                case, changed = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterable[Case]:
    for index in range(len(case.faults)):
        yield replace(case, faults=case.faults[:index] + case.faults[index + 1 :])
    if case.updates > 1:
        yield replace(case, updates=case.updates - 1)


def _halves(protocol: Protocol | type[Trainer] | type[Rollout]) -> Protocol:
    if isinstance(protocol, Protocol):
        return protocol
    if issubclass(protocol, Trainer):
        return Protocol(trainer=protocol)
    return Protocol(rollout=protocol)
