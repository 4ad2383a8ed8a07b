"""Routes: which rollout ranks hold exactly the same, and what the lead sends to them. Pure data, no weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weightsync.reference.buckets import BucketSpec
from weightsync.reference.cuts import cut_buckets
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.holdings import Holding
from weightsync.reference.members import RankId
from weightsync.reference.pieces import Piece
from weightsync.reference.plan import GatherGroup, TransferPlan
from weightsync.reference.rowmap import RowMap


@dataclass(frozen=True, eq=False)
class Route:
    """One way out of the lead: rollout ranks, of any rollouts, that are sent the same buckets.

    Attributes:
        number: its index among the routes.
        ranks: the rollout ranks, in order.
        holding: what they hold, and so what they are sent.
        plan: the transfer plan.
        before: per piece of the plan, elements that earlier routes hold of it; only estimates use it.
    """

    number: int
    ranks: tuple[RankId, ...]
    holding: Holding
    plan: TransferPlan
    before: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """True when its buckets are in checkpoint coordinates: they name every element that travels."""
        return self.holding.is_whole

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Per piece of the plan, its window of the slice; empty where nothing of the piece is held."""
        return tuple(map(self._piece, self.plan.pieces))

    def cuts(self, group: GatherGroup, counts: Sequence[int]) -> tuple[BucketSpec, ...]:
        """How what is sent of a gather group is cut; ``counts`` are its elements, per piece of the group.

        A piece travels dense here where it was gathered dense. No bucket when nothing is sent.
        """
        if self.is_whole:
            return group.buckets
        ranges = []
        for number, form, count in zip(group.pieces, group.forms, counts, strict=True):
            if count:
                piece = self.pieces[number]
                itemsize = self.holding.tensors[piece.tensor].itemsize
                ranges.append(self.plan.range_of(piece, form, count, itemsize))
        return cut_buckets(ranges, self.holding.tensors, self.plan.bucket_bytes)

    def estimate(self, group: GatherGroup, counts: Sequence[int]) -> tuple[int, ...]:
        """Elements sent of each piece of a group, if ``counts`` changed, per piece of the group, and are spread evenly.

        Exact for dense pieces. Routes that share a tensor out between them are given shares that add up.
        """
        found = []
        for number, dense, count in zip(group.pieces, group.dense, counts, strict=True):
            held, whole, before = (
                self.pieces[number].count,
                self.plan.pieces[number].count,
                self.before[number],
            )
            share = (before + held) * count // max(1, whole) - before * count // max(1, whole)
            found.append(held if dense else share)
        return tuple(found)

    def _piece(self, piece: Piece) -> Piece:
        cut = self.holding.cuts[piece.tensor]
        if cut is None:
            return piece
        if piece.base == 0 and piece.count == self.plan.tensors[piece.tensor].numel:
            return Piece(piece.tensor, 0, cut.numel)
        base, end = cut.before(piece.base), cut.before(piece.base + piece.count)
        return Piece(piece.tensor, base, end - base)


def one_route(plan: TransferPlan, ranks: Iterable[RankId]) -> tuple[Route, ...]:
    """Everybody is sent everything."""
    return (Route(0, tuple(ranks), Holding.whole(plan.tensors), plan, (0,) * len(plan.pieces)),)


def owned_routes(plan: TransferPlan, maps: Mapping[RankId, Iterable[RowMap]]) -> tuple[Route, ...]:
    """Ranks that hold the same elements share a route, on which only those travel.

    Args:
        plan: the transfer plan.
        maps: of every rollout rank, all its maps.
    """
    holdings: dict[bytes, Holding] = {}
    ranks: dict[bytes, list[RankId]] = {}
    for rank, held in maps.items():
        found = Holding.of(plan.tensors, held)
        holdings.setdefault(found.key, found)
        ranks.setdefault(found.key, []).append(rank)
    routes: list[Route] = []
    before = (0,) * len(plan.pieces)
    for number, (key, holding) in enumerate(holdings.items()):
        routes.append(Route(number, tuple(ranks[key]), holding, plan, before))
        before = tuple(n + piece.count for n, piece in zip(before, routes[-1].pieces, strict=True))
    return tuple(routes)


def choose_routes(
    plan: TransferPlan, route: str, owned: Sequence[Route] | None, ranks: Sequence[RankId]
) -> tuple[Route, ...]:
    """The routes that a trainer goes by: one to everybody, or the owned ones.

    Raises:
        PlanMismatch: owned routes were given without being asked for, or the other way round, or one of the rollout
        ranks is not on exactly one of them.
    """
    if route not in ("all", "owned"):
        raise PlanMismatch(f"route is {route!r}, expected 'all' or 'owned'; correct the settings")
    if (route == "owned") != (owned is not None):
        given = "none were" if owned is None else f"{len(owned)} owned ones were"
        raise PlanMismatch(
            f"route is {route!r}, and of routes {given} given; expected routes with 'owned' and only then: pass "
            "owned_routes(plan, maps of every rollout rank)"
        )
    if owned is None:
        return one_route(plan, ranks)
    reached = Counter(rank for one in owned for rank in one.ranks)
    for rank in ranks:
        if reached[rank] != 1:
            raise PlanMismatch(
                f"{rank} is on {reached[rank]} routes, expected exactly one; make the routes from the maps of every "
                "rollout rank"
            )
    return tuple(owned)
