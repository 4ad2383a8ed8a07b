"""A trainer rank's bytes: what it tells of a change, and what the sender refuses to join."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from weightsync.reference.buckets import DELTA, Heading, unpack
from weightsync.reference.detect import Detector
from weightsync.reference.digest import combine, state_digest
from weightsync.reference.errors import PlanMismatch, StaleVersion
from weightsync.reference.layouts import row_map, vocab
from weightsync.reference.params import ParamMeta, TPAttributes, int_view
from weightsync.reference.plan import TransferPlan
from weightsync.reference.source import Part, Source
from weightsync.reference.steps import Touched, run
from weightsync.testing.byhand import deliver
from weightsync.testing.twosides import TwoSides, cut_map, random_state

A = ParamMeta("a", torch.bfloat16, (4, 6))
B = ParamMeta("b", torch.int8, (5,))
HUGE = 1 << 31
A_BITS = torch.zeros(A.shape, dtype=A.dtype)
HEADING = Heading(DELTA, 1, 1, 2)


def two_ranks(*metas: ParamMeta, bucket_bytes: int = 1 << 20, piece_elements: int = HUGE) -> TwoSides:
    """Two trainer ranks, every tensor cut along its last dimension."""
    trainer = [
        {f"p{n}": cut_map(meta, n, len(meta.shape) - 1, rank, 2) for n, meta in enumerate(metas)}
        for rank in (0, 1)
    ]
    alone = {f"p{n}": cut_map(meta, n, None, 0, 1) for n, meta in enumerate(metas)}
    return TwoSides(metas, list(trainer), [alone], bucket_bytes, piece_elements, random_state(metas, 0))


def changed_by(sides: TwoSides, chosen: list[list[tuple[int, int]]]) -> list[tuple[int, ...]]:
    """Snapshots before and after a change in slots 0 and 1; what each rank counts."""
    for source in sides.sources:
        run(source.snapshot(0))
    sides.train(chosen)
    for source in sides.sources:
        run(source.snapshot(1))
    return [run(source.diff(1, 0)).counts for source in sides.sources]


def test_each_rank_counts_its_own_changes_in_checkpoint_coordinates() -> None:
    sides = two_ranks(A, B)
    assert changed_by(sides, [[(0, 1), (2, 1), (3, 1)], [(4, 1)]]) == [(2, 0), (1, 1)]
    patches = [run(source.diff(1, 0)).patches for source in sides.sources]
    assert [patch[0][0].tolist() for patch in patches] == [[0, 2], [3]]
    assert patches[1][1][0].tolist() == [4]


def test_changes_own_their_memory_and_nothing_is_advanced() -> None:
    sides = two_ranks(A)
    assert changed_by(sides, [[(0, 1)]]) == [(1,), (0,)]
    changes = run(sides.sources[0].diff(1, 0))
    bits = changes.patches[0][1].clone()
    sides.train([[(0, 2)]])
    run(sides.sources[0].snapshot(1))
    assert torch.equal(changes.patches[0][1], bits)
    assert run(sides.sources[0].diff(1, 0)).counts == (1,)


def test_changes_carry_the_bits_that_the_base_had() -> None:
    sides = two_ranks(A, B)
    before = int_view(sides.sources[0].params["p0"]).clone()
    assert changed_by(sides, [[(0, 1), (2, 1), (3, 1)], [(4, 1)]]) == [(2, 0), (1, 1)]
    _, new, old = run(sides.sources[0].diff(1, 0)).patches[0]
    assert old is not None
    assert old.tolist() == before[[0, 2]].tolist()
    assert (new ^ old).tolist() == [1, 1]


def test_without_a_base_every_owned_element_counts() -> None:
    sides = two_ranks(A, B)
    for source in sides.sources:
        run(source.snapshot(0))
    changes = [run(source.diff(0, None)) for source in sides.sources]
    assert [one.counts for one in changes] == [(12, 3), (12, 2)]
    assert [one.nnz for one in changes] == [15, 14]


def test_positions_are_relative_to_their_piece() -> None:
    sides = two_ranks(A, piece_elements=12)
    assert changed_by(sides, [[(1, 1), (13, 1), (23, 1)]]) == [(1, 1), (0, 1)]
    assert run(sides.sources[0].diff(1, 0)).patches[1][0].tolist() == [1]
    (group,) = sides.plan.groups((1, 2))
    parts = [run(source.part(1, run(source.diff(1, 0)), group)) for source in sides.sources]
    merged = run(sides.sources[0].merge(parts, group, [(1, 1), (0, 1)]))
    bucket = run(sides.sources[0].encode(merged, group.buckets[0], HEADING))
    found = unpack(bucket, sides.metas)
    assert [(one.spec.base, one.positions.tolist()) for one in found if one.positions is not None] == [
        (0, [1]),
        (12, [1, 11]),
    ]


def test_padding_is_told_by_nobody() -> None:
    meta = ParamMeta("embed", torch.bfloat16, (3, 2))
    layout = vocab(meta, 4)
    maps = [
        row_map(
            layout,
            "p",
            TPAttributes({"tensor_model_parallel": True, "partition_dim": 0}),
            rank,
            2,
            {"embed": 0},
        )
        for rank in (0, 1)
    ]
    plan = TransferPlan((meta,), tuple((one,) for one in maps), 1000)
    live = [{"p": torch.zeros(2, 2, dtype=torch.bfloat16)} for _ in maps]
    sources = [Source(plan, rank, params) for rank, params in enumerate(live)]
    for source in sources:
        run(source.snapshot(0))
    live[1]["p"][1] = 5.0
    for source in sources:
        run(source.snapshot(1))
    assert [run(source.diff(1, 0)).counts for source in sources] == [(0,), (0,)]
    digest = combine(run(source.digest(1)) for source in sources)
    assert digest == state_digest([(meta, torch.zeros(3, 2, dtype=torch.bfloat16))])


def test_attributes_reach_the_snapshot() -> None:
    live = []
    for _ in (0, 1):
        shard = torch.nn.Parameter(torch.zeros(2, 6, dtype=torch.bfloat16))
        TPAttributes({"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}).stamp(shard)
        live.append({"p0": shard})
    plan = TransferPlan((A,), tuple((cut_map(A, 0, 0, rank, 2),) for rank in (0, 1)), 1000)
    for rank, params in enumerate(live):
        source = Source(plan, rank, params)
        run(source.snapshot(1))
        held = vars(source.held(1)["p0"])
        assert held == {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 1}


def test_a_float32_master_is_cast_before_the_diff() -> None:
    maps = ((cut_map(A, 0, None, 0, 1),),)
    live = {"p0": torch.ones(4, 6)}
    source = Source(TransferPlan((A,), maps, 1000), 0, live)
    run(source.snapshot(0))
    live["p0"] += 1e-4
    live["p0"][1, 1] += 1e-2
    run(source.snapshot(1))
    assert run(source.diff(1, 0)).patches[0][0].tolist() == [7]


def test_a_torn_slot_is_neither_diffed_nor_sent() -> None:
    sides = two_ranks(A)
    source = sides.sources[0]
    run(source.snapshot(0))
    next(source.snapshot(1))
    (group,) = sides.plan.groups(None)
    for refused in (source.diff(1, 0), source.diff(0, 1), source.digest(1), source.part(1, None, group)):
        with pytest.raises(StaleVersion, match="snapshot slot 1 holds no whole snapshot"):
            run(refused)  # type: ignore[arg-type]


def test_a_new_snapshot_forgets_the_digest_of_its_slot() -> None:
    """Also when the other slot's digest was derived from it."""
    sides = two_ranks(A)
    changed_by(sides, [[(0, 1)]])
    source = sides.sources[0]
    first = run(source.digest(0))
    assert run(source.digest(1)) != first
    sides.train([[(0, 1)]])
    run(source.snapshot(1))
    assert run(source.digest(1)) == first


def test_a_digest_afresh_shows_what_a_diff_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = two_ranks(A)
    source = sides.sources[0]
    for each in sides.sources:
        run(each.snapshot(0))
    run(source.digest(0))
    sides.train([[(0, 1)]])
    run(source.snapshot(1))
    none = Detector().find(A_BITS, A_BITS)
    monkeypatch.setattr(Detector, "find", lambda detector, new, old: none)
    assert run(source.diff(1, 0)).nnz == 0
    assert run(source.digest(1)) == run(source.digest(0))
    assert run(source.digest(1, afresh=True)) != run(source.digest(0))


def test_a_diff_against_an_overwritten_base_is_not_built_upon() -> None:
    sides = two_ranks(A)
    changed_by(sides, [[(0, 1)]])
    source = sides.sources[0]
    sides.train([[(2, 1)]])
    run(source.snapshot(0))
    run(source.digest(0))
    known = run(source.digest(1))
    assert known == run(source.digest(1, afresh=True))


def test_rows_in_any_order_are_told_in_the_checkpoints() -> None:
    """A layout may hold a tensor's rows backwards; what travels is sorted all the same."""
    backwards = cut_map(A, 0, None, 0, 1)
    backwards = replace(backwards, row=backwards.row.flip(0))
    forwards = {"p0": cut_map(A, 0, None, 0, 1)}
    sides = TwoSides((A,), [{"p0": backwards}], [forwards], 1 << 20, HUGE, random_state((A,), 0))
    (target,) = sides.targets()
    update = sides.full()
    assert update.digest == sides.digest()
    deliver(target, update)
    sides.expect([target])
    run(target.commit())
    sides.train([[(1, 1), (8, 2), (22, 4)]])
    deliver(target, sides.delta())
    sides.expect([target])


def test_other_parts_of_the_same_group_are_joined_anew() -> None:
    sides = two_ranks(A, bucket_bytes=120)
    for source in sides.sources:
        run(source.snapshot(0))
    (group,) = sides.plan.groups(None)
    assert len(group.buckets) > 1
    lead, matrix = sides.sources[0], [(0,), (0,)]
    for _ in range(2):
        parts = [run(source.part(0, None, group)) for source in sides.sources]
        merged = run(lead.merge(parts, group, matrix))
        bucket = run(lead.encode(merged, group.buckets[0], replace(HEADING, kind="full", base=0)))
        (found,) = unpack(bucket, sides.metas)
        assert torch.equal(found.bits, int_view(sides.state[0])[: found.spec.count])
        sides.train([[(0, 1)]])
        for source in sides.sources:
            run(source.snapshot(0))


def test_steps_say_what_they_touch_at_their_pause() -> None:
    sides = two_ranks(A)
    changed_by(sides, [[(0, 1)]])
    source = sides.sources[0]
    assert next(source.snapshot(0)) == Touched(24, reads=("live",), writes=("slot0",))
    run(source.snapshot(0))
    assert next(source.diff(1, 0)) == Touched(48, reads=("slot1", "slot0"))
    assert next(source.digest(1)) == Touched(24, reads=("slot1",))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda plan: Source(plan, 2, {}), "trainer rank 2 is not in the plan, expected 0 to 1"),
        (lambda plan: Source(plan, 0, {}), "parameter 'p0' is not among the live parameters"),
        (
            lambda plan: Source(plan, 0, {"p0": torch.zeros(4, 6)}),
            r"'p0' has local shape \[4, 6\], .* \[4, 3\]",
        ),
    ],
    ids=["rank", "missing", "shape"],
)
def test_parameters_that_do_not_fit_the_plan_are_refused(
    make: Callable[[TransferPlan], Source], said: str
) -> None:
    with pytest.raises(PlanMismatch, match=said):
        make(two_ranks(A).plan)


def test_parts_that_do_not_fit_the_counts_are_refused() -> None:
    sides = two_ranks(A)
    matrix = changed_by(sides, [[(0, 1), (3, 1)]])
    (group,) = sides.plan.groups((2,))
    changes = [run(source.diff(1, 0)) for source in sides.sources]
    parts = [run(source.part(1, one, group)) for source, one in zip(sides.sources, changes, strict=True)]
    lead, spec = sides.sources[0], group.buckets[0]

    def encode(parts: list[Part], matrix: list[tuple[int, ...]]) -> None:
        run(lead.encode(run(lead.merge(parts, group, matrix)), spec, HEADING))

    encode(parts, matrix)
    with pytest.raises(PlanMismatch, match="1 parts and 2 rows of counts were gathered, expected 2"):
        encode(parts[:1], matrix)
    with pytest.raises(
        PlanMismatch, match=r"part of trainer rank 1 has 8 elements of torch\.uint8, expected 16"
    ):
        encode(parts, [(1,), (2,)])
    with pytest.raises(PlanMismatch, match="element 0 of tensor 'a' is told by two trainer ranks"):
        encode([parts[0], parts[0]], matrix)


def test_a_part_needs_changes_of_its_own_slot() -> None:
    sides = two_ranks(A)
    changed_by(sides, [[(0, 1)]])
    source = sides.sources[0]
    (group,) = sides.plan.groups((1,))
    with pytest.raises(PlanMismatch, match="changes are of slot 1, expected slot 0"):
        run(source.part(0, run(source.diff(1, 0)), group))
    with pytest.raises(PlanMismatch, match="changes hold no patch for a sparse piece"):
        run(source.part(1, run(source.diff(1, None)), group))


def test_live_parameters_may_change_as_soon_as_the_snapshot_is_done() -> None:
    sides = two_ranks(A, B)
    for source in sides.sources:
        run(source.snapshot(0))
    before = state_digest(zip(sides.metas, sides.state, strict=True))
    for params in sides.live:
        for tensor in params.values():
            int_view(tensor).zero_()
    assert combine(run(source.digest(0)) for source in sides.sources) == before
