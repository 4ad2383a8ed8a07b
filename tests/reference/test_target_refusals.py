"""What a rollout rank refuses before it writes, and what it lets pass again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from weightsync.reference.buckets import (
    DELTA,
    FULL,
    Bucket,
    Heading,
    Range,
    RangeSpec,
    abort_bucket,
    end_bucket,
    pack_bucket,
    seal,
)
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch, PlanMismatch, StaleVersion
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.steps import run
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
    return seal(heading, bucket.header.ranges, bucket.payload, bucket.header.status)


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
