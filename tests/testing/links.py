"""Transfers over links with one-letter names: run them, integrate them by brute force, draw them."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

from hypothesis import strategies as st

from weightsync.sim.fair import Demand, fill
from weightsync.sim.fluid import FluidNet, Link
from weightsync.sim.world import SimWorld

S = 10**9
"""ns per second."""


class LinkRun:
    """A net on links with one-letter names, and the instants at which named transfers arrive.

    Attributes:
        world, net: what runs.
        links: by letter; add to them for links with a latency.
        loads: every stretch of constant load, as ``FluidNet`` reports it.
        arrived: instants in ns by the transfer's name.
    """

    def __init__(self, **capacities: int) -> None:
        self.world = SimWorld()
        self.loads: list[tuple[Link, Fraction, Fraction, Fraction]] = []
        self.net = FluidNet(self.world, lambda *load: self.loads.append(load))
        self.links = {name: Link(name, capacity) for name, capacity in capacities.items()}
        self.arrived: dict[str, int] = {}

    def start(self, name: str, route: str, nbytes: int, at_ns: int = 0, **options: Any) -> None:
        """Start a transfer at ``at_ns``; ``route`` is letters, each a link."""

        def begin() -> None:
            transfer = self.net.transfer([self.links[letter] for letter in route], nbytes, **options)
            transfer.on_done(lambda: self.arrived.update({name: self.world.now_ns()}))

        self.world.call_at(at_ns, begin)

    def times(self) -> dict[str, int]:
        """Run to the end; ``arrived``."""
        self.world.run()
        self.net.flush()
        return self.arrived


def arrivals(capacities: dict[str, int], *flows: tuple[Any, ...], **options: Any) -> list[int]:
    """Arrival instants in ns, in the order of ``flows``: (route, nbytes) or (route, nbytes, start in ns)."""
    run = LinkRun(**capacities)
    for number, flow in enumerate(flows):
        run.start(str(number), *flow, **options)
    times = run.times()
    return [times[str(number)] for number in range(len(flows))]


def up(seconds: Fraction | int) -> int:
    """Whole ns, rounded up."""
    return ceil(seconds * S)


def demand(route: str, weight: int = 1, cap: int | None = None) -> Demand[str]:
    """A demand on links with one-letter names; a letter twice is a link crossed twice."""
    return Demand({letter: route.count(letter) for letter in dict.fromkeys(route)}, weight, cap)


def integrate(capacities: dict[str, int], flows: list[tuple[str, int, int]]) -> list[Fraction]:
    """The same by brute force: all rates anew at every event, no ledger, no queue."""
    left = {number: Fraction(nbytes) for number, (_, nbytes, _) in enumerate(flows)}
    ends: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(ends) < len(flows):
        started = [n for n in left if n not in ends and flows[n][2] <= now]
        for number in started:
            if left[number] == 0:
                ends[number] = now
        active = [number for number in started if number not in ends]
        found = dict(zip(active, fill(capacities, [demand(flows[n][0]) for n in active]), strict=True))
        steps = [left[n] * S / rate for n, rate in found.items()]
        steps += [flows[n][2] - now for n in left if flows[n][2] > now]
        if not steps:
            continue
        now += min(steps)
        for number, rate in found.items():
            left[number] -= rate * min(steps) / S
            if left[number] == 0:
                ends[number] = now
    return [ends[number] for number in range(len(flows))]


def link_capacities() -> st.SearchStrategy[dict[str, int]]:
    """Bytes per second of the links a to d."""
    return st.fixed_dictionaries(dict.fromkeys("abcd", st.integers(1, 50)))


def routes() -> st.SearchStrategy[str]:
    """One to three of the links a to d, in any order, possibly twice."""
    return st.text("abcd", min_size=1, max_size=3)


def transfers() -> st.SearchStrategy[list[tuple[str, int, int]]]:
    """Open-loop transfers: (route, nbytes, start in ns)."""
    one = st.tuples(routes(), st.integers(0, 1000), st.integers(0, 20 * S))
    return st.lists(one, min_size=1, max_size=8)
