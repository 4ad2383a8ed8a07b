"""``weightsync plan``: what a scenario would send, along which routes, in how much memory, before anything moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weightsync.cli import parts
from weightsync.cli.scenario import Scenario
from weightsync.cli.sending import Way, sending, sent
from weightsync.cli.workload import deployment
from weightsync.reference.baselines import kept, named
from weightsync.reference.deployment import Deployment
from weightsync.reference.plan import TransferPlan
from weightsync.reference.wire.policy import FIXED


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One update to come.

    Attributes:
        update: its number, from 1.
        kind: ``full``, ``delta`` or ``empty``.
        changed: elements that change; all of them in a full update.
        buckets: buckets broadcast, trailer included.
        nbytes: bytes broadcast, headers and trailer included.
    """

    update: int
    kind: str
    changed: int
    buckets: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Route:
    """One data group: ``root`` broadcasts to, or gathers from, ``others``; ``nbytes`` over all updates."""

    group: str
    does: str
    root: str
    others: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that one rank needs at the most.

    Attributes:
        rank: its name.
        weights: its parameters, padding included.
        snapshots: a trainer rank's baseline: both slots, or one copy and its dirty bits.
        staged: a rollout's received buckets, one under ``stream``, a whole update under ``stage``.
        undo: a rollout's old bits and where they belong, during a delta.
        buckets: what is gathered and encoded at one time; the sender's is largest.
    """

    rank: str
    weights: int
    snapshots: int = 0
    staged: int = 0
    undo: int = 0
    buckets: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.snapshots + self.staged + self.undo + self.buckets


@dataclass(frozen=True, slots=True)
class DryRun:
    """A scenario's plan.

    Attributes:
        exact: True when a run without faults will send exactly these bytes.
        note: why, or why not, in a sentence.
    """

    scenario: Scenario
    seed: int
    elements: int
    tensors: int
    exact: bool
    note: str
    updates: tuple[PlannedUpdate, ...]
    routes: tuple[Route, ...]
    memory: tuple[Memory, ...]

    @property
    def nbytes(self) -> int:
        """Bytes broadcast over all updates."""
        return sum(update.nbytes for update in self.updates)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "scenario": self.scenario.to_dict(),
            "fingerprint": self.scenario.fingerprint(),
            "seed": self.seed,
            "elements": self.elements,
            "tensors": self.tensors,
            "exact": self.exact,
            "note": self.note,
            "nbytes": self.nbytes,
            "updates": [asdict(update) for update in self.updates],
            "routes": [asdict(route) for route in self.routes],
            "memory": [{**asdict(one), "total": one.total} for one in self.memory],
        }


def dry_run(scenario: Scenario, seed: int | None = None) -> DryRun:
    """Plan every update of a scenario; no weight is made and nothing is sent."""
    seeded = parts.seeded(scenario, seed)
    layout = deployment(seeded)
    plan, steps = layout.plan, seeded.workload.steps
    every: list[tuple[int, ...] | None] = [
        None,
        *(parts.piece_counts(seeded, layout, n) for n in range(2, steps + 1)),
    ]
    elements = sum(meta.numel for meta in plan.tensors)
    ways = sending(layout, seeded.policy.route)
    every_way = [[sent(plan, way, counts) for way in ways] for counts in every]
    updates = tuple(
        _update(number, counts, elements, each)
        for number, (counts, each) in enumerate(zip(every, every_way, strict=True), 1)
    )
    owned = seeded.policy.route == "owned" and steps > 1
    drawn = seeded.workload.kind == "synthetic" or not seeded.values
    estimated = seeded.values and seeded.policy.encoding != FIXED
    exact = (
        drawn and not estimated and len(plan.pieces) == len(plan.tensors) and (not owned or not seeded.values)
    )
    density = f"{100 * seeded.workload.density:g} %"
    if exact:
        note = "changed elements are drawn from the seed, so a run without faults sends exactly these bytes"
    elif drawn and estimated:
        note = f"what encoding {seeded.policy.encoding} makes of the values is not known before: bytes are estimates"
    elif drawn and owned:
        note = "changed elements are taken to be spread evenly over what the ranks hold; deltas are estimates"
    elif drawn:
        note = "tensors of 2**31 elements and more are spread evenly over their pieces; deltas are estimates"
    else:
        note = (
            f"what training changes is not known before: deltas are estimated at workload.density = {density}"
        )
    return DryRun(
        scenario, seeded.workload.seed, elements, len(plan.tensors), exact, note, updates,
        _routes(layout, every, ways, every_way),
        _memory(seeded, layout, every, updates, ways, every_way),
    )  # fmt: skip


def _update(
    number: int, counts: tuple[int, ...] | None, elements: int, each: Sequence[Sequence[int]]
) -> PlannedUpdate:
    changed = elements if counts is None else sum(counts)
    kind = "full" if counts is None else "delta" if changed else "empty"
    return PlannedUpdate(number, kind, changed, sum(map(len, each)), sum(map(sum, each)))


def _routes(
    layout: Deployment,
    every: list[tuple[int, ...] | None],
    ways: Sequence[Way],
    every_way: Sequence[Sequence[Sequence[int]]],
) -> tuple[Route, ...]:
    lead, *others = map(str, layout.trainers)
    routes = []
    for way, per_update in zip(ways, zip(*every_way, strict=True), strict=True):
        name = "data" if len(ways) == 1 else f"data-r{way.number}"
        nbytes = sum(map(sum, per_update))
        routes.append(Route(name, "broadcasts to", lead, tuple(map(str, way.ranks)), nbytes))
    if others:
        gathered = sum(sum(sizes[1:]) for counts in every for sizes in _parts(layout.plan, counts))
        routes.insert(0, Route("trainer", "gathers from", lead, tuple(others), gathered))
    return tuple(routes)


def _parts(plan: TransferPlan, counts: tuple[int, ...] | None) -> list[list[int]]:
    """Per gather of one update, the bytes that each trainer rank brings.

    Of a delta's elements each rank is taken to hold its share of the rows.
    """
    ranks = range(len(plan.maps))
    shares = [_share(plan, rank, counts) for rank in ranks]
    return [plan.part_sizes(group, shares) for group in plan.groups(counts)]


def _share(plan: TransferPlan, rank: int, counts: tuple[int, ...] | None) -> tuple[int, ...]:
    if counts is None:
        return (0,) * len(plan.pieces)
    return tuple(
        -(-count * plan.owned(rank, number) // max(1, plan.pieces[number].count))
        for number, count in enumerate(counts)
    )


def _memory(
    scenario: Scenario,
    layout: Deployment,
    every: list[tuple[int, ...] | None],
    updates: tuple[PlannedUpdate, ...],
    ways: Sequence[Way],
    every_way: Sequence[Sequence[Sequence[int]]],
) -> tuple[Memory, ...]:
    plan = layout.plan
    bucket = max(one.nbytes for counts in every for group in plan.groups(counts) for one in group.buckets)
    gathers = [sizes for counts in every for sizes in _parts(plan, counts)]
    most_of: Callable[[Sequence[int]], int] = sum if scenario.policy.receive == "stage" else max
    staged = {
        rank: max(map(most_of, per_update))
        for way, per_update in zip(ways, zip(*every_way, strict=True), strict=True)
        for rank in way.ranks
    }
    model = sum(meta.nbytes for meta in plan.tensors)
    most = max((update.changed for update in updates if update.kind == "delta"), default=0)
    widest = max(meta.itemsize for meta in plan.tensors)
    found = []
    for rank in layout.trainers:
        held = sum(map(parts.local_bytes, layout.trainer_maps[rank.rank].values()))
        part = max(map(sum, gathers)) + bucket if rank.rank == 0 else max(size[rank.rank] for size in gathers)
        baseline = kept(named(scenario.policy.baseline), plan.maps[rank.rank])
        found.append(Memory(str(rank), held, snapshots=baseline.total, buckets=part))
    for ref in layout.rollouts:
        for rank in ref.ranks:
            held = sum(map(parts.local_bytes, layout.rollout_maps(rank).values()))
            undo = -(-most * (8 + widest) * min(held, model) // model)
            found.append(Memory(str(rank), held, staged=staged[rank], undo=undo))
    return tuple(found)
