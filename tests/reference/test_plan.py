"""The plan: pure, complete, within its bucket size, and priced to the byte."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from weightsync.reference.buckets import END_BYTES, HEADER_BYTES, TABLE_ENTRY_BYTES, BucketSpec
from weightsync.reference.detect import WIDE
from weightsync.reference.encoding import Encoding, element_bytes, padded
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.layouts import cut, plain, row_map
from weightsync.reference.params import ParamMeta, TPAttributes
from weightsync.reference.plan import TransferPlan
from weightsync.reference.rowmap import RowMap
from weightsync.testing.strategies import param_metas

BF16 = torch.bfloat16
COLUMN = TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1})


def one_rank(metas: tuple[ParamMeta, ...]) -> tuple[tuple[RowMap, ...], ...]:
    numbers = {meta.name: number for number, meta in enumerate(metas)}
    return (tuple(cut(plain(meta), f"p.{meta.name}", numbers) for meta in metas),)


def plan_of(*metas: ParamMeta, bucket_bytes: int = 1 << 20, **options: int) -> TransferPlan:
    return TransferPlan(metas, one_rank(metas), bucket_bytes, **options)


@st.composite
def plans(draw: st.DrawFn) -> TransferPlan:
    metas = draw(st.lists(param_metas(max_side=6), min_size=1, max_size=5, unique_by=lambda meta: meta.name))
    widest = max((meta.shape[-1] if len(meta.shape) > 1 else 1) for meta in metas)
    limit = draw(st.just(WIDE) | st.integers(max(1, widest), 40))
    return plan_of(*metas, bucket_bytes=draw(st.integers(1, 400)), piece_elements=limit)


@st.composite
def plans_and_counts(draw: st.DrawFn) -> tuple[TransferPlan, tuple[int, ...] | None]:
    plan = draw(plans())
    kind = draw(st.sampled_from(["full", "nothing", "some", "everything"]))
    event(f"update: {kind}")
    if kind == "full":
        return plan, None
    if kind == "some":
        return plan, tuple(draw(st.integers(0, piece.count)) for piece in plan.pieces)
    return plan, tuple(piece.count if kind == "everything" else 0 for piece in plan.pieces)


@given(drawn=plans_and_counts())
def test_every_changed_element_travels_exactly_once_and_in_order(
    drawn: tuple[TransferPlan, tuple[int, ...] | None],
) -> None:
    plan, counts = drawn
    sent: dict[int, list[int]] = {}
    for group in plan.groups(counts):
        for number, dense in zip(group.pieces, group.dense, strict=True):
            piece = plan.pieces[number]
            end = piece.base + piece.count
            ranges = [
                one
                for bucket in group.buckets
                for one in bucket.ranges
                if one.tensor == piece.tensor and piece.base <= one.base < max(end, piece.base + 1)
            ]
            ordinals = []
            for one in ranges:
                assert one.encoding is (Encoding.DENSE if dense else Encoding.INT32)
                first = one.base - piece.base if dense else one.first
                ordinals += range(first, first + one.count)
            assert number not in sent
            sent[number] = ordinals
    for number, piece in enumerate(plan.pieces):
        if counts is None or counts[number]:
            dense_bytes = piece.count * plan.tensors[piece.tensor].itemsize
            changed = piece.count if counts is None else counts[number]
            sparse_bytes = changed * (4 + plan.tensors[piece.tensor].itemsize)
            whole = counts is None or dense_bytes <= sparse_bytes
            assert sent.get(number, []) == list(range(piece.count if whole else changed))
        else:
            assert number not in sent
    assert list(sent) == sorted(sent)


@given(drawn=plans_and_counts())
def test_buckets_keep_to_their_size_and_groups_to_whole_pieces(
    drawn: tuple[TransferPlan, tuple[int, ...] | None],
) -> None:
    plan, counts = drawn
    groups = plan.groups(counts)
    assert groups == plan.groups(counts)
    for group in groups:
        assert group.buckets
        assert all(bucket.ranges for bucket in group.buckets)
        if len(group.buckets) > 1:
            assert len(group.pieces) == 1
        for bucket in group.buckets:
            assert bucket == BucketSpec.of(bucket.ranges, plan.tensors)
            single = len(bucket.ranges) == 1 and bucket.ranges[0].count == 1
            assert bucket.nbytes <= plan.bucket_bytes or single
    total = END_BYTES + sum(bucket.nbytes for group in groups for bucket in group.buckets)
    assert plan.update_bytes(counts) == total
    if counts is not None and not any(counts):
        assert groups == ()
        assert total == 88


@given(drawn=plans_and_counts())
def test_no_group_is_closed_early(drawn: tuple[TransferPlan, tuple[int, ...] | None]) -> None:
    plan, counts = drawn
    groups = plan.groups(counts)
    for left, right in pairwise(groups):
        first = right.buckets[0].ranges[0]
        piece = plan.pieces[right.pieces[0]]
        whole = piece.count if right.dense[0] or counts is None else counts[right.pieces[0]]
        size = whole * element_bytes(first.encoding, plan.tensors[first.tensor].itemsize)
        if len(left.buckets) == 1:
            assert left.buckets[0].nbytes + TABLE_ENTRY_BYTES + padded(size) > plan.bucket_bytes


@given(plan=plans())
def test_pieces_cut_tensors_without_gap_between_rows(plan: TransferPlan) -> None:
    for number, meta in enumerate(plan.tensors):
        pieces = [piece for piece in plan.pieces if piece.tensor == number]
        assert [piece.base for piece in pieces] == [
            sum(p.count for p in pieces[:n]) for n in range(len(pieces))
        ]
        assert sum(piece.count for piece in pieces) == meta.numel
        if meta.numel < plan.piece_elements:
            assert len(pieces) == 1
        width = meta.shape[-1] if len(meta.shape) > 1 else 1
        assert all(piece.count <= plan.piece_elements and piece.base % max(width, 1) == 0 for piece in pieces)


def test_a_tensor_beyond_int32_is_planned_on_metadata_alone() -> None:
    huge = ParamMeta("huge", BF16, (70_000, 40_000))
    small = ParamMeta("small", BF16, (9,))
    plan = plan_of(huge, small, bucket_bytes=1 << 30)
    assert huge.numel > WIDE
    rows = WIDE // 40_000
    assert [(piece.tensor, piece.base, piece.count) for piece in plan.pieces] == [
        (0, 0, rows * 40_000),
        (0, rows * 40_000, huge.numel - rows * 40_000),
        (1, 0, 9),
    ]
    changed = (10, 20, 1)
    (group,) = plan.groups(changed)
    (bucket,) = group.buckets
    assert [(one.base, one.count) for one in bucket.ranges] == [(0, 10), (rows * 40_000, 20), (0, 1)]
    assert plan.tensor_counts(changed) == (30, 1)
    full = [one for group in plan.groups(None) for bucket in group.buckets for one in bucket.ranges]
    assert sum(one.count for one in full) == huge.numel + 9
    assert max(one.base + one.count for one in full) == huge.numel
    assert all(bucket.nbytes <= 1 << 30 for group in plan.groups(None) for bucket in group.buckets)


def test_a_row_longer_than_int32_cannot_be_cut() -> None:
    with pytest.raises(PlanMismatch, match=r"'w' \[2, 9\] has rows of 9 elements, expected at most 8"):
        _ = plan_of(ParamMeta("w", BF16, (2, 9)), piece_elements=8).pieces


def test_small_tensors_share_a_bucket_and_a_large_one_has_several() -> None:
    metas = [ParamMeta(name, BF16, (8,)) for name in "abc"] + [ParamMeta("big", BF16, (200,))]
    plan = plan_of(*metas, bucket_bytes=HEADER_BYTES + 2 * (TABLE_ENTRY_BYTES + 16))
    groups = plan.groups(None)
    assert [group.pieces for group in groups] == [(0, 1), (2,), (3,)]
    assert [len(group.buckets) for group in groups] == [1, 1, 7]
    assert [one.base for bucket in groups[2].buckets for one in bucket.ranges] == [*range(0, 200, 32)]


def test_fingerprint_tells_names_dtypes_shapes_and_order() -> None:
    a, b = ParamMeta("a", BF16, (2, 3)), ParamMeta("b", BF16, (4,))
    plans = [
        plan_of(a, b),
        plan_of(b, a),
        plan_of(a),
        plan_of(a, replace(b, name="c")),
        plan_of(a, replace(b, dtype=torch.float16)),
        plan_of(a, replace(b, shape=(2, 2))),
    ]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plan_of(a, b, bucket_bytes=1).fingerprint == plans[0].fingerprint
    assert all(-(1 << 63) <= plan.fingerprint < 1 << 63 for plan in plans)


W = ParamMeta("w", BF16, (4, 3))


def column(rank: int, world: int) -> RowMap:
    return row_map(plain(W), "p", COLUMN, rank, world, {"w": 0})


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        (((column(0, 2),),), "row 2 of checkpoint tensor 'w' has 0 elements told.*expected 3"),
        (((column(0, 2),), (column(0, 2),)), "row 0 of checkpoint tensor 'w' has 6 elements told"),
        (
            ((column(0, 2),), (column(1, 2), column(1, 2))),
            "row 2 of checkpoint tensor 'w' has 6 elements told",
        ),
        (
            ((replace(column(0, 1), dtype=torch.float16),),),
            "'p' tells torch.float16 of checkpoint tensor 'w'",
        ),
        (((),), "row 0 of checkpoint tensor 'w' has 0 elements told"),
    ],
    ids=["untold", "told twice", "told twice on one rank", "other dtype", "no map"],
)
def test_maps_that_do_not_tell_each_element_once_are_refused(
    maps: tuple[tuple[RowMap, ...], ...], said: str
) -> None:
    with pytest.raises(PlanMismatch, match=said):
        TransferPlan((W,), maps, 100)


def test_two_tensors_of_one_name_are_refused() -> None:
    with pytest.raises(PlanMismatch, match="tensor 'w' is declared twice"):
        TransferPlan((W, W), ((column(0, 2),),), 100)


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(PlanMismatch, match="bucket_bytes is 0, expected at least 1"):
        plan_of(W, bucket_bytes=0)


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((1, 1), "2 counts were given, expected 1"),
        ((13,), "'w' has 13 changed elements from position 0, expected 0 to 12"),
        ((-1,), "'w' has -1 changed elements"),
    ],
    ids=str,
)
def test_counts_of_another_plan_are_refused(counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(PlanMismatch, match=said):
        plan_of(W).groups(counts)


def test_a_part_is_priced_by_what_its_rank_tells() -> None:
    plan = TransferPlan((W,), ((column(0, 2),), (column(1, 2),)), 1000)
    (full,) = plan.groups(None)
    assert [plan.part_bytes(full, rank, (0,)) for rank in (0, 1)] == [padded(6 * 2), padded(6 * 2)]
    (sparse,) = plan.groups((3,))
    assert [plan.part_bytes(sparse, rank, (n,)) for rank, n in ((0, 1), (1, 2))] == [8, 16]
    assert plan.part_bytes(sparse, 0, (0,)) == 0
