"""Shared links: properties that are theorems.

Not here, because it is false: "more bandwidth is never slower"; ``test_fluid.py`` holds the counter-example.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from weightsync.sim.clock import SimClock
from weightsync.sim.fair import fair_rates, fill
from weightsync.testing.links import (
    LinkRun,
    S,
    arrivals,
    demand,
    integrate,
    link_capacities,
    routes,
    transfers,
    up,
)

demands = st.lists(
    st.builds(demand, routes(), st.integers(1, 4), st.none() | st.integers(1, 40)), min_size=1, max_size=8
)


@given(link_capacities(), demands)
def test_every_flow_has_its_cap_or_a_full_link_on_which_nobody_has_a_higher_level(capacities, demands):
    found = fair_rates(capacities, demands)
    load = {
        link: sum(rate * one.uses.get(link, 0) for rate, one in zip(found, demands, strict=True))
        for link in capacities
    }
    assert all(load[link] <= capacity for link, capacity in capacities.items())
    level = [rate / one.weight for rate, one in zip(found, demands, strict=True)]
    for number, one in enumerate(demands):
        at_bottleneck = any(
            load[link] == capacities[link]
            and all(level[other] <= level[number] for other, two in enumerate(demands) if link in two.uses)
            for link in one.uses
        )
        assert found[number] == one.cap or at_bottleneck


@given(link_capacities(), st.lists(routes(), min_size=1, max_size=3), st.data())
def test_the_quick_rates_equal_progressive_filling(capacities, some, data):
    alike = [demand(some[0], weight) for weight in data.draw(st.lists(st.integers(1, 5), max_size=5))]
    alone = [demand(some[-1], data.draw(st.integers(1, 5)), data.draw(st.none() | st.integers(1, 40)))]
    for few in (alike, alone, [demand(route) for route in some]):
        assert fair_rates(capacities, few) == fill(capacities, few)


@given(link_capacities(), transfers())
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(capacities, flows):
    run = LinkRun(**capacities)
    for number, (route, nbytes, start) in enumerate(flows):
        run.start(str(number), route, nbytes, start)
    times = run.times()
    assert len(times) == len(flows)
    assert run.net.rounded == 0
    for letter, capacity in capacities.items():
        stretches = [load for load in run.loads if load[0].name == letter]
        asked = sum(nbytes * route.count(letter) for route, nbytes, _ in flows)
        assert sum(rate * (end - start) for _, start, end, rate in stretches) == asked * S
        assert all(0 < rate <= capacity for *_, rate in stretches)
        assert all(early[2] <= late[1] for early, late in pairwise(stretches))


@given(link_capacities(), transfers())
def test_no_transfer_beats_its_own_path_and_the_makespan_its_busiest_link(capacities, flows):
    times = arrivals(capacities, *flows)
    for (route, nbytes, start), end in zip(flows, times, strict=True):
        alone = max(Fraction(nbytes * route.count(letter), capacities[letter]) for letter in route)
        assert end >= start + up(alone) or nbytes == 0
    for letter, capacity in capacities.items():
        assert max(times) >= up(Fraction(sum(n * route.count(letter) for route, n, _ in flows), capacity))


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 5 * S)), min_size=1))
def test_a_single_link_never_idles_while_there_is_work(capacity, work):
    times = arrivals({"a": capacity}, *[("a", nbytes, start) for nbytes, start in work])
    free = Fraction(0)
    for nbytes, start in sorted(work, key=lambda one: one[1]):
        free = max(free, Fraction(start)) + Fraction(nbytes * S, capacity)
    assert max(times) == ceil(free)


@given(link_capacities(), transfers(), st.integers(2, 10))
def test_scaling_sizes_and_capacities_leaves_all_times_unchanged(capacities, flows, factor):
    scaled = [(route, nbytes * factor, start) for route, nbytes, start in flows]
    more = {letter: capacity * factor for letter, capacity in capacities.items()}
    assert arrivals(more, *scaled) == arrivals(capacities, *flows)


@given(link_capacities(), transfers(), routes(), st.integers(0, 20 * S))
def test_a_transfer_of_no_bytes_changes_nothing_and_takes_only_latency(capacities, flows, route, start):
    assert arrivals(capacities, *flows, (route, 0, start)) == [*arrivals(capacities, *flows), start]


@given(st.integers(1, 50), transfers())
def test_more_bandwidth_is_never_slower_on_one_link(capacity, flows):
    flows = [("a", nbytes, start) for _, nbytes, start in flows]
    faster = arrivals({"a": capacity + 1}, *flows)
    assert all(new <= old for new, old in zip(faster, arrivals({"a": capacity}, *flows), strict=True))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 50))
def test_two_halves_one_after_the_other_end_when_the_whole_does(first, second, bytes_per_ns):
    """Sizes are such that the first half ends on a whole ns, for only then can the second start in time."""
    halves = (first * bytes_per_ns, second * bytes_per_ns)

    def end(parts: tuple[int, ...]) -> int:
        run = LinkRun(a=bytes_per_ns * S)
        clock = SimClock(run.world, "rank")
        run.start("other", "a", 100 * bytes_per_ns)

        async def send() -> int:
            for part in parts:
                await clock.wait(run.net.transfer([run.links["a"]], part), None)
            return clock.now_ns()

        task = clock.spawn(send(), "send")
        run.world.run([task])
        return task.result()

    assert end(halves) == end((sum(halves),)) == 2 * (first + second)


@given(link_capacities(), transfers())
def test_equal_runs_give_equal_loads(capacities, flows):
    def loads() -> list[Any]:
        run = LinkRun(**capacities)
        for number, flow in enumerate(flows):
            run.start(str(number), *flow)
        return [run.times(), run.loads]

    assert loads() == loads()


@given(link_capacities(), transfers())
def test_arrivals_agree_with_a_plain_integrator(capacities, flows):
    expected = integrate(capacities, flows)
    assert arrivals(capacities, *flows) == [ceil(end) for end in expected]
