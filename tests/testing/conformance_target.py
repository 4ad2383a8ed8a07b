"""Conformance of a rollout rank's bytes: apply, undo, commit, refusals before the first write, the digest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.buckets import DELTA
from weightsync.reference.digest import combine
from weightsync.reference.errors import PlanMismatch, WeightSyncError
from weightsync.reference.params import int_view
from weightsync.reference.rank import Verbs
from weightsync.testing.conformance_base import (
    DELTA_AND_FULL,
    EACH_SAMPLE,
    ConformanceBase,
    attempt,
    expect_equal,
    expect_refused,
    expect_same,
    take_in,
)
from weightsync.testing.conformance_sample import make_sample
from weightsync.testing.damage import DAMAGES, renumbered
from weightsync.testing.memory import WEIGHTS


class TargetConformance(ConformanceBase):
    """Nothing is written before it is proved, what was written can be undone, and a commit is for good."""

    @DELTA_AND_FULL
    def test_weights_of_any_strides_are_written_in_place(self, kind: str) -> None:
        sample = make_sample()
        targets, buckets = {}, sample.reference_buckets(kind)
        for rank in sample.rollout_ranks:
            turned = {
                name: tensor.permute(*reversed(range(tensor.dim())))
                .contiguous()
                .permute(*reversed(range(tensor.dim())))
                for name, tensor in sample.deployment.weights(rank, sample.before).items()
            }
            targets[rank] = self.make_target(sample.deployment, rank, turned)
        self.each(targets, lambda verbs, _: take_in(verbs, sample, kind, buckets))
        expect_same(
            self.weights(sample, targets),
            self.held(sample, sample.after),
            f"apply of a {kind} update in place",
        )

    def test_a_delta_writes_no_element_that_it_does_not_name(self) -> None:
        """On weights that it was not made for: what the reference leaves alone, so must the backend."""
        sample = make_sample()
        stream = torch.Generator().manual_seed(1)
        poison = {}
        for name, tensor in sample.before.items():
            raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=stream)
            poison[name] = raw.view(tensor.dtype).reshape(tensor.shape)
        targets, buckets = self.targets(sample, poison), sample.reference_buckets(DELTA)
        self.each(targets, lambda verbs, _: take_in(verbs, sample, DELTA, buckets))
        expected = sample.reference_apply(poison, DELTA, buckets)
        expect_same(self.weights(sample, targets), expected, "apply of a delta on other weights")

    @EACH_SAMPLE
    def test_a_rollback_restores_every_bit(self, what: str) -> None:
        sample = make_sample(what)
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> None:
            await take_in(verbs, sample, DELTA, buckets)
            await verbs.rollback()

        self.each(targets, main)
        expect_same(
            self.weights(sample, targets),
            self.held(sample, sample.before),
            "apply of a delta, then rollback,",
        )

    def test_a_rollback_half_way_through_an_update_restores_every_bit(self) -> None:
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> None:
            await take_in(verbs, sample, DELTA, buckets[:2])
            await verbs.rollback()
            await verbs.rollback()

        self.each(targets, main)
        expect_same(
            self.weights(sample, targets),
            self.held(sample, sample.before),
            "two buckets, then two rollbacks,",
        )

    def test_a_bucket_applied_twice_is_undone_as_if_applied_once(self) -> None:
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> None:
            decoded = await verbs.decode(buckets[0])
            await verbs.validate(decoded, **sample.numbers(DELTA), sequence=0)
            await verbs.apply(decoded, undo=True)
            await verbs.apply(decoded, undo=True)
            await verbs.rollback()

        self.each(targets, main)
        expect_same(
            self.weights(sample, targets), self.held(sample, sample.before), "apply twice, then rollback,"
        )

    def test_an_update_can_be_taken_in_after_a_rollback(self) -> None:
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> None:
            await take_in(verbs, sample, DELTA, buckets[:1])
            await verbs.rollback()
            await take_in(verbs, sample, DELTA, buckets)
            await verbs.commit()

        self.each(targets, main)
        expect_same(
            self.weights(sample, targets), self.held(sample, sample.after), "rollback, then the whole delta,"
        )

    def test_a_cancelled_apply_can_be_rolled_back(self) -> None:
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> None:
            await take_in(verbs, sample, DELTA, buckets[:1])
            decoded = await verbs.decode(buckets[1])
            await verbs.validate(decoded, **sample.numbers(DELTA), sequence=1)
            task = verbs.spawn(verbs.apply(decoded, undo=True), "apply")
            await verbs.clock.sleep_until(verbs.now_ns() + 1)
            await verbs.cancel(task)
            await verbs.rollback()

        self.each(targets, main)
        expect_same(
            self.weights(sample, targets),
            self.held(sample, sample.before),
            "a cancelled apply, then rollback,",
        )

    @DELTA_AND_FULL
    def test_a_commit_is_for_good_and_may_be_repeated(self, kind: str) -> None:
        """After it a rollback has nothing to undo, so an update is never half there."""
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(kind)

        async def main(verbs: Verbs, _: Any) -> None:
            await take_in(verbs, sample, kind, buckets)
            await verbs.commit()
            await verbs.commit()
            await verbs.rollback()

        self.each(targets, main)
        expect_same(
            self.weights(sample, targets), self.held(sample, sample.after), "commit twice, then rollback,"
        )

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_a_refused_bucket_writes_nothing(self, damage: str) -> None:
        """A good bucket, then a bad one: refused before its first write, and the good one can be undone."""
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)
        bad = DAMAGES[damage](buckets, sample.deployment.tensors)

        async def main(verbs: Verbs, _: Any) -> Any:
            await take_in(verbs, sample, DELTA, buckets[:1])
            return await attempt(take_in(verbs, sample, DELTA, [bad], first=1))

        for rank, (end,) in self.each(targets, main).items():
            expect_refused(
                end, WeightSyncError, f"decode, validate and apply of a bucket with {damage} on {rank}"
            )
        expected = sample.reference_apply(sample.before, DELTA, buckets[:1])
        expect_same(self.weights(sample, targets), expected, f"a bucket refused for {damage}")
        self.each(targets, lambda verbs, _: verbs.rollback())
        before = self.held(sample, sample.before)
        expect_same(self.weights(sample, targets), before, f"a bucket refused for {damage}, then rollback,")

    def test_a_bucket_is_applied_only_once_it_was_validated(self) -> None:
        sample = make_sample()
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> Any:
            return await attempt(verbs.apply(await verbs.decode(buckets[0]), undo=True))

        for rank, (end,) in self.each(targets, main).items():
            expect_refused(end, PlanMismatch, f"apply without validate on {rank}", "validate")
        expect_same(self.weights(sample, targets), self.held(sample, sample.before), "apply without validate")

    @DELTA_AND_FULL
    def test_an_update_that_lacks_a_bucket_does_not_end_well(self, kind: str) -> None:
        sample = make_sample()
        rank, buckets = sample.rollout_ranks[0], sample.reference_buckets(kind)
        early = renumbered(buckets[-1], len(buckets) - 2)

        async def main(verbs: Verbs) -> None:
            await take_in(verbs, sample, kind, [*buckets[:-2], early])

        found = self.ends({rank: main}, {rank: self.targets(sample)[rank]})[rank]
        expect_refused(
            found, WeightSyncError, f"validate of the trailer of a {kind} update that lacks a bucket"
        )

    # ---- the digest ----------------------------------------------------------------------------------------

    def test_digest_shares_of_every_rollout_are_those_of_the_trainer(self) -> None:
        """Replicas count once, padding never: any sharding of one state has one digest."""
        sample = make_sample()
        shares = self.each(self.targets(sample), lambda verbs, _: verbs.digest())
        for ref in sample.deployment.rollouts:
            found = combine(shares[rank] for rank in ref.ranks)
            expect_equal(
                found, sample.digest(sample.before), f"digest of rollout {ref.number}, summed over its ranks"
            )

    @EACH_SAMPLE
    def test_a_digest_follows_a_delta_and_its_rollback(self, what: str) -> None:
        """What is kept while writing is what a recount finds, before a rollback and after it."""
        sample = make_sample(what)
        targets, buckets = self.targets(sample), sample.reference_buckets(DELTA)

        async def main(verbs: Verbs, _: Any) -> tuple[tuple[int, int, int], ...]:
            first = await verbs.digest()
            await take_in(verbs, sample, DELTA, buckets)
            kept = await verbs.digest(), await verbs.digest(afresh=True)
            await verbs.rollback()
            back = await verbs.digest(), await verbs.digest(afresh=True)
            return (first, *kept), (first, *back)

        found = self.each(targets, main)
        for ref in sample.deployment.rollouts:
            for moment, state in enumerate((sample.after, sample.before)):
                what = f"digest of rollout {ref.number} {('after a delta', 'after its rollback')[moment]}"
                for which, words in ((1, "kept"), (2, "recounted")):
                    total = combine(found[rank][moment][which] for rank in ref.ranks)
                    expect_equal(total, sample.digest(state), f"{what}, {words}")

    def test_a_digest_sees_where_bits_are(self) -> None:
        """Two elements that change places leave every sum of values, and every sum of bits, as it was."""

        def swap(bits: Tensor) -> None:
            first = 0
            second = int((bits != bits[first]).nonzero()[0])
            bits[[first, second]] = bits[[second, first]]

        self._expect_seen(swap, "two elements of one weight changed places")

    def test_a_digest_sees_a_single_bit(self) -> None:
        def flip(bits: Tensor) -> None:
            bits[-1] ^= 1

        self._expect_seen(flip, "one bit was flipped")

    def test_digests_are_compared_as_numbers(self) -> None:
        sample = make_sample()
        rank = sample.rollout_ranks[0]

        async def main(verbs: Verbs) -> tuple[bool, bool]:
            return await verbs.compare_digests(-5, -5), await verbs.compare_digests(-5, 5)

        found = self.results({rank: main}, {rank: self.targets(sample)[rank]})[rank]
        expect_equal(found, (True, False), "compare_digests(-5, -5) and compare_digests(-5, 5)")

    # ---- helpers -------------------------------------------------------------------------------------------

    def _expect_seen(self, change: Callable[[Tensor], None], what: str) -> None:
        sample = make_sample()
        rank = sample.rollout_ranks[0]
        target, name = self.targets(sample)[rank], sample.deployment.tensors[0].name
        clean = self.each({rank: target}, lambda verbs, _: verbs.digest(afresh=True))[rank]
        weight = self.peek(target, WEIGHTS, name)
        change(int_view(weight))
        self.poke(target, WEIGHTS, name, weight)
        found = self.each({rank: target}, lambda verbs, _: verbs.digest(afresh=True))[rank]
        assert found != clean, (
            f"digest after {what} in {name}: got {found} as before, expected another number"
        )
