"""Fault case 008: offsets by floor division of shards that are cut by ceiling division."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.layouts import cut_part, plain, row_map
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.reshard import reshard
from weightsync.reference.shards import parts, segments, take
from weightsync.reference.sides import gather
from weightsync.reference.steps import run
from weightsync.testing.byhand import deliver
from weightsync.testing.twosides import TwoSides, cut_map

CUT = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0})
EXAMPLES = [(7, 3, [3, 3, 1], [0, 3, 6]), (2, 4, [1, 1, 0, 0], [0, 1, 2, 2])]


@pytest.mark.parametrize(("length", "world", "lengths", "offsets"), EXAMPLES)
def test_offsets_are_sums_of_the_real_lengths(
    length: int, world: int, lengths: list[int], offsets: list[int]
) -> None:
    """Fault case 008: the fault says 0, 2, 4 for seven elements over three ranks."""
    held = [segments(length, world, rank)[0] for rank in range(world)]
    assert [start for start, _ in held] == offsets
    assert [end - start for start, end in held] == lengths
    floor = [rank * (length // world) for rank in range(world)]
    assert floor != offsets


@pytest.mark.parametrize(("length", "world", "lengths", "offsets"), EXAMPLES)
def test_local_positions_become_global_ones_and_an_empty_rank_has_none(
    length: int, world: int, lengths: list[int], offsets: list[int]
) -> None:
    """Fault case 008: together they are every element once."""
    layout = plain(ParamMeta("w", torch.bfloat16, (length,)))
    told: list[int] = []
    for rank in range(world):
        one = row_map(layout, "w", CUT, rank, world, {"w": 0})
        output, flat = one.to_checkpoint(torch.arange(lengths[rank]))
        assert output.eq(0).all()
        assert flat.tolist() == list(range(offsets[rank], offsets[rank] + lengths[rank]))
        told += flat.tolist()
    assert told == list(range(length))


@pytest.mark.parametrize(("length", "world", "lengths", "offsets"), EXAMPLES)
def test_a_rank_that_holds_nothing_does_not_stop_an_update(
    length: int, world: int, lengths: list[int], offsets: list[int]
) -> None:
    """Fault case 008: a full update and a delta in which every element changes, to ranks cut alike."""
    meta = ParamMeta("w", torch.bfloat16, (length,))
    maps = [{"p0": cut_map(meta, 0, 0, rank, world)} for rank in range(world)]
    sides = TwoSides((meta,), maps, maps, 1 << 20, 1 << 31, [torch.arange(length).to(torch.bfloat16)])
    targets = sides.targets()
    first = sides.full()
    sides.train([[(position, 1) for position in range(length)]])
    second = sides.delta()
    assert [sum(counts) for counts in second.matrix] == lengths
    for update in (first, second):
        for target in targets:
            deliver(target, update)
            run(target.commit())
    sides.expect(targets)


@given(data=st.data(), worlds=st.tuples(st.integers(1, 8), st.integers(1, 8)), length=st.integers(0, 20))
def test_shards_of_any_lengths_gather_reshard_and_tell_by_their_real_offsets(
    data: st.DataObject, worlds: tuple[int, int], length: int
) -> None:
    """Fault case 008: also lengths that no division gives, and empty ranks anywhere."""
    cuts = []
    for world in worlds:
        ends = sorted(data.draw(st.lists(st.integers(0, length), min_size=world - 1, max_size=world - 1)))
        counts = [end - start for start, end in zip([0, *ends], [*ends, length], strict=True)]
        cuts.append(parts((length, 2), world, 0, blocks=[counts]))
    full = torch.arange(2 * length).reshape(length, 2)
    shards = [CUT.stamp(take(full, part)) for part in cuts[0]]
    assert torch.equal(gather("w", shards), full)
    assert torch.equal(torch.cat(reshard(shards, *cuts)), full)
    layout = plain(ParamMeta("w", full.dtype, full.shape))
    told = [
        cut_part(layout, "w", {"w": 0}, part).to_checkpoint(torch.arange(part.numel))[1] for part in cuts[0]
    ]
    assert torch.equal(torch.cat(told), torch.arange(2 * length))
