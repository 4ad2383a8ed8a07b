"""The share that follows every write is the one that a recount finds, whatever was applied, undone and abandoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.digest import combine, state_digest
from weightsync.reference.params import ParamMeta, int_view
from weightsync.reference.source import Source
from weightsync.reference.steps import Touched, run
from weightsync.reference.target import Decoded, Target
from weightsync.testing.byhand import Update, admit, deliver, make_update
from weightsync.testing.strategies import checkpoints, deployments
from weightsync.testing.twosides import TwoSides, cut_map, flips, random_state, two_sides

A = ParamMeta("a", torch.bfloat16, (4, 6))
WAYS = ("commit", "roll back", "abandon", "abandon the rollback", "again")


def share_of(target: Target) -> int:
    """What it tells, which must be what a recount finds."""
    kept = run(target.digest())
    assert run(target.digest(afresh=True)) == kept
    return kept


def take(target: Target, update: Update, way: str, stop: int) -> None:
    """Apply an update in one of ``WAYS``, looking at the share after every step."""
    for number, decoded in enumerate(admit(target, update)):
        step = target.apply(decoded, undo=update.base > 0)
        if way.startswith("abandon") and number == stop:
            next(step)
            step.close()
            share_of(target)
            break
        run(step)
        share_of(target)
        if way == "again":
            run(target.apply(decoded, undo=update.base > 0))
            share_of(target)
    if way in ("commit", "again"):
        run(target.commit())
        return
    if way == "abandon the rollback":
        half = target.rollback()
        next(half)
        half.close()
        share_of(target)
    run(target.rollback())


def total(targets: Sequence[Target]) -> int:
    return combine(share_of(target) for target in targets)


@given(data=st.data())
def test_it_is_that_of_a_recount_after_any_updates_however_they_end(data: st.DataObject) -> None:
    sides = data.draw(two_sides())
    targets = sides.targets()
    slot, version, held = 0, 1, 0
    for target in targets:
        share_of(target)  # of poison
    for _ in range(data.draw(st.integers(1, 4))):
        sides.train(data.draw(flips(sides=sides)))
        if held and data.draw(st.integers(0, 3)):
            update = make_update(
                sides.plan, sides.sources, slot=1 - slot, base_slot=slot, version=version, base=held
            )
            way = data.draw(st.sampled_from(WAYS))
        else:
            update, way = make_update(sides.plan, sides.sources, slot=1 - slot, version=version), "commit"
        stop = data.draw(st.integers(0, max(0, len(update.buckets) - 2)))
        before = total(targets)
        for target in targets:
            take(target, update, way, stop)
        if way in ("commit", "again"):
            slot, held = 1 - slot, version
            assert total(targets) == update.digest == sides.digest()
        else:
            assert total(targets) == before
        version += 1


@settings(max_examples=25)
@given(data=st.data(), deployment=deployments())
def test_rows_that_several_ranks_hold_are_followed_once(data: st.DataObject, deployment: Deployment) -> None:
    """Replicated heads, fused parameters, padding, tied names: the ranks' shares add up to the trainer's digest."""
    plan = deployment.plan
    states = [data.draw(checkpoints(model=deployment.model)) for _ in range(2)]
    live = [deployment.shards(rank, states[0]) for rank in range(len(deployment.trainers))]
    sources = [Source(plan, rank, params) for rank, params in enumerate(live)]
    full = make_update(plan, sources, slot=0, version=1)
    for rank, params in enumerate(live):
        for name, shard in deployment.shards(rank, states[1]).items():
            int_view(params[name].data).copy_(int_view(shard.data))
    delta = make_update(plan, sources, slot=1, base_slot=0, version=2, base=1)
    dense = [state_digest((meta, state[meta.name]) for meta in plan.tensors) for state in states]
    for rollout in deployment.rollouts:
        targets = [
            Target(
                plan.tensors, deployment.rollout_maps(rank), deployment.blank(rank), deployment.aliases(rank)
            )
            for rank in rollout.ranks
        ]
        for target in targets:
            take(target, full, "commit", 0)
        assert total(targets) == dense[0]
        for way, expected in (("roll back", dense[0]), ("commit", dense[1])):
            for target in targets:
                take(target, delta, way, 0)
            assert total(targets) == expected


def one_sided(weights: dict[str, Tensor], aliases: dict[str, str] | None = None) -> tuple[TwoSides, Target]:
    """One tensor, uncut; a rollout rank with these weights for it, which it was sent once."""
    sides = TwoSides((A,), [{"p0": cut_map(A, 0, None, 0, 1)}], [{}], 1 << 20, 1 << 31, random_state((A,), 0))
    maps = {name: cut_map(A, 0, None, 0, 1) for name in weights if name not in (aliases or {})}
    target = Target((A,), maps, weights, aliases)
    deliver(target, sides.full())
    run(target.commit())
    return sides, target


def blank(shape: tuple[int, ...] = (4, 6)) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def test_a_tied_copy_is_followed_on_both_sides_of_the_tie() -> None:
    sides, target = one_sided({"p0": blank(), "head": blank()}, {"head": "p0"})
    assert share_of(target) == sides.digest()
    sides.train([[(3, 1), (17, 5)]])
    deliver(target, sides.delta())
    assert share_of(target) == sides.digest()
    int_view(target.weights["head"])[3] ^= 1
    sides.train([[(3, 1)]])
    deliver(target, make_update(sides.plan, sides.sources, slot=0, base_slot=1, version=3, base=2))
    assert run(target.digest()) != sides.digest(), "a copy that was not what it is tied to was written over"


def test_weights_that_overlap_are_recounted() -> None:
    """A write to one of them changes the other, which nobody follows."""
    memory = blank((5, 6))
    sides, target = one_sided({"p0": memory[:4], "p1": memory[1:]})
    sides.train([[(7, 1)]])
    deliver(target, sides.delta())
    share_of(target)


def test_a_share_that_is_known_costs_nothing_and_a_recount_reads_every_weight() -> None:
    sides, target = one_sided({"p0": blank()})
    assert next(target.digest()) == Touched(A.nbytes, reads=("weights",)), "a full update is recounted"
    run(target.digest())
    sides.train([[(7, 1)]])
    deliver(target, sides.delta())
    assert next(target.digest()) == Touched(0)
    assert next(target.digest(afresh=True)) == Touched(A.nbytes, reads=("weights",))


def test_a_bit_that_flipped_is_seen_when_it_is_written_over_or_recounted() -> None:
    for element, update_sees in ((7, True), (8, False)):
        sides, target = one_sided({"p0": blank()})
        run(target.digest())
        int_view(target.weights["p0"])[element] ^= 4
        sides.train([[(7, 1)]])
        update = sides.delta()
        deliver(target, update)
        assert (run(target.digest()) != update.digest) == update_sees
        run(target.rollback())
        run(target.digest())
        deliver(target, update)
        assert (run(target.digest(afresh=True)) != update.digest) == (not update_sees), "7 holds the new bits"


def test_a_recount_that_found_a_flipped_bit_is_not_forgotten_by_a_rollback() -> None:
    sides, target = one_sided({"p0": blank()})
    before = run(target.digest())
    sides.train([[(7, 1)]])
    deliver(target, sides.delta())
    int_view(target.weights["p0"])[8] ^= 4
    run(target.digest(afresh=True))
    run(target.rollback())
    assert run(target.digest()) != before


class Xors(Target):
    """Takes values for what an element changes by: the bits on the wire are old xor new."""

    def apply(self, decoded: Decoded, undo: bool):  # type: ignore[no-untyped-def]
        held = int_view(self.weights["p0"])
        ranges = [
            one._replace(bits=one.bits ^ held[one.positions.long() + one.spec.base])
            for one in decoded.ranges
            if one.positions is not None
        ]
        return (yield from super().apply(replace(decoded, ranges=tuple(ranges)), undo))


@pytest.mark.parametrize("times", [1, 2])
def test_a_patch_of_differences_that_is_applied_twice_is_seen(times: int) -> None:
    """Of absolute values a second time is harmless; the digest does not ask in which form they came."""
    sides, target = one_sided({"p0": blank()})
    run(target.digest())
    old = int_view(sides.state[0]).clone()
    sides.train([[(7, 1), (9, 2)]])
    update = sides.delta()
    target.__class__ = Xors
    for decoded in list(admit(target, update)):
        ranges = [
            one._replace(bits=one.bits ^ old[one.positions.long() + one.spec.base])
            for one in decoded.ranges
            if one.positions is not None
        ]
        for _ in range(times):
            run(target.apply(replace(decoded, ranges=tuple(ranges)), undo=True))
    assert (run(target.digest()) == update.digest) == (times == 1)
    assert run(target.digest()) == run(target.digest(afresh=True))
