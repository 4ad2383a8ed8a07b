"""Shared links: the closed forms to the ns, and how a net is used."""

from __future__ import annotations

from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.sim.clock import SimClock, SimWorld
from weightsync.sim.fair import fair_rates
from weightsync.sim.fluid import FluidNet, Link, Transfer
from weightsync.testing.links import LinkRun, S, arrivals, demand, up

sizes = st.integers(1, 10**12)
rates = st.integers(1, 10**12)


@given(st.integers(0, 10**9), sizes, rates)
def test_1_one_transfer_takes_latency_plus_bytes_over_bandwidth(latency_ns, nbytes, rate):
    run = LinkRun()
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
    run = LinkRun(a=12, b=12, c=12)
    run.start("long", "abc", 600)
    for letter in "abc":
        run.start(letter, letter, 600)
    assert run.times() == {"long": 100 * S, "a": 100 * S, "b": 100 * S, "c": 100 * S}
    assert fair_rates({"a": 2, "b": 4}, [demand("ab"), demand("a"), demand("b")]) == [1, 1, 3]


def test_7_a_capped_transfer_leaves_its_share_to_the_others():
    run = LinkRun(a=30)
    run.start("capped", "a", 60, cap_bytes_per_s=6)
    run.start("x", "a", 120)
    run.start("y", "a", 120)
    assert run.times() == {"capped": 10 * S, "x": 10 * S, "y": 10 * S}
    run = LinkRun()
    run.start("no link", "", 60, cap_bytes_per_s=6)
    assert run.times() == {"no link": 10 * S}


def test_8_rates_go_with_the_weights():
    run = LinkRun(a=60)
    for weight in (1, 2, 3):
        run.start(str(weight), "a", 100 * weight, weight=weight)
    assert run.times() == {"1": 10 * S, "2": 10 * S, "3": 10 * S}


def test_9_more_bandwidth_can_be_slower():
    flows = (("ac", 2), ("ab", 4), ("ac", 2))
    assert max(arrivals({"a": 2, "b": 1, "c": 1}, *flows)) == 4 * S
    assert max(arrivals({"a": 2, "b": 1, "c": 2}, *flows)) == 5 * S


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
    run = LinkRun(a=10, b=10)
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
