"""A rollout rank's bytes: what it refuses, in what order it writes, and where."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from weightsync.reference.buckets import (
    DELTA,
    END,
    FULL,
    Bucket,
    Heading,
    Range,
    RangeSpec,
    abort_bucket,
    end_bucket,
    pack_bucket,
)
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch, PlanMismatch, StaleVersion
from weightsync.reference.params import ParamMeta, int_view, same_bits
from weightsync.reference.steps import Touched, run
from weightsync.reference.target import Decoded, Target
from weightsync.testing.byhand import Update, admit, deliver
from weightsync.testing.twosides import TwoSides, cut_map, random_state

A = ParamMeta("a", torch.bfloat16, (4, 6))
B = ParamMeta("b", torch.float32, (20,))
HUGE = 1 << 31
ONE_EACH = [[(position, 1) for position in (1, 5, 6, 11)], [(2, 1), (9, 1)]]


def sides_of(*metas: ParamMeta, bucket_bytes: int = 110) -> TwoSides:
    """One trainer rank, one rollout rank, nothing cut."""
    maps = {f"p{number}": cut_map(meta, number, None, 0, 1) for number, meta in enumerate(metas)}
    return TwoSides(metas, [maps], [maps], bucket_bytes, HUGE, random_state(metas, 0))


def held() -> tuple[TwoSides, Target]:
    """Both sides at version 1, committed."""
    sides = sides_of(A, B)
    (target,) = sides.targets()
    deliver(target, sides.full())
    run(target.commit())
    return sides, target


def pending() -> tuple[Update, Target]:
    """Both sides at version 1, and a delta of several buckets to version 2."""
    sides, target = held()
    sides.train(ONE_EACH)
    update = sides.delta()
    assert len(update.buckets) >= 4
    return update, target


def sparse(*positions: int, tensor: int = 0, sequence: int = 0) -> Bucket:
    """A delta bucket that names these positions of one tensor."""
    meta = (A, B)[tensor]
    bits = int_view(torch.zeros(len(positions), dtype=meta.dtype))
    spec = RangeSpec(tensor, Encoding.INT32, 0, len(positions))
    found = Range(spec, torch.tensor(positions, dtype=torch.int32), bits)
    return pack_bucket(Heading(DELTA, 1, 1, 2, sequence), [found], (A, B))


def dense(base: int, count: int, *, tensor: int = 0, sequence: int = 0, kind: str = FULL) -> Bucket:
    """A bucket with one dense range."""
    bits = int_view(torch.zeros(count, dtype=(A, B)[tensor].dtype))
    found = Range(RangeSpec(tensor, Encoding.DENSE, base, count), None, bits)
    first = 0 if kind == FULL else 1
    return pack_bucket(Heading(kind, 1, first, 2, sequence), [found], (A, B))


def reheaded(bucket: Bucket, **changes: int | str) -> Bucket:
    heading = replace(bucket.header.heading, **changes)  # type: ignore[arg-type]
    return Bucket(replace(bucket.header, heading=heading), bucket.payload)


def offer(target: Target, bucket: Bucket, *, base: int = 1, sequence: int = 0) -> Decoded:
    decoded = run(target.decode(bucket))
    run(target.validate(decoded, version=2, base=base, epoch=1, sequence=sequence))
    return decoded


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"version": 3}, StaleVersion, "bucket is of version 3, expected 2"),
        ({"base": 7}, StaleVersion, "version 2 is made for base version 7, expected 1; send a full update"),
        ({"epoch": 4}, PatchMismatch, "version 2 is of group epoch 4, expected 1"),
        ({"sequence": 1}, PatchMismatch, "version 2 has sequence 1, expected 0"),
    ],
    ids=["version", "base", "epoch", "sequence"],
)
@pytest.mark.parametrize("which", ["bucket", "end", "abort"])
def test_a_header_that_is_not_the_expected_one_is_refused(
    changes: dict[str, int], error: type[Exception], said: str, which: str
) -> None:
    """Trailers are held to the same numbers as buckets."""
    heading = Heading(DELTA, 1, 1, 2, 0)
    made = {
        "bucket": sparse(1),
        "end": end_bucket(heading, 0, 0, 0),
        "abort": abort_bucket(heading, "why"),
    }
    _, target = held()
    before = target.snapshot_bits()
    with pytest.raises(error, match=said):
        offer(target, reheaded(made[which], **changes))
    assert all(torch.equal(bits, before[name]) for name, bits in target.snapshot_bits().items())


@pytest.mark.parametrize(
    ("buckets", "base", "said"),
    [
        ([sparse(1, 24)], 1, "'a' names position 24, expected 0 to 23"),
        ([sparse(1, -1)], 1, "'a' names position -1, expected 0 to 23"),
        ([sparse(3, 3)], 1, "'a' names position 3 after position 3"),
        ([sparse(4, 3)], 1, "'a' names position 3 after position 4"),
        ([sparse(4), sparse(4, sequence=1)], 1, "'a' names position 4 after position 4"),
        ([sparse(4), sparse(2, 5, sequence=1)], 1, "'a' names position 2 after position 4"),
        ([sparse(4), dense(3, 2, sequence=1, kind=DELTA)], 1, "'a' starts at position 3 after .* up to 4"),
        ([dense(0, 12), dense(6, 6, sequence=1)], 0, "'a' starts at position 6 after positions up to 11"),
        ([dense(0, 12), dense(13, 1, sequence=1)], 0, "'a' starts at position 13 .*, expected 12; name each"),
        ([dense(6, 6)], 0, "'a' starts at position 6 after positions up to -1, expected 0"),
    ],
    ids=[
        "beyond",
        "negative",
        "twice",
        "unsorted",
        "twice in two buckets",
        "backwards in two buckets",
        "dense behind sparse",
        "overlap when full",
        "gap when full",
        "late start when full",
    ],
)
def test_positions_that_do_not_continue_the_update_are_refused_before_their_write(
    buckets: Sequence[Bucket], base: int, said: str
) -> None:
    _, target = held()
    for number, bucket in enumerate(buckets[:-1]):
        offer(target, bucket, base=base, sequence=number)
    decoded = run(target.decode(buckets[-1]))
    with pytest.raises(PatchMismatch, match=said):
        run(target.validate(decoded, version=2, base=base, epoch=1, sequence=len(buckets) - 1))
    before = target.snapshot_bits()
    with pytest.raises(PlanMismatch, match="bucket was not validated"):
        run(target.apply(decoded, undo=True))
    assert all(torch.equal(bits, before[name]) for name, bits in target.snapshot_bits().items())


def test_a_refused_bucket_leaves_the_update_where_it_was() -> None:
    update, target = pending()
    first, second = update.buckets[:2]
    offer(target, first)
    with pytest.raises(PatchMismatch):
        offer(target, sparse(0, sequence=1), sequence=1)
    offer(target, second, sequence=1)


def test_a_bucket_left_out_is_refused() -> None:
    update, target = pending()
    with pytest.raises(PatchMismatch, match="bucket 1 of version 2 follows 0 validated buckets"):
        offer(target, update.buckets[1], sequence=1)


def test_the_latest_bucket_may_be_validated_again_and_no_earlier_one() -> None:
    """A verb that failed after it took effect is tried again."""
    update, target = pending()
    for number, bucket in enumerate(update.buckets):
        offer(target, bucket, sequence=number)
        offer(target, bucket, sequence=number)
    with pytest.raises(PatchMismatch, match="expected the next one or the latest again"):
        offer(target, update.buckets[1], sequence=1)


def test_an_update_begins_anew_at_sequence_zero() -> None:
    update, target = pending()
    offer(target, update.buckets[0])
    offer(target, update.buckets[1], sequence=1)
    deliver(target, update)


def without(number: int) -> Callable[[list[Bucket]], list[Bucket]]:
    """The update without one bucket, the others numbered anew, its trailer truthful about what is left."""

    def change(buckets: list[Bucket]) -> list[Bucket]:
        kept = [reheaded(b, sequence=n) for n, b in enumerate(buckets[:number] + buckets[number + 1 : -1])]
        heading = buckets[-1].header.heading
        trailer = end_bucket(heading.at(len(kept)), 0, len(kept), sum(b.nbytes for b in kept))
        return [*kept, trailer]

    return change


@pytest.mark.parametrize("number", [0, 1, -2], ids=["first", "second", "last"])
def test_a_full_update_that_leaves_elements_out_is_refused(number: int) -> None:
    sides = sides_of(A, B)
    (target,) = sides.targets()
    update = sides.full()
    left = without(number % len(update.buckets))(update.buckets)
    with pytest.raises(PatchMismatch, match=r"starts at position|full update ended with \d+ of \d+ elements"):
        list(admit(target, update, left))


def test_a_trailer_that_counts_otherwise_is_refused() -> None:
    update, target = pending()
    heading = update.buckets[-1].header.heading
    with pytest.raises(PatchMismatch, match="trailer announces 9 buckets of 0 bytes, found 0 of 0"):
        offer(target, end_bucket(heading.at(0), 0, 9, 0))
    size = update.buckets[0].nbytes
    offer(target, update.buckets[0])
    with pytest.raises(PatchMismatch, match=f"trailer announces 1 buckets of 1 bytes, found 1 of {size}"):
        offer(target, end_bucket(heading.at(1), 0, 1, 1), sequence=1)


@pytest.mark.parametrize(("kind", "base"), [(FULL, 1), (DELTA, 0)])
def test_a_kind_that_does_not_fit_its_base_is_refused(kind: str, base: int) -> None:
    _, target = held()
    with pytest.raises(PatchMismatch, match=f"is '{kind}' on base version {base}, expected"):
        offer(target, reheaded(dense(0, 1), kind=kind, base=base), base=base)


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
    decoded = offer(target, update.buckets[0])
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
        assert run(target.digest()) != sides.digest()


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
