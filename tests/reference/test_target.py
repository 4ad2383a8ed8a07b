"""A rollout rank's bytes: where an update is written, in what order, and what it never reaches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from weightsync.reference.buckets import DELTA, END, Heading, abort_bucket
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.reference.steps import Touched, run
from weightsync.reference.target import Target
from weightsync.testing.byhand import Update, admit, deliver
from weightsync.testing.twosides import TwoSides, cut_map, random_state

A = ParamMeta("a", torch.bfloat16, (4, 6))
B = ParamMeta("b", torch.float32, (20,))
HUGE = 1 << 31


def sides_of(*metas: ParamMeta, bucket_bytes: int = 110) -> TwoSides:
    """One trainer rank, one rollout rank, nothing cut."""
    maps = {f"p{number}": cut_map(meta, number, None, 0, 1) for number, meta in enumerate(metas)}
    return TwoSides(metas, [maps], [maps], bucket_bytes, HUGE, random_state(metas, 0))


def pending() -> tuple[Update, Target]:
    """Both sides at version 1, and a delta of several buckets to version 2."""
    sides = sides_of(A, B)
    (target,) = sides.targets()
    deliver(target, sides.full())
    run(target.commit())
    sides.train([[(position, 1) for position in (1, 5, 6, 11)], [(2, 1), (9, 1)]])
    return sides.delta(), target


def test_decoding_tells_trailers_from_buckets() -> None:
    update, target = pending()
    first, last = run(target.decode(update.buckets[0])), run(target.decode(update.buckets[-1]))
    assert (first.kind, first.end, first.aborted) == (DELTA, None, None)
    assert first.nnz == sum(one.spec.count for one in first.ranges) > 0
    assert first.nbytes == update.buckets[0].nbytes
    assert last.kind == END
    assert last.end is not None
    assert last.end.digest == update.digest
    assert last.nnz == 0
    aborted = run(target.decode(abort_bucket(Heading(DELTA, 1, 1, 2), "trainer.1: out of memory")))
    assert aborted.aborted == "trainer.1: out of memory"


def test_steps_say_what_they_touch_at_their_pause() -> None:
    update, target = pending()
    decoded = next(admit(target, update))
    step = target.apply(decoded, undo=True)
    assert next(step).writes == ("weights",)
    with pytest.raises(StopIteration) as done:
        next(step)
    assert next(target.rollback()) == Touched(done.value.value, writes=("weights",))
    assert next(target.digest()) == Touched(A.nbytes + B.nbytes, reads=("weights",))


def test_half_of_an_apply_is_written_before_its_pause() -> None:
    sides = sides_of(A, bucket_bytes=1 << 20)
    (target,) = sides.targets()
    update = sides.full()
    decoded = next(admit(target, update))
    next(target.apply(decoded, undo=False))
    found = int_view(target.weights["p0"])
    expected = int_view(sides.state[0])
    assert torch.equal(found[:12], expected[:12])
    assert bool((found[12:] == 42).all())


@pytest.mark.parametrize("arrange", ["transposed", "stepped"])
def test_weights_of_any_strides_are_written_in_place(arrange: str) -> None:
    """A rollout may store a weight transposed."""
    sides = sides_of(A)
    if arrange == "transposed":
        weight = torch.zeros(6, 4, dtype=torch.bfloat16).t()
    else:
        weight = torch.zeros(4, 12, dtype=torch.bfloat16)[:, ::2]
    target = Target(sides.metas, sides.rollout[0], {"p0": weight})
    deliver(target, sides.full())
    assert same_bits(weight.contiguous(), sides.state[0])
    run(target.commit())
    before = target.snapshot_bits()
    sides.train([[(0, 1), (7, 1), (23, 1)]])
    deliver(target, sides.delta())
    sides.expect([target])
    run(target.rollback())
    assert torch.equal(target.snapshot_bits()["p0"], before["p0"])


def test_a_tensor_parallel_rank_writes_its_rows_only() -> None:
    maps = [{"p0": cut_map(A, 0, 1, rank, 2)} for rank in (0, 1)]
    sides = TwoSides(
        (A,), [{"p0": cut_map(A, 0, None, 0, 1)}], list(maps), 1 << 20, HUGE, random_state((A,), 0)
    )
    targets = sides.targets()
    for target in targets:
        assert deliver(target, sides.full()) == A.nbytes // 2
        run(target.commit())
    sides.train([[(0, 1), (3, 1), (4, 1)]])
    update = sides.delta()
    assert [deliver(target, update) for target in targets] == [2, 4]
    sides.expect(targets)


def test_positions_count_from_the_base_of_their_piece() -> None:
    maps = {"p0": cut_map(A, 0, None, 0, 1)}
    sides = TwoSides((A,), [maps], [maps], 1 << 20, 12, random_state((A,), 0))
    (target,) = sides.targets()
    deliver(target, sides.full())
    run(target.commit())
    sides.train([[(3, 1), (15, 1), (23, 1)]])
    update = sides.delta()
    assert update.counts == (1, 2)
    assert deliver(target, update) == 3 * A.itemsize
    sides.expect([target])


def test_two_mapped_names_of_one_storage_are_one() -> None:
    """Also when nobody said that they are tied."""
    sides = sides_of(A, bucket_bytes=1 << 20)
    maps = {**sides.rollout[0], "head": cut_map(A, 0, None, 0, 1)}
    weight = torch.zeros(4, 6, dtype=torch.bfloat16)
    target = Target(sides.metas, maps, {"p0": weight, "head": weight})
    assert deliver(target, sides.full()) == A.nbytes
    assert run(target.digest()) == sides.digest()


@pytest.mark.parametrize("separate", [False, True])
def test_a_tied_name_is_updated_whether_or_not_it_shares_storage(separate: bool) -> None:
    sides = sides_of(A, bucket_bytes=1 << 20)
    weights: dict[str, Tensor] = {"p0": torch.zeros(4, 6, dtype=torch.bfloat16)}
    weights["head"] = torch.ones(4, 6, dtype=torch.bfloat16) if separate else weights["p0"]
    target = Target(sides.metas, sides.rollout[0], weights, {"head": "p0"})
    assert deliver(target, sides.full()) == (2 if separate else 1) * A.nbytes
    assert same_bits(weights["head"], weights["p0"])
    assert run(target.digest()) == sides.digest()
    run(target.commit())
    sides.train([[(0, 1)]])
    deliver(target, sides.delta())
    assert same_bits(weights["head"], weights["p0"])
    if separate:
        weights["head"][2] = 9.0
        assert run(target.digest(afresh=True)) != sides.digest()


def test_a_tied_name_with_a_map_of_its_own_counts_once_in_the_digest() -> None:
    """A rollout may pad its head otherwise than its embedding."""
    sides = sides_of(A)
    maps = {**sides.rollout[0], "head": cut_map(A, 0, None, 0, 1)}
    weights = {name: torch.zeros(4, 6, dtype=torch.bfloat16) for name in maps}
    target = Target(sides.metas, maps, weights, {"head": "p0"})
    deliver(target, sides.full())
    assert same_bits(weights["head"], weights["p0"])
    assert run(target.digest()) == sides.digest()


def test_what_is_committed_is_not_rolled_back() -> None:
    update, target = pending()
    deliver(target, update)
    assert target.undo_bytes > 0
    run(target.commit())
    run(target.commit())
    held = target.snapshot_bits()
    assert target.undo_bytes == 0
    assert run(target.rollback()) == 0
    assert all(torch.equal(bits, held[name]) for name, bits in target.snapshot_bits().items())
    assert run(target.digest()) == update.digest


def test_weights_that_no_update_reaches_are_named() -> None:
    weights = {"p0": torch.zeros(4, 6, dtype=torch.bfloat16), "rope.inv_freq": torch.ones(4)}
    target = Target((A,), {"p0": cut_map(A, 0, None, 0, 1)}, weights)
    assert target.unsent == ("rope.inv_freq",)


@pytest.mark.parametrize(
    ("weights", "aliases", "said"),
    [
        ({}, {}, "weight 'p0' is missing, its map expects torch.bfloat16"),
        ({"p0": torch.zeros(4, 6)}, {}, r"weight 'p0' is torch.float32 \[4, 6\], its map expects"),
        ({"p0": torch.zeros(6, 4, dtype=torch.bfloat16)}, {}, r"torch.bfloat16 \[6, 4\], its map expects"),
        (
            {"p0": torch.zeros(4, 6, dtype=torch.bfloat16)},
            {"head": "p9"},
            "'head' is tied to 'p9', which has no",
        ),
    ],
    ids=["missing", "dtype", "shape", "alias"],
)
def test_weights_that_do_not_fit_their_maps_are_refused(
    weights: dict[str, Tensor], aliases: dict[str, str], said: str
) -> None:
    with pytest.raises(PlanMismatch, match=said):
        Target((A,), {"p0": cut_map(A, 0, None, 0, 1)}, weights, aliases)
