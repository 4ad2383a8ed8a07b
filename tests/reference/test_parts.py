"""What a rank holds: uneven, packed and nested cuts, and DTensor's, which torch itself cuts for comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import same_bits
from weightsync.reference.shards import Part, chunks, parts, segments, take
from weightsync.testing.cuts import cut_shapes, part_lists

MESH = (2, 3)
RANKS = [(dp, tp) for dp in range(MESH[0]) for tp in range(MESH[1])]


@pytest.fixture(params=RANKS, ids=str)
def mesh(request: pytest.FixtureRequest) -> Iterator[tuple[DeviceMesh, int, int]]:
    """One rank's mesh of a process group that sends nothing, with its coordinates (dp, tp)."""
    dp, tp = request.param
    dist.init_process_group("fake", rank=RANKS.index((dp, tp)), world_size=len(RANKS), store=FakeStore())
    try:
        yield init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp")), dp, tp
    finally:
        dist.destroy_process_group()


def as_torch_cuts(mesh: DeviceMesh, placements: Sequence[Placement], part: Part, full: Tensor) -> None:
    """torch's own shard, local shape and offset are ours."""
    theirs = distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()
    assert same_bits(theirs, take(full, part))
    shape, offset = compute_local_shape_and_global_offset(full.shape, mesh, placements)
    assert tuple(shape) == part.local_shape
    if part.numel:
        assert tuple(offset) == tuple(held[0][0] for held in part.held)


@pytest.mark.parametrize("dims", [(0, 0), (0, 1), (1, 0), (1, 1), (2, 1), (None, 1), (2, None)], ids=str)
def test_dtensor_cuts_one_mesh_dimension_within_the_other(
    mesh: tuple[DeviceMesh, int, int], dims: tuple[int | None, int | None]
) -> None:
    """Every length from 0 to 9, so uneven shards within uneven shards and empty ranks occur."""
    for length in range(10):
        full = torch.arange(length * length * 2).reshape(length, length, 2)
        part = Part.whole(full.shape)
        for dim, rank, world in zip(dims, mesh[1:], MESH, strict=True):
            part = part if dim is None else part.cut(dim, rank, world)
        placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
        as_torch_cuts(mesh[0], placements, part, full)


def test_strided_sharding_is_the_tensor_parallel_cut_first_and_then_fsdp(
    mesh: tuple[DeviceMesh, int, int],
) -> None:
    """FSDP2 over tensor parallelism on one dimension: the mesh is (dp, tp), the order of cuts is tp, dp."""
    _, dp, tp = mesh
    for length in range(20):
        full = torch.arange(length)
        placements = [_StridedShard(0, split_factor=MESH[1]), Shard(0)]
        as_torch_cuts(
            mesh[0], placements, Part.whole((length,)).cut(0, tp, MESH[1]).cut(0, dp, MESH[0]), full
        )
        blocks = [chunks(block, MESH[0]) for block in chunks(length, MESH[1])]
        left_to_right = Part.whole((length,)).cut(0, dp, MESH[0], blocks=blocks).cut(0, tp, MESH[1])
        as_torch_cuts(mesh[0], placements, left_to_right, full)


def test_the_two_orders_of_nesting_differ() -> None:
    """A wrong order keeps every shape and swaps shards; only the places tell."""
    tp_first = Part.whole((8,)).cut(0, 1, 2).cut(0, 0, 2)
    dp_first = Part.whole((8,)).cut(0, 0, 2).cut(0, 1, 2)
    assert tp_first.local_shape == dp_first.local_shape
    assert (tp_first.held, dp_first.held) == ((((4, 6),),), (((2, 4),),))


@given(shape=cut_shapes(), data=st.data())
def test_all_ranks_together_hold_everything_and_without_replicas_once(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    held = data.draw(part_lists(shape=shape, replicas=False))
    full = torch.arange(math.prod(shape)).reshape(shape)
    seen = torch.cat([take(full, part).reshape(-1) for part in held])
    assert torch.equal(seen.sort().values, full.reshape(-1))
    assert sum(part.numel for part in held) == full.numel()


@given(length=st.integers(0, 40), world=st.integers(1, 8))
def test_chunks_are_those_of_torch_chunk_and_offsets_come_from_their_sizes(length: int, world: int) -> None:
    counts = chunks(length, world)
    theirs = [len(chunk) for chunk in torch.arange(length).chunk(world)]
    assert list(counts) == theirs + [0] * (world - len(theirs))
    starts = [segments(length, world, rank)[0][0] for rank in range(world)]
    assert starts == [sum(counts[:rank]) for rank in range(world)]


def test_a_stride_is_equal_blocks_and_sizes_are_blocks_of_equal_parts() -> None:
    assert parts((12,), 2, 0, stride=3) == parts((12,), 2, 0, blocks=[(2, 2)] * 3)
    assert parts((12,), 2, 0, sizes=(1, 2, 3)) == parts((12,), 2, 0, blocks=[(1, 1), (2, 2), (3, 3)])
    assert parts((7,), 3, 0) == parts((7,), 3, 0, blocks=[(3, 3, 1)])
    assert parts((12,), 2, 0, stride=5, sizes=(1, 2, 3)) == parts((12,), 2, 0, sizes=(1, 2, 3))


def test_packed_blocks_may_be_cut_in_uneven_parts() -> None:
    """Three query heads and one key head over two ranks, the key head on the first alone."""
    first, second = parts((4,), 2, 0, blocks=[(2, 1), (1, 0)])
    assert (first.held, second.held) == ((((0, 2), (3, 4)),), (((2, 3),),))


def test_expert_shards_cut_again_along_another_dimension() -> None:
    """Grouped experts (experts, 2 ffn, hidden): by expert, then gate and up of each by ffn, then by hidden."""
    part = Part.whole((4, 8, 6)).cut(0, 1, 2).cut(1, 1, 2, stride=2).cut(-1, 0, 4)
    assert part.held == (((2, 4),), ((2, 4), (6, 8)), ((0, 2),))
    assert part.local_shape == (2, 4, 2)


def test_a_cut_within_several_intervals_crosses_their_ends() -> None:
    gated = Part.whole((16,)).cut(0, 0, 2, stride=2)
    assert gated.held == (((0, 4), (8, 12)),)
    assert [gated.cut(0, rank, 3).held[0] for rank in range(3)] == [((0, 3),), ((3, 4), (8, 10)), ((10, 12),)]


def test_parts_that_hold_the_same_are_equal() -> None:
    assert Part((4,), (((0, 2), (2, 2), (2, 4)),)) == Part.whole((4,))
    assert Part((4,), (((2, 4), (0, 2)),)) != Part.whole((4,))
    assert torch.equal(take(torch.arange(4), Part((4,), (((2, 4), (0, 2)),))), torch.tensor([2, 3, 0, 1]))


@pytest.mark.parametrize("held", [((0, 2), (1, 3)), ((0, 5),), ((-1, 2),), ((2, 1),)], ids=str)
def test_intervals_that_overlap_or_leave_the_dimension_are_refused(held: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(PlanMismatch, match="of dimension 0 overlap or leave its 4 elements"):
        Part((4,), (held,))


def test_cuts_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanMismatch, match="intervals of 1 dimensions, expected 2"):
        Part((4, 2), (((0, 4),),))
    with pytest.raises(PlanMismatch, match=r"dimension 2 of full shape \[4, 2\]"):
        Part.whole((4, 2)).cut(2, 0, 1)
    with pytest.raises(PlanMismatch, match="dimension 0 of full shape"):
        Part.whole(()).cut(0, 0, 1)
    for blocks in ([(2, 1)], [(4,)], [(5, -1)]):
        with pytest.raises(PlanMismatch, match="expected 4 and 2 counts in each"):
            Part.whole((4,)).cut(0, 0, 2, blocks=blocks)
    with pytest.raises(PlanMismatch, match=r"3 elements does not divide by 2 ranks \* partition_stride 2"):
        Part.whole((6,)).cut(0, 0, 2).cut(0, 0, 2, stride=2)
    with pytest.raises(PlanMismatch, match=r"shape \[4\] cannot be taken of a tensor of shape \[2, 2\]"):
        take(torch.zeros(2, 2), Part.whole((4,)))
