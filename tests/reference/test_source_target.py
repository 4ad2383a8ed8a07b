"""Source to buckets to Target: whatever the cuts, a rollout has the trainer's bits, or its old ones back."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightsync.reference.deployment import Deployment
from weightsync.reference.digest import combine, state_digest
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.source import Source
from weightsync.reference.steps import run
from weightsync.reference.target import Target
from weightsync.testing.byhand import admit, deliver, make_update
from weightsync.testing.strategies import checkpoints, deployments
from weightsync.testing.twosides import TwoSides, cut_map, flips, two_sides


@given(data=st.data())
def test_a_full_update_and_deltas_on_it_bring_the_trainers_bits(data: st.DataObject) -> None:
    sides = data.draw(two_sides())
    targets = sides.targets()
    update = sides.full()
    slot = 0
    for version in range(1, 4):
        if version > 1:
            sides.train(data.draw(flips(sides=sides)))
            slot = 1 - slot
            update = sides.delta(version=version, slot=slot)
        stage = data.draw(st.booleans())
        for target in targets:
            deliver(target, update, stage=stage)
            if version == 1:
                assert target.undo_bytes == 0
            run(target.commit())
        sides.expect(targets)
        assert update.digest == sides.digest()


@given(data=st.data())
def test_the_plan_prices_every_bucket_and_part_to_the_byte(data: st.DataObject) -> None:
    sides = data.draw(two_sides())
    sides.train(data.draw(flips(sides=sides)))
    first = sides.full()
    sides.train(data.draw(flips(sides=sides)))
    second = sides.delta()
    for update in (first, second):
        assert sides.plan.update_bytes(update.counts) == sum(bucket.nbytes for bucket in update.buckets)
        specs = [spec for group in sides.plan.groups(update.counts) for spec in group.buckets]
        assert [spec.nbytes for spec in specs] == [bucket.nbytes for bucket in update.buckets[:-1]]


@given(data=st.data())
def test_counts_are_the_changed_elements_of_the_dense_state(data: st.DataObject) -> None:
    """Replicas are counted once, whatever the cut."""
    sides = data.draw(two_sides())
    sides.full()
    chosen = data.draw(flips(sides=sides))
    sides.train(chosen)
    update = sides.delta()
    assert update.counts is not None
    assert sides.plan.tensor_counts(update.counts) == tuple(len(flips) for flips in chosen)


@given(data=st.data())
def test_the_same_bits_travel_whatever_the_cut(data: st.DataObject) -> None:
    """Buckets are canonical: one rank or several, the same update is the same bytes."""
    sides = data.draw(two_sides())
    uncut = [{f"p{n}": cut_map(meta, n, None, 0, 1) for n, meta in enumerate(sides.metas)}]
    state = [tensor.clone() for tensor in sides.state]
    alone = TwoSides(sides.metas, uncut, uncut, sides.bucket_bytes, sides.piece_elements, state)
    chosen = data.draw(flips(sides=sides))
    pairs = [(sides.full(), alone.full())]
    for one in (sides, alone):
        one.train(chosen)
    pairs.append((sides.delta(), alone.delta()))
    for left, right in pairs:
        assert [bucket.header for bucket in left.buckets] == [bucket.header for bucket in right.buckets]
        assert all(
            torch.equal(a.payload, b.payload) for a, b in zip(left.buckets, right.buckets, strict=True)
        )


@given(data=st.data())
def test_a_digest_known_from_the_base_equals_the_full_one(data: st.DataObject) -> None:
    sides = data.draw(two_sides())
    sides.full()
    slot = 0
    for version in (2, 3):
        sides.train(data.draw(flips(sides=sides)))
        slot = 1 - slot
        sides.delta(version=version, slot=slot)
        for source in sides.sources:
            known = run(source.digest(slot))
            assert run(source.digest(slot, afresh=True)) == known


@given(data=st.data())
def test_a_rollback_restores_every_old_bit_wherever_the_update_stopped(data: st.DataObject) -> None:
    """Also when an apply was abandoned at its pause, repeated, or the rollback itself was."""
    sides = data.draw(two_sides())
    targets = sides.targets()
    for target in targets:
        deliver(target, sides.full())
        run(target.commit())
    sides.train(data.draw(flips(sides=sides)))
    update = sides.delta()
    for target in targets:
        before = target.snapshot_bits()
        stop = data.draw(st.integers(0, len(update.buckets) - 1))
        for number, decoded in enumerate(admit(target, update)):
            if number == stop:
                step = target.apply(decoded, undo=True)
                next(step)
                step.close()
                if data.draw(st.booleans()):
                    run(target.apply(decoded, undo=True))
                break
            run(target.apply(decoded, undo=True))
        if data.draw(st.booleans()):
            step = target.rollback()
            next(step)
            step.close()
        run(target.rollback())
        run(target.rollback())
        after = target.snapshot_bits()
        assert all(torch.equal(after[name], bits) for name, bits in before.items())
        assert target.undo_bytes == 0
        deliver(target, update)
    sides.expect(targets)


@given(data=st.data())
def test_applying_a_bucket_again_is_harmless(data: st.DataObject) -> None:
    sides = data.draw(two_sides())
    targets = sides.targets()
    for target in targets:
        deliver(target, sides.full())
        run(target.commit())
    before = [target.snapshot_bits() for target in targets]
    sides.train(data.draw(flips(sides=sides)))
    update = sides.delta()
    for target in targets:
        for decoded in list(admit(target, update)):
            run(target.apply(decoded, undo=True))
            run(target.apply(decoded, undo=True))
    sides.expect(targets)
    for target, bits in zip(targets, before, strict=True):
        run(target.rollback())
        after = target.snapshot_bits()
        assert all(torch.equal(after[name], old) for name, old in bits.items())


@settings(max_examples=25)
@given(data=st.data(), deployment=deployments())
def test_megatron_shards_reach_fused_and_unfused_rollouts(
    data: st.DataObject, deployment: Deployment
) -> None:
    """Whatever the heads: cut, replicated, or divided by no TP size."""
    model, plan = deployment.model, deployment.plan
    states = [data.draw(checkpoints(model=model)) for _ in range(2)]
    live = [deployment.shards(rank, states[0]) for rank in range(len(deployment.trainers))]
    sources = [Source(plan, rank, params) for rank, params in enumerate(live)]
    updates = [make_update(plan, sources, slot=0, version=1)]
    some = data.draw(st.sampled_from([0.0, 0.1, 1.0]))
    for meta in model.tensors():
        kept = torch.rand(meta.shape, generator=torch.Generator().manual_seed(0)) >= some
        bits = int_view(states[1][meta.name]).view(meta.shape)
        bits[kept] = int_view(states[0][meta.name]).view(meta.shape)[kept]
    for rank, params in enumerate(live):
        for name, shard in deployment.shards(rank, states[1]).items():
            params[name].data.copy_(shard)
    updates.append(make_update(plan, sources, slot=1, base_slot=0, version=2, base=1))
    assert updates[1].counts is not None
    assert plan.tensor_counts(updates[1].counts) == tuple(  # a replica's change travels once
        int((int_view(states[1][meta.name]) != int_view(states[0][meta.name])).sum()) for meta in plan.tensors
    )
    for rollout in deployment.rollouts:
        targets = [
            Target(
                plan.tensors, deployment.rollout_maps(rank), deployment.blank(rank), deployment.aliases(rank)
            )
            for rank in rollout.ranks
        ]
        for update, state in zip(updates, states, strict=True):
            for target, rank in zip(targets, rollout.ranks, strict=True):
                deliver(target, update)
                run(target.commit())
                for name, expected in deployment.weights(rank, state).items():
                    assert same_bits(target.weights[name], expected), name
            dense = state_digest((meta, state[meta.name]) for meta in plan.tensors)
            assert combine(run(target.digest()) for target in targets) == update.digest == dense
