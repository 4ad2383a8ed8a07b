"""From any cut to any other: the schedule writes every element once, rightly, in few boxes, and only that."""

from __future__ import annotations

import math
from collections import Counter
from itertools import combinations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.reference import shards
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.reshard import Copy, execute, require_complete, reshard, schedule
from weightsync.reference.shards import Part, parts, split, take
from weightsync.testing.cuts import part_lists, two_cuts
from weightsync.testing.strategies import DTYPES, tensors

INTS = (torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64)
dtypes = st.sampled_from((*DTYPES, torch.float64, torch.complex64, *INTS))
Cut = tuple[Part, ...]


@st.composite
def sharded(draw: st.DrawFn) -> tuple[Tensor, list[Tensor], Cut, Cut]:
    """A full tensor, its shards of any strides, how they are cut, and another cut."""
    shape, source, destination = draw(two_cuts())
    full = draw(tensors(dtype=draw(dtypes), shape=shape))
    if full.dtype == torch.bool:
        int_view(full).bitwise_and_(1)  # torch makes no promise for other bytes
    return full, [restrided(draw, picked(full, part)) for part in source], source, destination


def picked(full: Tensor, part: Part) -> Tensor:
    """A shard by plain indexing, for comparison: no code of ours but the intervals."""
    bits = int_view(full).reshape(full.shape)
    for dim, held in enumerate(part.held):
        index = [position for start, end in held for position in range(start, end)]
        bits = bits.index_select(dim, torch.tensor(index, dtype=torch.int64))
    return bits.view(full.dtype)


def restrided(draw: st.DrawFn, tensor: Tensor) -> Tensor:
    """The same bits in memory of another order."""
    order = draw(st.permutations(range(tensor.dim())))
    bits = int_view(tensor).reshape(tensor.shape)
    back = [order.index(dim) for dim in range(tensor.dim())]
    return bits.permute(order).contiguous().permute(back).view(tensor.dtype)


@given(case=sharded())
def test_resharding_gives_what_joining_and_splitting_gives(
    case: tuple[Tensor, list[Tensor], Cut, Cut],
) -> None:
    full, live, source, destination = case
    (whole,) = reshard(live, source, (Part.whole(full.shape),))
    assert same_bits(whole, full)
    made = reshard(live, source, destination)
    for shard, part in zip(made, destination, strict=True):
        assert same_bits(shard, picked(full, part))
        assert same_bits(shard, take(whole, part))
        assert shard.is_contiguous()


@given(case=sharded())
def test_there_and_back_again_changes_nothing(case: tuple[Tensor, list[Tensor], Cut, Cut]) -> None:
    _, live, source, destination = case
    back = reshard(reshard(live, source, destination), destination, source)
    assert all(same_bits(one, other) for one, other in zip(live, back, strict=True))


@given(
    worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    strides=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    units=st.integers(0, 2),
    dim=st.integers(0, 2),
    dtype=dtypes,
)
def test_strided_cuts_tile_by_their_least_common_multiple(
    worlds: tuple[int, int], strides: tuple[int, int], units: int, dim: int, dtype: torch.dtype
) -> None:
    tiles = math.lcm(worlds[0] * strides[0], worlds[1] * strides[1])
    shape = [2, 2, 2]
    shape[dim] = units * tiles
    full = torch.arange(math.prod(shape) * dtype.itemsize).to(torch.uint8).view(dtype).reshape(shape)
    source, destination = (
        parts(shape, world, dim, stride=stride) for world, stride in zip(worlds, strides, strict=True)
    )
    old = [split(full, worlds[0], rank, dim, strides[0]) for rank in range(worlds[0])]
    oracle = shards.reshard(old, dim, worlds[1], stride=strides[0], new_stride=strides[1])
    assert all(
        same_bits(one, other) for one, other in zip(reshard(old, source, destination), oracle, strict=True)
    )
    for copy in schedule(source, destination):
        start, end = copy.put[dim]
        assert (start % units, end % units) == (0, 0)
        # The unit's segment on either side says who has it.
        first = destination[copy.destination].placed[dim]
        (unit,) = {
            (at + start - local) // units for at, to, local in first if local <= start < local + to - at
        }
        assert unit // (tiles // (worlds[0] * strides[0])) % worlds[0] == copy.source


@given(cuts=two_cuts())
def test_every_element_is_written_once_and_none_is_lost(cuts: tuple[tuple[int, ...], Cut, Cut]) -> None:
    _, source, destination = cuts
    copies = schedule(source, destination)
    require_complete(copies, source, destination)
    written = [torch.zeros(part.local_shape, dtype=torch.int64) for part in destination]
    for copy in copies:
        written[copy.destination][tuple(slice(*interval) for interval in copy.put)] += 1
        assert all(0 <= start < end for start, end in copy.put)
    assert all(bool((one == 1).all()) for one in written)
    order = [(copy.destination, copy.put) for copy in copies]
    assert order == sorted(order)
    for rank, part in enumerate(destination):
        assert sum(copy.numel for copy in copies if copy.destination == rank) == part.numel


@given(cuts=two_cuts(replicas=False))
def test_no_two_copies_of_a_pair_of_ranks_could_be_one(cuts: tuple[tuple[int, ...], Cut, Cut]) -> None:
    shape, source, destination = cuts
    copies = schedule(source, destination)
    for one, other in combinations(copies, 2):
        if (one.source, one.destination) == (other.source, other.destination):
            apart = [
                dim
                for dim in range(len(shape))
                if (one.put[dim], one.taken[dim]) != (other.put[dim], other.taken[dim])
            ]
            assert len(apart) != 1 or not all(
                continues(a[apart[0]], b[apart[0]])
                for a, b in ((one.put, other.put), (one.taken, other.taken))
            )
    if len(shape) == 1:
        found = Counter((copy.source, copy.destination) for copy in copies)
        assert found == fewest(source, destination)


def test_intervals_that_follow_each_other_in_both_tensors_are_one_copy() -> None:
    """Whatever gap of the full tensor lies between them."""
    cut = parts((16,), 2, 0, stride=4)
    assert len(cut[0].held[0]) == 4
    assert schedule(cut, cut[:1]) == (Copy(0, 0, ((0, 8),), ((0, 8),)),)


def continues(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[1] == other[0]


def fewest(source: Cut, destination: Cut) -> Counter[tuple[int, int]]:
    """Copies per pair of ranks, by walking over elements one by one."""
    home = {
        position: (rank, local)
        for rank, part in enumerate(source)
        for local, position in enumerate(p for start, end in part.held[0] for p in range(start, end))
    }
    counts: Counter[tuple[int, int]] = Counter()
    for rank, part in enumerate(destination):
        last: dict[int, tuple[int, int]] = {}
        for local, position in enumerate(p for start, end in part.held[0] for p in range(start, end)):
            origin, taken = home[position]
            counts[origin, rank] += last.get(origin) != (taken - 1, local - 1)
            last[origin] = (taken, local)
    return +counts


class Allocations(TorchDispatchMode):
    """Bytes of all storages that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, int] = {}
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        known = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.made[result.untyped_storage().data_ptr()] = result.untyped_storage().nbytes()
            self.kept.append(result)
        return result


def test_no_memory_is_taken_but_the_new_shards() -> None:
    full = torch.arange(48 * 6, dtype=torch.int16).view(torch.bfloat16).reshape(48, 6)
    source, destination = parts((48, 6), 3, 0, stride=4), parts((48, 6), 2, 1)
    live = [take(full, part).t().contiguous().t() for part in source]
    with Allocations() as ours:
        reshard(live, source, destination)
    assert sum(ours.made.values()) == full.nbytes
    with Allocations() as dense:
        whole = shards.join(live, 0, 4)
        made = [split(whole, 2, rank, 1) for rank in range(2)]
    assert sum(dense.made.values()) == 2 * sum(one.nbytes for one in made)


def test_targets_of_any_strides_are_written_in_place() -> None:
    full = torch.arange(24).reshape(6, 4)
    source, destination = parts((6, 4), 3, 0), parts((6, 4), 2, 1)
    targets = [torch.zeros(2, 6, dtype=torch.int64).t() for _ in destination]
    before = [target.data_ptr() for target in targets]
    execute(schedule(source, destination), [take(full, part) for part in source], targets)
    assert [target.data_ptr() for target in targets] == before
    assert torch.equal(torch.cat(targets, 1), full)


def test_replicas_share_the_work_and_a_rank_that_has_it_takes_its_own() -> None:
    whole = parts((4,), 3, None)
    assert [copy.source for copy in schedule(whole, whole)] == [0, 1, 2]
    assert [copy.source for copy in schedule(whole, parts((4,), 5, None))] == [0, 1, 2, 0, 1]
    assert [copy.put for copy in schedule(whole, parts((4,), 1, None))] == [((0, 4),)]
    pairs = [part for part in parts((4,), 2, 0) for _ in range(2)]
    assert [(one.destination, one.source) for one in schedule(pairs, whole[:2])] == [
        (0, 0),
        (0, 2),
        (1, 1),
        (1, 2),
    ]


def test_ranks_that_hold_some_of_the_same_are_told_by_the_first() -> None:
    """Three key/value heads over two ranks that both hold the middle one."""
    held = [Part((3, 2), (interval, ((0, 2),))) for interval in (((0, 2),), ((1, 3),))]
    (one, two), (three, four) = (
        [copy for copy in schedule(held, parts((3, 2), 2, None)) if copy.destination == rank]
        for rank in range(2)
    )
    assert [(copy.source, copy.put[0]) for copy in (one, two)] == [(0, (0, 2)), (1, (2, 3))]
    assert [(copy.source, copy.put[0]) for copy in (three, four)] == [(0, (0, 1)), (1, (1, 3))]


def test_a_scalar_is_copied_from_one_source() -> None:
    scalars = parts((), 2, None)
    assert schedule(scalars, scalars) == (Copy(0, 0, (), ()), Copy(1, 1, (), ()))
    (made,) = reshard([torch.tensor(2.5)] * 2, scalars, scalars[:1])
    assert same_bits(made, torch.tensor(2.5))


def test_ranks_that_hold_nothing_send_and_get_nothing() -> None:
    source, destination = parts((2,), 4, 0), parts((2,), 2, 0, blocks=[[0, 2]])
    assert [part.local_shape for part in source] == [(1,), (1,), (0,), (0,)]
    made = reshard([torch.tensor([1]), torch.tensor([2]), *[torch.zeros(0).long()] * 2], source, destination)
    assert [shard.tolist() for shard in made] == [[], [1, 2]]
    assert {(copy.source, copy.destination) for copy in schedule(source, destination)} == {(0, 1), (1, 1)}


@given(data=st.data())
def test_ranks_that_overlap_in_any_way_tell_every_element_once(data: st.DataObject) -> None:
    """Boxes that overlap in several dimensions, and one rank that holds all of it."""
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple))
    bounds = [st.tuples(st.integers(0, side), st.integers(0, side)).map(sorted).map(tuple) for side in shape]
    boxes = data.draw(st.lists(st.tuples(*bounds), max_size=4))
    source = [Part(shape, tuple((interval,) for interval in box)) for box in boxes]
    source.insert(data.draw(st.integers(0, len(source))), Part.whole(shape))
    destination = data.draw(part_lists(shape=shape))
    require_complete(schedule(source, destination), source, destination)
    full = torch.arange(math.prod(shape)).reshape(shape)
    made = reshard([take(full, part) for part in source], source, destination)
    assert all(same_bits(one, picked(full, part)) for one, part in zip(made, destination, strict=True))


@given(orders=st.tuples(*[st.permutations([(0, 1), (1, 4), (4, 6), (6, 9)])] * 2))
def test_local_order_is_kept_whatever_it_is(
    orders: tuple[list[tuple[int, int]], list[tuple[int, int]]],
) -> None:
    (source,), (destination,) = ([Part((9,), (tuple(order),))] for order in orders)
    require_complete(schedule([source], [destination]), [source], [destination])
    (made,) = reshard([picked(torch.arange(9), source)], [source], [destination])
    assert torch.equal(made, picked(torch.arange(9), destination))
    assert Counter({(0, 0): len(schedule([source], [destination]))}) == fewest((source,), (destination,))
