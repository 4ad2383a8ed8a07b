"""Shared links: transfers at max-min fair rates, exact in integer ns.

The scheme: bytes, rates and the instants at which transfers end are rational numbers (``Fraction``), so that
nothing is rounded while links stay busy; only what the simulated clock sees is rounded, once, up to the next
whole ns. Rates change at the exact instants. A busy period so long that its fractions pass ``EXACT_BITS``
bits goes on on a grid of 2**-GRID_BITS (of a byte, of a ns); ``FluidNet.rounded`` counts that, and bytes are
conserved even then.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from operator import index

from weightsync.sim.fair import Demand, fair_rates
from weightsync.sim.world import SimFuture, SimWorld, Timer

EXACT_BITS = 512
GRID_BITS = 192
_S = 10**9  # ns per second
_CROWDED = 256  # ends, most of them superseded, before the heap is rebuilt


@dataclass(frozen=True, slots=True)
class Link:
    """One direction of a wire, or anything else that is shared at a rate. Two links of one name are one link.

    Attributes:
        name: unique within a ``FluidNet``.
        bandwidth_bytes_per_s: what all transfers share, above 0.
        latency_ns: from the departure of a transfer's last byte to its arrival.
    """

    name: str
    bandwidth_bytes_per_s: int
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if index(self.bandwidth_bytes_per_s) <= 0:
            raise ValueError(
                f"link {self.name!r} has {self.bandwidth_bytes_per_s} bytes/s; give it more than 0"
            )
        if index(self.latency_ns) < 0:
            raise ValueError(f"link {self.name!r} has a latency of {self.latency_ns} ns; give it 0 or more")


class Transfer(SimFuture):
    """A transfer under way; the future of its last byte's arrival. Its result is the byte count."""

    __slots__ = ("_demand", "_ends", "_order", "_rate", "_remaining", "_since", "latency_ns", "nbytes")

    def __init__(self, nbytes: int, latency_ns: int, demand: Demand[str], order: int) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.latency_ns = latency_ns
        self._demand = demand
        self._order = order
        self._remaining = Fraction(nbytes)  # at the instant _since
        self._since = Fraction(0)
        self._rate = Fraction(0)
        self._ends: Fraction | None = None  # exact instant of the last byte's departure, while rates stay


OnLoad = Callable[[Link, Fraction, Fraction, Fraction], None]
"""Called with (link, start ns, end ns, bytes per second) for every stretch of constant load above 0."""


class FluidNet:
    """The central ledger of all transfers of one simulated world. Equal calls give equal instants.

    Args:
        world: whose time it runs on.
        on_load: told every stretch of constant load of every link, for utilisation; never read by the model.

    Attributes:
        rounded: how often a fraction outgrew ``EXACT_BITS``; 0 means that every instant was exact.
    """

    def __init__(self, world: SimWorld, on_load: OnLoad | None = None) -> None:
        self.world = world
        self.rounded = 0
        self._on_load = on_load
        self._links: dict[str, Link] = {}
        self._crossing: dict[str, dict[Transfer, None]] = {}
        self._loads: dict[str, tuple[Fraction, Fraction]] = {}  # since when, bytes per second
        self._arrivals: list[Transfer] = []
        self._ends: list[tuple[int, Fraction, int, Transfer]] = []
        self._crowded = _CROWDED
        self._count = 0
        self._settle_due = False
        self._wake: Timer | None = None

    def transfer(
        self,
        links: Sequence[Link],
        nbytes: int,
        *,
        cap_bytes_per_s: int | None = None,
        weight: Fraction | int = 1,
    ) -> Transfer:
        """Send ``nbytes`` over all of ``links`` at once, from now on.

        The bytes cross every link at one rate; a link named twice is crossed twice. The last byte arrives
        after the sum of the latencies, during which it loads no link. Waiters that give up do not stop it;
        ``abort`` does.

        Args:
            links: the route, in any order; may be empty when there is a cap.
            nbytes: 0 or more.
            cap_bytes_per_s: the most this transfer takes, such as the rate of the copy that feeds it.
            weight: its share against other transfers.
        """
        nbytes = index(nbytes)
        if nbytes < 0:
            raise ValueError(f"transfer of {nbytes} bytes; give 0 or more")
        if cap_bytes_per_s is not None and index(cap_bytes_per_s) <= 0:
            raise ValueError(f"transfer capped at {cap_bytes_per_s} bytes/s; give more than 0, or None")
        if weight <= 0:
            raise ValueError(f"transfer of weight {weight}; give more than 0")
        if not links and cap_bytes_per_s is None:
            raise ValueError("transfer over no link and without a cap; give it one of the two")
        for link in links:
            if self._links.setdefault(link.name, link) != link:
                raise ValueError(f"{link} and {self._links[link.name]} share a name; name every link once")
        self._count += 1
        share = weight if isinstance(weight, int) else Fraction(weight)
        demand = Demand(Counter(link.name for link in links), share, cap_bytes_per_s)
        transfer = Transfer(nbytes, sum(link.latency_ns for link in links), demand, self._count)
        if nbytes == 0:
            self._arrive(transfer)
        else:
            self._arrivals.append(transfer)
            self._settle_soon()
        return transfer

    def abort(self, transfer: Transfer, error: BaseException) -> None:
        """Take a transfer off its links now and deliver ``error`` to its waiters; no-op when it is done."""
        if transfer.done():
            return
        self._settle()
        if transfer._ends is not None:
            now = Fraction(self.world.now_ns())
            self._advance(transfer, now)
            self._refill(self._take_off([transfer]), now)
            self._arm()
        transfer.set_exception(error)

    def progress(self, transfer: Transfer) -> tuple[Fraction, Fraction]:
        """Bytes that have left so far, and the current rate in bytes per second; both exact."""
        self._settle()
        moved = transfer._rate * (self.world.now_ns() - transfer._since) / _S
        return transfer.nbytes - transfer._remaining + moved, transfer._rate

    def flush(self) -> None:
        """Report the load of every link up to now to ``on_load``."""
        self._settle()
        now = Fraction(self.world.now_ns())
        for name in self._loads:
            self._set_load(name, self._loads[name][1], now)

    def _settle_soon(self) -> None:
        if not self._settle_due:
            self._settle_due = True
            self.world.call_at(self.world.now_ns(), self._settle)

    def _settle(self) -> None:
        """Bring the ledger to this instant: transfers that ended, then those that arrived, all at once."""
        self._settle_due = False
        now = Fraction(self.world.now_ns())
        while (at := self._next_end()) is not None and at <= now:
            ended: list[Transfer] = []
            while self._next_end() == at:
                ended.append(heapq.heappop(self._ends)[3])
                ended[-1]._remaining = Fraction(0)
            self._refill(self._take_off(ended), at)
            for transfer in ended:
                self._arrive(transfer)
        arrivals, self._arrivals = self._arrivals, []
        for transfer in arrivals:
            transfer._since = now
            for name in transfer._demand.uses:
                self._crossing.setdefault(name, {})[transfer] = None
            if not transfer._demand.uses:
                self._set_rate(transfer, fair_rates({}, [transfer._demand])[0], now)
        if arrivals:
            self._refill([name for transfer in arrivals for name in transfer._demand.uses], now)
        self._arm()

    def _next_end(self) -> Fraction | None:
        while self._ends:
            _, at, _, transfer = self._ends[0]
            if transfer._ends is at:
                return at
            heapq.heappop(self._ends)  # its rate has changed since
        return None

    def _take_off(self, transfers: Iterable[Transfer]) -> list[str]:
        """Remove transfers from their links; returns the names of those links."""
        touched: dict[str, None] = {}
        for transfer in transfers:
            transfer._ends = None
            transfer._rate = Fraction(0)
            for name in transfer._demand.uses:
                del self._crossing[name][transfer]
                touched[name] = None
        return list(touched)

    def _refill(self, names: Sequence[str], at: Fraction) -> None:
        """Rates from ``at`` on for all that shares a link, however indirectly, with the links ``names``."""
        links: dict[str, None] = {}
        reached: dict[Transfer, None] = {}
        todo = list(names)
        for name in todo:  # grows
            if name not in links:
                links[name] = None
                for transfer in self._crossing[name]:
                    if transfer not in reached:
                        reached[transfer] = None
                        todo.extend(transfer._demand.uses)
        transfers = sorted(reached, key=lambda transfer: transfer._order)
        capacities = {name: self._links[name].bandwidth_bytes_per_s for name in links}
        rates = fair_rates(capacities, [transfer._demand for transfer in transfers])
        for transfer, rate in zip(transfers, rates, strict=True):
            self._set_rate(transfer, rate, at)
        if self._on_load is not None:
            loads = dict.fromkeys(links, Fraction(0))
            for transfer in transfers:
                for name, times in transfer._demand.uses.items():
                    loads[name] += times * transfer._rate
            for name, load in loads.items():
                self._set_load(name, load, at)

    def _set_rate(self, transfer: Transfer, rate: Fraction, at: Fraction) -> None:
        if transfer._ends is None or rate != transfer._rate:
            self._advance(transfer, at)
            transfer._rate = rate
            ends = self._bounded(_end(at, transfer._remaining, rate))
            transfer._ends = ends if ends > at else at  # the grid may lie a hair earlier
            heapq.heappush(self._ends, (ceil(transfer._ends), transfer._ends, transfer._order, transfer))
            if len(self._ends) > self._crowded:
                self._ends = [entry for entry in self._ends if entry[3]._ends is entry[1]]
                heapq.heapify(self._ends)
                self._crowded = 2 * len(self._ends) + _CROWDED

    def _advance(self, transfer: Transfer, at: Fraction) -> None:
        if transfer._rate:
            left = self._bounded(_left(transfer._remaining, transfer._rate, transfer._since, at))
            transfer._remaining = left if left > 0 else Fraction(0)
        transfer._since = at

    def _bounded(self, value: Fraction) -> Fraction:
        if value.denominator.bit_length() <= EXACT_BITS:
            return value
        self.rounded += 1
        return Fraction(round(value * (1 << GRID_BITS)), 1 << GRID_BITS)

    def _set_load(self, name: str, load: Fraction, at: Fraction) -> None:
        since, before = self._loads.get(name, (at, Fraction(0)))
        if before and self._on_load is not None and at > since:
            self._on_load(self._links[name], since, at, before)
        self._loads[name] = (at, load)

    def _arrive(self, transfer: Transfer) -> None:
        """The last byte has left within this ns; it arrives after the latency."""
        if transfer.latency_ns:
            when_ns = self.world.now_ns() + transfer.latency_ns
            self.world.call_at(when_ns, lambda: transfer.set_result(transfer.nbytes))
        else:
            transfer.set_result(transfer.nbytes)

    def _arm(self) -> None:
        """One timer, for the next whole ns by which a transfer has ended."""
        at = self._next_end()
        when_ns = None if at is None else ceil(at)
        if self._wake is not None:
            if self._wake.when_ns == when_ns:
                return
            self._wake.cancel()
        self._wake = None if when_ns is None else self.world.call_at(when_ns, self._on_wake)

    def _on_wake(self) -> None:
        self._wake = None
        self._settle()


def _end(at: Fraction, remaining: Fraction, rate: Fraction) -> Fraction:
    """``at + remaining / rate`` in ns, reduced once instead of at every step."""
    at_den, left_den = at.denominator, remaining.denominator
    den = left_den * rate.numerator
    return Fraction(at.numerator * den + remaining.numerator * _S * rate.denominator * at_den, at_den * den)


def _left(remaining: Fraction, rate: Fraction, since: Fraction, at: Fraction) -> Fraction:
    """``remaining - rate * (at - since)`` in bytes, reduced once."""
    since_den, at_den = since.denominator, at.denominator
    elapsed = at.numerator * since_den - since.numerator * at_den
    den = rate.denominator * since_den * at_den * _S
    left_den = remaining.denominator
    return Fraction(remaining.numerator * den - rate.numerator * elapsed * left_den, left_den * den)
