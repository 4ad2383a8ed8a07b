"""Whole updates in every form: the trainer's bits arrive, differences count once, and damage changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.reference.buckets import Bucket, unpack
from weightsync.reference.errors import PatchMismatch, PlanMismatch, StaleVersion
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.reference.wire.choosing import AUTO
from weightsync.reference.wire.forms import (
    ABSOLUTE,
    ALL_FORMS,
    DENSE_FORM,
    FORM_NAMES,
    OLDEST,
    Form,
    Packing,
    Positions,
    Values,
    known_to_all,
)
from weightsync.reference.wire.policy import PLAIN_WIRE, WirePolicy
from weightsync.testing import plainwire
from weightsync.testing.byhand import Update, admit, deliver, over_the_wire
from weightsync.testing.twosides import TwoSides, cut_map, flips, two_sides

SPARSE = [form.name for form in ALL_FORMS if form.positions is not Positions.DENSE]
POLICIES = st.builds(
    WirePolicy,
    st.sampled_from([AUTO, *(form.name for form in ALL_FORMS)]),
    st.sampled_from([1e3, 1e8, 1e10, 1e13]),
)
CHANGED = range(0, 600, 4)


@given(data=st.data(), wire=POLICIES)
def test_deltas_in_any_form_bring_the_trainers_bits(data: st.DataObject, wire: WirePolicy) -> None:
    sides = replace(data.draw(two_sides()), wire=wire)
    targets = sides.targets()
    update, slot = sides.full(), 0
    for version in range(1, 4):
        if version > 1:
            sides.train(data.draw(flips(sides=sides)))
            slot = 1 - slot
            update = sides.delta(version=version, slot=slot)
        stage = data.draw(st.booleans())
        for target in targets:
            deliver(target, update, stage=stage)
            run(target.commit())
        sides.expect(targets)
        specs = [spec for group in sides.plan.groups(update.counts) for spec in group.buckets]
        for spec, bucket in zip(specs, update.buckets[:-1], strict=True):
            assert bucket.nbytes <= spec.nbytes
            assert spec.likely <= spec.nbytes


def one_tensor(encoding: str, size: int = 600, bucket_bytes: int = 1 << 20) -> TwoSides:
    """A trainer and a rollout of one rank each that hold one bf16 tensor; every fourth element is about to change."""
    meta = ParamMeta("w", torch.bfloat16, (size,))
    state = [torch.randn(size, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)]
    maps = {"p0": cut_map(meta, 0, None, 0, 1)}
    return TwoSides((meta,), [maps], [maps], bucket_bytes, 1 << 30, state, WirePolicy(encoding))


def two_versions(
    encoding: str, size: int = 600, bucket_bytes: int = 1 << 20
) -> tuple[TwoSides, Target, Update]:
    """A target at version 1, and the delta to version 2."""
    sides = one_tensor(encoding, size, bucket_bytes)
    (target,) = sides.targets()
    deliver(target, sides.full())
    run(target.commit())
    sides.train([[(position, 1 + 6 * (position % 5 == 0)) for position in range(0, size, 4)]])
    return sides, target, sides.delta()


@pytest.mark.parametrize("encoding", SPARSE)
@pytest.mark.parametrize("abandoned", [True, False])
def test_a_bucket_applied_again_writes_the_same_bits(encoding: str, abandoned: bool) -> None:
    sides, target, update = two_versions(encoding)
    before = target.snapshot_bits()["p0"]
    for _ in range(2):
        (decoded,) = admit(target, update, update.buckets[:1])
        first = target.apply(decoded, undo=True)
        if abandoned:
            next(first)
            first.close()
        else:
            run(first)
    (decoded,) = admit(target, update, update.buckets[:1])
    run(target.apply(decoded, undo=True))
    run(target.apply(decoded, undo=True))
    sides.expect([target])
    run(target.rollback())
    assert torch.equal(target.snapshot_bits()["p0"], before)
    deliver(target, update)
    run(target.commit())
    sides.expect([target])


@pytest.mark.parametrize("encoding", SPARSE)
def test_a_range_that_is_cut_is_whole_again(encoding: str) -> None:
    sides, target, update = two_versions(encoding, bucket_bytes=400)
    assert len(update.buckets) > 3
    deliver(target, update, stage=True)
    sides.expect([target])


@pytest.mark.parametrize("encoding", SPARSE)
def test_damage_anywhere_is_refused_and_changes_nothing(encoding: str) -> None:
    _, target, update = two_versions(encoding, size=90)
    before = target.snapshot_bits()["p0"]
    bucket = update.buckets[0]
    payload = bucket.payload
    variants = [payload[:size] for size in range(payload.numel())] + [torch.cat([payload, payload[:1]])]
    for at in range(payload.numel()):
        variants.append(payload.clone())
        variants[-1][at] ^= 1 << at % 8
    for variant in variants:
        damaged = Bucket(bucket.header, variant)
        with pytest.raises(PatchMismatch):
            run(target.decode(damaged))
    assert torch.equal(target.snapshot_bits()["p0"], before)
    assert target.undo_bytes == 0


@pytest.mark.parametrize("encoding", SPARSE)
def test_damage_under_a_right_checksum_is_refused_or_stays_in_bounds(encoding: str) -> None:
    """A sender that is wrong, not a line: what is let through names elements of the tensor, each once."""
    sides, target, update = two_versions(encoding, size=90)
    bucket = update.buckets[0]
    for at in range(bucket.payload.numel()):
        payload = bucket.payload.clone()
        payload[at] ^= 255
        forged = Bucket(
            replace(bucket.header, checksum=bucket.header.sum_with(payload.numpy().data)), payload
        )
        try:
            (decoded,) = admit(target, update, [forged])
        except PatchMismatch:
            continue
        for one in decoded.ranges:
            flat = [
                one.spec.base + at for at in (one.positions.tolist() if one.positions is not None else [])
            ]
            assert all(0 <= position < sides.metas[0].numel for position in flat)
            assert flat == sorted(set(flat))


@pytest.mark.parametrize("encoding", SPARSE)
def test_the_plain_reader_reads_our_buckets(encoding: str) -> None:
    sides = one_tensor(encoding)
    sides.full()
    old = int_view(sides.state[0]).clone().to(torch.int64) & 0xFFFF
    sides.train([[(position, 1) for position in CHANGED]])
    bucket = sides.delta().buckets[0]
    new = int_view(sides.state[0]).to(torch.int64) & 0xFFFF
    wire = bucket.header.pack() + bytes(bucket.payload.tolist())
    ((tensor, changes),) = plainwire.read_bucket(wire, [2], [True], lambda _, position: int(old[position]))
    assert tensor == 0
    assert changes == [(position, int(new[position])) for position in CHANGED]


@pytest.mark.parametrize("encoding", SPARSE)
def test_a_form_asked_for_is_the_form_that_travels(encoding: str) -> None:
    sides, _, update = two_versions(encoding)
    (found,) = unpack(over_the_wire(update.buckets[0]), sides.metas)
    form = Form.named(encoding)
    assert found.spec.form in (form, form.fixed)
    if form.packing is Packing.FIXED or form.positions is not Positions.INT32:
        assert found.spec.form == form


@given(st.integers(1, 1 << 22), st.sampled_from([1, 2, 4, 8]), st.data())
@settings(max_examples=40)
def test_the_plain_policy_is_the_cheapest_fixed_form(numel: int, itemsize: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, numel))
    form = PLAIN_WIRE.form(count, numel, itemsize)
    assert (form.positions is Positions.DENSE) == (numel * itemsize <= count * (itemsize + 4))
    assert form.packing is Packing.FIXED


def test_a_baseline_without_old_bits_sends_absolute_values() -> None:
    allowed = WirePolicy(AUTO, 1e6).allowing(ABSOLUTE)
    assert allowed.form(1000, 1 << 20, 2).values is Values.RAW
    with pytest.raises(PlanMismatch, match="needs values in step, the baseline allows raw"):
        WirePolicy("gap8+step+zstd").allowing(ABSOLUTE)


def test_differences_need_the_base_version_that_they_were_taken_from() -> None:
    _, target, update = two_versions("gap8+step+zstd")
    decoded = run(target.decode(over_the_wire(update.buckets[0])))
    with pytest.raises(StaleVersion, match="made for base version 1, expected 5"):
        run(target.validate(decoded, version=2, base=5, epoch=1, sequence=0))


@pytest.mark.parametrize("encoding", [AUTO, *SPARSE])
def test_changes_without_old_bits_travel_as_absolute_values(encoding: str) -> None:
    """Such as several versions squashed into one."""
    sides = one_tensor(encoding)
    sides.full()
    sides.train([[(position, 1) for position in CHANGED]])
    run(sides.sources[0].snapshot(1))
    changes = run(sides.sources[0].diff(1, 0))
    groups = sides.plan.groups(changes.counts, absolute=True)
    assert {form.values for group in groups for form in group.forms} == {Values.RAW}
    blind = replace(changes, patches={n: (at, new, None) for n, (at, new, _) in changes.patches.items()})
    run(sides.sources[0].part(1, blind, groups[0]))
    (group,) = sides.plan.groups(changes.counts)
    if group.forms[0].values is not Values.RAW:
        with pytest.raises(PlanMismatch, match="changes hold no old bits, expected them for"):
            run(sides.sources[0].part(1, blind, group))


@given(
    st.sampled_from([AUTO, "int32+raw"]),
    st.sampled_from([1e3, 1e9, 1e13]),
    st.sets(st.sampled_from(ALL_FORMS)),
)
def test_receivers_are_sent_no_form_that_one_of_them_does_not_know(
    encoding: str, link: float, more: set[Form]
) -> None:
    sides = replace(one_tensor("int32+raw"), wire=WirePolicy(encoding, link))
    known = tuple(form for form in ALL_FORMS if form in more or form.name in OLDEST)
    for counts in (None, (1,), (150,), (600,)):
        for group in sides.plan.groups(counts, forms=known):
            assert set(group.forms) <= {*known, DENSE_FORM}


def test_a_receiver_that_does_not_know_the_form_asked_for_is_named_its_forms() -> None:
    sides = one_tensor("gap8+step+zstd")
    known = [Form.named(name) for name in known_to_all([{"forms": FORM_NAMES}, {}])]
    with pytest.raises(
        PlanMismatch, match=r"does not know encoding 'gap8\+step\+zstd', only dense\+raw, int32\+raw"
    ):
        sides.plan.groups((150,), forms=known)
