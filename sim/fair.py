"""Weighted max-min fair rates by progressive filling, in exact rational arithmetic. Pure; knows no time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, TypeVar

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Demand(Generic[K]):
    """One flow, as the rates see it.

    Attributes:
        uses: how often the flow crosses each link, at least once.
        weight: its share against other flows, above 0.
        cap: the most it takes, in bytes per second; None for no limit. A flow without links has one.
    """

    uses: Mapping[K, int]
    weight: Fraction | int = 1
    cap: Fraction | int | None = None


def fair_rates(capacities: Mapping[K, int], demands: Sequence[Demand[K]]) -> list[Fraction]:
    """Weighted max-min fair rates in bytes per second, one per demand.

    A common level rises; a flow's rate is its weight times the level until one of its links is full or its
    cap is reached. ``capacities`` are bytes per second and cover every link in use.
    """
    if _alike(demands):
        return _alike_rates(capacities, demands)
    return fill(capacities, demands)


def fill(capacities: Mapping[K, int], demands: Sequence[Demand[K]]) -> list[Fraction]:
    """Progressive filling itself, for any demands; ``fair_rates`` equals it."""
    left = {link: Fraction(capacity) for link, capacity in capacities.items()}
    weights: dict[K, Fraction | int] = dict.fromkeys(capacities, 0)
    crossing: dict[K, list[int]] = {link: [] for link in capacities}
    for number, demand in enumerate(demands):
        for link, times in demand.uses.items():
            weights[link] += times * demand.weight
            crossing[link].append(number)
    link_levels = {link: left[link] / weights[link] for link in capacities if weights[link]}
    cap_levels = {
        number: Fraction(demand.cap) / demand.weight
        for number, demand in enumerate(demands)
        if demand.cap is not None
    }
    rates: dict[int, Fraction] = {}
    while len(rates) < len(demands):
        level = min([*link_levels.values(), *cap_levels.values()])
        full = [number for number, at in cap_levels.items() if at == level]
        for link, at in link_levels.items():
            if at == level:
                full.extend(crossing[link])
        changed: dict[K, None] = {}
        for number in full:
            if number in rates:
                continue
            demand = demands[number]
            rates[number] = demand.weight * level
            cap_levels.pop(number, None)
            for link, times in demand.uses.items():
                left[link] -= times * rates[number]
                weights[link] -= times * demand.weight
                changed[link] = None
        for link in changed:
            if weights[link]:
                link_levels[link] = left[link] / weights[link]
            else:
                link_levels.pop(link, None)
    return [rates[number] for number in range(len(demands))]


def _alike(demands: Sequence[Demand[K]]) -> bool:
    """True when one level, reached at once, settles all: a lone flow, or equal routes without caps."""
    if len(demands) <= 1:
        return True
    uses = demands[0].uses
    return all(demand.cap is None and demand.uses == uses for demand in demands)


def _alike_rates(capacities: Mapping[K, int], demands: Sequence[Demand[K]]) -> list[Fraction]:
    if not demands:
        return []
    first = demands[0]
    rates = [Fraction(capacities[link], times) for link, times in first.uses.items()]
    if first.cap is not None:
        rates.append(Fraction(first.cap))
    total = min(rates) if len(rates) > 1 else rates[0]
    if len(demands) == 1:
        return [total]
    level = total / sum(demand.weight for demand in demands)
    return [level if demand.weight == 1 else level * demand.weight for demand in demands]
