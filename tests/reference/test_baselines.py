"""Every baseline tells a change that leads the receivers to the trainer's bits, after failures too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.baselines import DirtyBaseline, ShardsBaseline, WholeBaseline, make_baseline
from weightsync.reference.dirty import DirtyBits
from weightsync.reference.errors import PlanMismatch, StaleVersion
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.testing.byhand import deliver, make_update
from weightsync.testing.twosides import TwoSides, cut_map, flips, random_state, two_sides

KINDS = ("whole", "shards", "dirty", "dirty with old bits")
W = ParamMeta("w", torch.bfloat16, (6, 8))


def give(sides: TwoSides, kind: str) -> list[DirtyBits]:
    """Put sources of this kind of baseline into ``sides``; the dirty bits of each rank, where they have any."""
    bits = [DirtyBits(params, kind.endswith("old bits")) for params in sides.live] if "dirty" in kind else []
    for rank, source in enumerate(sides.sources):
        baseline = make_baseline(kind.split()[0], sides.plan.maps[rank], bits[rank] if bits else None)
        sides.sources[rank] = Source(sides.plan, rank, source.params, baseline)
    return bits


def train(sides: TwoSides, bits: list[DirtyBits], chosen: list[list[tuple[int, int]]]) -> None:
    """Change the state, and each rank's parameters through its dirty bits where it has them."""
    if not bits:
        sides.train(chosen)
        return
    for tensor, some in zip(sides.state, chosen, strict=True):
        for position, mask in some:
            int_view(tensor)[position] ^= mask
    for maps, one in zip(sides.trainer, bits, strict=True):
        for name, shard in sides.shards(maps).items():
            one.write(name, shard)


def one_tensor() -> TwoSides:
    maps = [{"p0": cut_map(W, 0, None, 0, 1)}]
    return TwoSides((W,), list(maps), list(maps), 1 << 20, 1 << 31, random_state((W,), 0))


@given(sides=two_sides(), kind=st.sampled_from(KINDS), data=st.data())
def test_every_baseline_leads_the_receivers_to_the_trainers_bits_over_failures(
    sides: TwoSides, kind: str, data: st.DataObject
) -> None:
    bits, targets = give(sides, kind), sides.targets()
    full = sides.full()
    for target in targets:
        deliver(target, full)
        run(target.commit())
    held, slot = 1, 1
    for version in range(2, 6):
        train(sides, bits, data.draw(flips(sides=sides)))
        if data.draw(st.booleans()):  # the snapshot itself is abandoned half-way, then the push is tried anew
            for source in sides.sources:
                torn = source.snapshot(slot)
                next(torn)
                torn.close()
        update = make_update(
            sides.plan, sides.sources, slot=slot, base_slot=1 - slot, version=version, base=held
        )
        assert update.digest == sides.digest()
        if data.draw(st.booleans()):  # the push fails: its slot is written again, and its base stays
            continue
        for target in targets:
            deliver(target, update)
            run(target.commit())
        sides.expect(targets)
        held, slot = version, 1 - slot


@given(sides=two_sides(), kind=st.sampled_from(("shards", "dirty with old bits")), data=st.data())
def test_exact_baselines_tell_what_two_whole_copies_tell(
    sides: TwoSides, kind: str, data: st.DataObject
) -> None:
    whole = [Source(sides.plan, rank, params) for rank, params in enumerate(sides.live)]
    bits = give(sides, kind)
    for slot in (0, 1, 0):
        for source in (*whole, *sides.sources):
            run(source.snapshot(slot))
        train(sides, bits, data.draw(flips(sides=sides)))
    for source in (*whole, *sides.sources):
        run(source.snapshot(1))
    for one, other in zip(whole, sides.sources, strict=True):
        expected, found = run(one.diff(1, 0)), run(other.diff(1, 0))
        assert found.counts == expected.counts
        assert found.digest_change == expected.digest_change
        for piece, columns in expected.patches.items():
            for left, right in zip(columns, found.patches[piece], strict=True):
                assert left is not None
                assert right is not None
                assert torch.equal(left, right)
        assert run(other.digest(1)) == run(other.digest(1, afresh=True)) == run(one.digest(1))


def test_shards_keep_nothing_of_what_another_rank_tells() -> None:
    maps = [{"p0": cut_map(W, 0, None, rank, 2)} for rank in (0, 1)]
    alone = [{"p0": cut_map(W, 0, None, 0, 1)}]
    sides = TwoSides((W,), list(maps), list(alone), 1 << 20, 1 << 31, random_state((W,), 0))
    give(sides, "shards")
    for source in sides.sources:
        run(source.snapshot(0))
        run(source.snapshot(1))
    owned = [sides.plan.owned(rank, 0) * W.itemsize for rank in (0, 1)]
    assert sum(owned) == W.nbytes
    assert [source.baseline.nbytes for source in sides.sources] == [2 * n for n in owned]


def test_dirty_bits_keep_one_copy_and_a_bit_per_element() -> None:
    sides = one_tensor()
    give(sides, "dirty")
    source = sides.sources[0]
    run(source.snapshot(0))
    assert source.baseline.nbytes == W.nbytes + W.numel // 8
    run(source.snapshot(1))
    assert source.baseline.nbytes == W.nbytes + 2 * W.numel // 8


def test_a_write_past_the_hook_is_missed_by_the_marks_and_shown_by_the_digest() -> None:
    sides = one_tensor()
    give(sides, "dirty")
    source = sides.sources[0]
    run(source.snapshot(0))
    first = run(source.digest(0))
    sides.train([[(3, 1)]])
    run(source.snapshot(1))
    assert run(source.diff(1, 0)).nnz == 0
    assert run(source.digest(1)) == sides.digest() != first


def test_the_first_write_decides_which_old_bits_count() -> None:
    sides = one_tensor()
    bits = give(sides, "dirty with old bits")
    source, before = sides.sources[0], int_view(sides.state[0]).clone()
    run(source.snapshot(0))
    for mask in (1, 2):
        train(sides, bits, [[(5, mask)]])
    train(sides, bits, [[(6, 4)]])
    train(sides, bits, [[(6, 4)]])
    run(source.snapshot(1))
    positions, new, old = run(source.diff(1, 0)).patches[0]
    assert positions.tolist() == [5]
    assert old is not None
    assert old.tolist() == [before[5].item()]
    assert new.tolist() == [before[5].item() ^ 3]


def test_marking_everything_is_a_superset() -> None:
    sides = one_tensor()
    (bits,) = give(sides, "dirty")
    source = sides.sources[0]
    run(source.snapshot(0))
    bits.mark_all("p0")
    run(source.snapshot(1))
    assert run(source.diff(1, 0)).nnz == W.numel


def test_what_a_baseline_allows_is_data() -> None:
    sides = one_tensor()
    maps, params = sides.plan.maps[0], sides.live[0]
    made = [WholeBaseline(maps), ShardsBaseline(maps), DirtyBaseline(maps, DirtyBits(params))]
    assert [one.traits.encodings for one in made] == [
        ("raw", "xor", "step"),
        ("raw", "xor", "step"),
        ("raw",),
    ]
    assert [one.traits.exact for one in made] == [True, True, False]
    assert [one.traits.digest_in_changed for one in made] == [True, True, False]
    assert DirtyBaseline(maps, DirtyBits(params, record_old=True)).traits.encodings == ("raw", "xor", "step")


def _other_dtype(sides: TwoSides) -> object:
    params = {"p0": sides.live[0]["p0"].float()}
    return DirtyBaseline(sides.plan.maps[0], DirtyBits(params, record_old=True))


def _stale(sides: TwoSides) -> object:
    give(sides, "dirty")
    run(sides.sources[0].snapshot(0))
    run(sides.sources[0].snapshot(1))
    return sides.sources[0].held(0)


@pytest.mark.parametrize(
    ("wrong", "error", "sentence"),
    [
        (lambda s: make_baseline("dirty", s.plan.maps[0]), PlanMismatch, "was given no dirty bits"),
        (
            lambda s: make_baseline("whole", s.plan.maps[0], DirtyBits({})),
            PlanMismatch,
            "which it would ignore",
        ),
        (lambda s: make_baseline("most", s.plan.maps[0]), PlanMismatch, "'most' is unknown"),
        (lambda s: DirtyBaseline(s.plan.maps[0], DirtyBits({})), PlanMismatch, "dirty bits: none"),
        (_other_dtype, PlanMismatch, "record no old bits"),
        (_stale, StaleVersion, "slot 0 holds no copy"),
        (lambda s: DirtyBits(s.live[0]).write("q", s.state[0]), PlanMismatch, "'q' has no dirty bits"),
        (
            lambda s: DirtyBits(s.live[0]).write("p0", s.state[0][0]),
            PlanMismatch,
            "write the whole parameter",
        ),
        (
            lambda s: DirtyBits(s.live[0]).mark("p0", s.state[0].float(), s.state[0]),
            PlanMismatch,
            "after the cast",
        ),
        (lambda s: DirtyBits(s.live[0], True).mark_all("p0"), PlanMismatch, "old bits are to be recorded"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    wrong: Callable[[TwoSides], object], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        wrong(one_tensor())
