"""Fuzzing a protocol: seeded or exhaustive fault plans, and reducing a plan that fails to what it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from random import Random
from typing import Any, NamedTuple

from weightsync.reference.rollout import Rollout
from weightsync.reference.source import Source
from weightsync.reference.target import Target
from weightsync.reference.trainer import Trainer
from weightsync.sim.faults import AnyFault, drawn, exhaustive, returning
from weightsync.testing.faults import FaultRun
from weightsync.testing.promises import Report
from weightsync.testing.sweep import Failure, sweep
from weightsync.testing.tiny import DENSITY, MS, SETTINGS


class Protocol(NamedTuple):
    """What is under test: the protocol's two halves, and what moves the bytes of each."""

    trainer: type[Trainer] = Trainer
    rollout: type[Rollout] = Rollout
    source: type[Source] = Source
    target: type[Target] = Target


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
        density: share of the elements that a step changes.
        baseline: what the trainer tells changes by.
    """

    faults: tuple[AnyFault, ...]
    updates: int = 3
    seed: int = 0
    receive: str = "stage"
    detect_ms: int = 0
    route: str = "all"
    baseline: str = "whole"
    density: float = DENSITY

    def run(self, protocol: Protocol) -> Report:
        """Make the run."""
        settings = replace(SETTINGS, receive=self.receive, route=self.route)  # type: ignore[arg-type]
        return FaultRun(
            self.faults, trainer=protocol.trainer, rollout=protocol.rollout, updates=self.updates, seed=self.seed,
            settings=settings, detect_ns=self.detect_ms * MS, density=self.density,
            source=protocol.source, target=protocol.target,
            baseline=self.baseline,
        ).run()  # fmt: skip

    def options(self) -> dict[str, Any]:
        """Every field but the faults, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "faults"}


SPARSE = 0.06
"""So few changes that tensors travel as changed elements."""

VARIANTS: tuple[Mapping[str, Any], ...] = (
    {"receive": "stage"},
    {"receive": "stream"},
    {"receive": "stage", "route": "owned"},
    {"receive": "stream", "route": "owned"},
    {"receive": "stage", "baseline": "shards"},
    {"receive": "stream", "baseline": "dirty"},
    {"receive": "stage", "density": SPARSE},
    {"receive": "stream", "density": SPARSE, "route": "owned"},
)
"""The options under test, as fields of a ``Case``; each seeded case draws one. A line here is all a new one takes."""


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
        head = ", ".join(f"{name} {value}" for name, value in self.case.options().items())
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


def seeded_cases(seeds: Iterable[int], variants: Sequence[Mapping[str, Any]] = VARIANTS) -> Iterable[Case]:
    """One case per seed: a fault or two, perhaps a restart; one of ``variants``; groups that break at once or late."""
    counts: dict[int, dict[str, int]] = {}
    for seed in seeds:
        number = Random(f"{seed}/variant").randrange(len(variants))
        if number not in counts:
            counts[number] = awaits(**variants[number])
        detect_ms = 40 if seed % 4 > 1 else 0
        yield Case(drawn(counts[number], seed), seed=seed, detect_ms=detect_ms, **variants[number])


def exhaustive_cases(counts: dict[str, int], receive: str = "stage", route: str = "all") -> Iterable[Case]:
    """Every await of every rank times every kind of fault; a killed rollout also with a restart, soon and late."""
    for faults in (*exhaustive(counts), *returning(counts, (20, 700))):
        yield Case(faults, receive=receive, route=route)


def fuzz(
    protocol: Protocol | type[Trainer] | type[Rollout] | type[Source] | type[Target] = Protocol(),  # noqa: B008 - immutable
    cases: Iterable[Case] | None = None,
    *,
    seeds: int = 100,
    workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Finding | None:
    """The first case under which the protocol breaks a promise, reduced; None when it keeps them in all.

    Args:
        protocol: what is under test, or a subclass of one of its parts.
        cases: what to run; by default ``seeds`` seeded plans.
        seeds: how many seeded plans, from seed 0.
        workers: processes. With more than one, every case is run; the protocol is of a module that they can import.
        progress: called with the number of runs made, after each.
    """
    parts = _parts(protocol)
    every = seeded_cases(range(seeds)) if cases is None else cases
    if workers > 1:
        told = None if progress is None else lambda done, _: progress(done)
        failures = sweep_cases(listed := list(every), parts, workers=workers, progress=told)
        broken = [failure.item for failure in failures]
        return _finding(broken[0], parts, listed.index(broken[0]) + 1) if broken else None
    for number, case in enumerate(every, start=1):
        report = case.run(parts)
        if progress is not None:
            progress(number)
        if report.violations:
            return _finding(case, parts, number)
    return None


def _finding(case: Case, protocol: Protocol, number: int) -> Finding:
    smaller = reduce(case, protocol)
    return Finding(smaller, smaller.run(protocol), number)


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


def _parts(part: Protocol | type[Trainer] | type[Rollout] | type[Source] | type[Target]) -> Protocol:
    if isinstance(part, Protocol):
        return part
    kinds = {"trainer": Trainer, "rollout": Rollout, "source": Source, "target": Target}
    chosen: dict[str, Any] = {name: part for name, kind in kinds.items() if issubclass(part, kind)}
    return Protocol(**chosen)
