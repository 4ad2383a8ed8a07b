"""Shared links: closed forms to the ns, and properties that are theorems.

Not here, because it is false: "more bandwidth is never slower" (``test_more_bandwidth_can_be_slower``).
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.sim.clock import SimClock, SimWorld
from weightsync.sim.fair import Demand, fair_rates, fill
from weightsync.sim.fluid import FluidNet, Link, Transfer

S = 10**9


class Run:
    """A net, and the instants at which named transfers arrive."""

    def __init__(self, **capacities: int) -> None:
        self.world = SimWorld()
        self.loads: list[tuple[Link, Fraction, Fraction, Fraction]] = []
        self.net = FluidNet(self.world, lambda *load: self.loads.append(load))
        self.links = {name: Link(name, capacity) for name, capacity in capacities.items()}
        self.arrived: dict[str, int] = {}

    def start(self, name: str, route: str, nbytes: int, at_ns: int = 0, **options: Any) -> None:
        """``route`` is letters, each a link."""

        def begin() -> None:
            transfer = self.net.transfer([self.links[letter] for letter in route], nbytes, **options)
            transfer.on_done(lambda: self.arrived.update({name: self.world.now_ns()}))

        self.world.call_at(at_ns, begin)

    def times(self) -> dict[str, int]:
        self.world.run()
        self.net.flush()
        return self.arrived


def arrivals(capacities: dict[str, int], *flows: tuple[Any, ...], **options: Any) -> list[int]:
    """Arrival instants, in the order of ``flows``: (route, nbytes) or (route, nbytes, start)."""
    run = Run(**capacities)
    for number, flow in enumerate(flows):
        run.start(str(number), *flow, **options)
    times = run.times()
    return [times[str(number)] for number in range(len(flows))]


def up(seconds: Fraction | int) -> int:
    return ceil(seconds * S)


sizes = st.integers(1, 10**12)
rates = st.integers(1, 10**12)

# ---------------------------------------- closed forms


@given(st.integers(0, 10**9), sizes, rates)
def test_1_one_transfer_takes_latency_plus_bytes_over_bandwidth(latency_ns, nbytes, rate):
    run = Run()
    run.links["a"] = Link("a", rate, latency_ns)
    run.start("x", "a", nbytes)
    assert run.times() == {"x": latency_ns + up(Fraction(nbytes, rate))}


@given(st.integers(1, 8), sizes, rates)
def test_2_equal_transfers_on_one_link_all_end_together(count, nbytes, rate):
    assert arrivals({"a": rate}, *[("a", nbytes)] * count) == [up(Fraction(count * nbytes, rate))] * count


@given(st.lists(sizes, min_size=1, max_size=8), rates)
def test_3_unequal_transfers_on_one_link(nbytes, rate):
    nbytes = sorted(nbytes)
    expected, end, before = [], Fraction(0), 0
    for number, size in enumerate(nbytes):
        end += Fraction((size - before) * (len(nbytes) - number), rate)
        before = size
        expected.append(up(end))
    assert arrivals({"a": rate}, *[("a", size) for size in nbytes]) == expected


def test_3_the_instance_of_one_two_three():
    assert arrivals({"a": 1}, ("a", 1), ("a", 2), ("a", 3)) == [3 * S, 5 * S, 6 * S]


@given(sizes, rates, st.data())
def test_4_a_second_transfer_that_arrives_halfway(first, rate, data):
    alone = up(Fraction(first, rate))
    start = data.draw(st.integers(0, alone - 1))
    left = first - Fraction(rate * start, S)
    second = ceil(left) + data.draw(st.integers(0, 10**6))
    times = arrivals({"a": rate}, ("a", first), ("a", second, start))
    assert times[0] == up(Fraction(2 * first, rate) - Fraction(start, S))
    assert times[1] == up(Fraction(first + second, rate))


def test_5_directions_are_independent_unless_they_share_a_root():
    both = {"u": 10, "d": 10, "r": 10}
    assert arrivals(both, ("u", 20), ("d", 20)) == [2 * S, 2 * S]
    assert arrivals(both, ("u", 20), ("u", 20)) == [4 * S, 4 * S]
    assert arrivals(both, ("ur", 20), ("dr", 20)) == [4 * S, 4 * S]
    assert arrivals(both, ("rr", 20)) == [4 * S]


def test_6_parking_lot():
    run = Run(a=12, b=12, c=12)
    run.start("long", "abc", 600)
    for letter in "abc":
        run.start(letter, letter, 600)
    assert run.times() == {"long": 100 * S, "a": 100 * S, "b": 100 * S, "c": 100 * S}
    assert fair_rates({"a": 2, "b": 4}, [demand("ab"), demand("a"), demand("b")]) == [1, 1, 3]


def test_7_a_capped_transfer_leaves_its_share_to_the_others():
    run = Run(a=30)
    run.start("capped", "a", 60, cap_bytes_per_s=6)
    run.start("x", "a", 120)
    run.start("y", "a", 120)
    assert run.times() == {"capped": 10 * S, "x": 10 * S, "y": 10 * S}
    run = Run()
    run.start("no link", "", 60, cap_bytes_per_s=6)
    assert run.times() == {"no link": 10 * S}


def test_8_rates_go_with_the_weights():
    run = Run(a=60)
    for weight in (1, 2, 3):
        run.start(str(weight), "a", 100 * weight, weight=weight)
    assert run.times() == {"1": 10 * S, "2": 10 * S, "3": 10 * S}


def test_9_more_bandwidth_can_be_slower():
    flows = (("ac", 2), ("ab", 4), ("ac", 2))
    assert max(arrivals({"a": 2, "b": 1, "c": 1}, *flows)) == 4 * S
    assert max(arrivals({"a": 2, "b": 1, "c": 2}, *flows)) == 5 * S


# ---------------------------------------- rates


def demand(route: str, weight: int = 1, cap: int | None = None) -> Demand[str]:
    return Demand({letter: route.count(letter) for letter in dict.fromkeys(route)}, weight, cap)


capacities = st.fixed_dictionaries(dict.fromkeys("abcd", st.integers(1, 50)))
routes = st.text("abcd", min_size=1, max_size=3)
demands = st.lists(
    st.builds(demand, routes, st.integers(1, 4), st.none() | st.integers(1, 40)), min_size=1, max_size=8
)


@given(capacities, demands)
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


@given(capacities, st.lists(routes, min_size=1, max_size=3), st.data())
def test_the_quick_rates_equal_progressive_filling(capacities, some, data):
    alike = [demand(some[0], weight) for weight in data.draw(st.lists(st.integers(1, 5), max_size=5))]
    alone = [demand(some[-1], data.draw(st.integers(1, 5)), data.draw(st.none() | st.integers(1, 40)))]
    for few in (alike, alone, [demand(route) for route in some]):
        assert fair_rates(capacities, few) == fill(capacities, few)


# ---------------------------------------- theorems about whole runs

flows = st.lists(st.tuples(routes, st.integers(0, 1000), st.integers(0, 20 * S)), min_size=1, max_size=8)


@given(capacities, flows)
def test_bytes_are_conserved_and_no_link_carries_more_than_it_can(capacities, flows):
    run = Run(**capacities)
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


@given(capacities, flows)
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


@given(capacities, flows, st.integers(2, 10))
def test_scaling_sizes_and_capacities_leaves_all_times_unchanged(capacities, flows, factor):
    scaled = [(route, nbytes * factor, start) for route, nbytes, start in flows]
    more = {letter: capacity * factor for letter, capacity in capacities.items()}
    assert arrivals(more, *scaled) == arrivals(capacities, *flows)


@given(capacities, flows, routes, st.integers(0, 20 * S))
def test_a_transfer_of_no_bytes_changes_nothing_and_takes_only_latency(capacities, flows, route, start):
    assert arrivals(capacities, *flows, (route, 0, start)) == [*arrivals(capacities, *flows), start]


@given(st.integers(1, 50), flows)
def test_more_bandwidth_is_never_slower_on_one_link(capacity, flows):
    flows = [("a", nbytes, start) for _, nbytes, start in flows]
    faster = arrivals({"a": capacity + 1}, *flows)
    assert all(new <= old for new, old in zip(faster, arrivals({"a": capacity}, *flows), strict=True))


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 50))
def test_two_halves_one_after_the_other_end_when_the_whole_does(first, second, bytes_per_ns):
    """Sizes are such that the first half ends on a whole ns, for only then can the second start in time."""
    halves = (first * bytes_per_ns, second * bytes_per_ns)

    def end(parts: tuple[int, ...]) -> int:
        run = Run(a=bytes_per_ns * S)
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


@given(capacities, flows)
def test_equal_runs_give_equal_loads(capacities, flows):
    def loads() -> list[Any]:
        run = Run(**capacities)
        for number, flow in enumerate(flows):
            run.start(str(number), *flow)
        return [run.times(), run.loads]

    assert loads() == loads()


@given(capacities, flows)
def test_arrivals_agree_with_a_plain_integrator(capacities, flows):
    expected = integrate(capacities, flows)
    assert arrivals(capacities, *flows) == [ceil(end) for end in expected]


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


# ---------------------------------------- using it


def test_arrivals_of_one_instant_are_settled_together_and_waiters_may_go_on_in_it():
    with SimWorld() as world:
        net, clock = FluidNet(world), SimClock(world, "rank")
        link = Link("wire", 10)
        log: list[Any] = []

        async def chain(name: str) -> None:
            for part in range(2):
                log.append((name, part, await clock.wait(net.transfer([link], 10), None), clock.now_ns() / S))

        tasks = [clock.spawn(chain(name), name) for name in "ab"]
        assert world.run(tasks) == ()
        assert log == [("a", 0, 10, 2.0), ("b", 0, 10, 2.0), ("a", 1, 10, 4.0), ("b", 1, 10, 4.0)]


def test_a_waiter_that_gives_up_does_not_stop_a_transfer_but_abort_does():
    with SimWorld() as world:
        net, clock = FluidNet(world), SimClock(world, "rank")
        link = Link("wire", 10)
        log: list[Any] = []

        async def program() -> None:
            doomed, kept = net.transfer([link], 100), net.transfer([link], 100)
            with pytest.raises(TimeoutError):
                await clock.wait(doomed, 4 * S)
            log.append(net.progress(doomed))
            net.abort(doomed, ConnectionError("group closed"))
            log.append(net.progress(doomed))
            with pytest.raises(ConnectionError, match="group closed"):
                await clock.wait(doomed, None)
            await clock.wait(kept, None)
            log.append(clock.now_ns() / S)
            net.abort(kept, ConnectionError("too late"))
            log.append((kept.result(), net.progress(kept)))
            young = net.transfer([link], 10)
            net.abort(young, ConnectionError("at once"))
            log.append(net.progress(young))

        assert world.run([clock.spawn(program(), "main")]) == ()
        assert log == [(20, 5), (20, 0), 12.0, (100, (100, 0)), (0, 0)]


def test_transfers_of_other_links_are_left_alone():
    run = Run(a=10, b=10)
    run.start("x", "a", 100)
    run.start("y", "b", 30, at_ns=S)
    run.start("z", "b", 30, at_ns=2 * S)
    assert run.times() == {"x": 10 * S, "y": 6 * S, "z": 7 * S}


def test_superseded_ends_do_not_pile_up():
    with SimWorld() as world:
        net, clock = FluidNet(world), SimClock(world, "rank")
        link = Link("wire", 10**9)

        async def program() -> None:
            for _ in range(2_000):
                await clock.wait(net.transfer([link], 100), None)

        net.transfer([link], 10**9)
        assert world.run([clock.spawn(program(), "main")]) == ()
        assert len(net._ends) <= 300


def test_long_busy_periods_leave_exact_fractions_and_say_so():
    with SimWorld() as world:
        net, clock = FluidNet(world), SimClock(world, "rank")
        links = [Link(name, 10**9 + 7 * number) for number, name in enumerate("abcd")]
        sent: list[Transfer] = []

        async def user(number: int) -> None:
            for turn in range(60):
                pair = [links[(number + turn) % 4], links[(number * turn + 1) % 4]]
                sent.append(net.transfer(pair, 1000 + 37 * number + turn))
                await clock.wait(sent[-1], None)

        tasks = [clock.spawn(user(number), str(number)) for number in range(6)]
        assert world.run(tasks) == ()
        assert net.rounded > 0
        assert all(net.progress(one) == (one.nbytes, 0) for one in sent)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda net: Link("x", 0), "link 'x' has 0 bytes/s; give it more than 0"),
        (lambda net: Link("x", 1, -1), "link 'x' has a latency of -1 ns"),
        (lambda net: net.transfer([Link("x", 1)], -1), "transfer of -1 bytes"),
        (lambda net: net.transfer([], 1), "over no link and without a cap"),
        (lambda net: net.transfer([Link("x", 1)], 1, cap_bytes_per_s=0), "capped at 0 bytes/s"),
        (lambda net: net.transfer([Link("x", 1)], 1, weight=0), "weight 0; give more than 0"),
        (lambda net: net.transfer([Link("x", 1), Link("x", 2)], 1), "share a name"),
    ],
)
def test_what_cannot_be_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        make(FluidNet(SimWorld()))


def test_bytes_and_bandwidths_are_integers():
    with pytest.raises(TypeError):
        Link("x", 1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        FluidNet(SimWorld()).transfer([Link("x", 1)], 1.5)  # type: ignore[arg-type]
