"""Conformance of a trainer rank's bytes: snapshots, their attributes, the diff, the digest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.digest import combine
from weightsync.reference.errors import StaleVersion
from weightsync.reference.members import RankId
from weightsync.reference.params import TPAttributes, compare
from weightsync.reference.rank import Verbs
from weightsync.testing.conformance_base import (
    EACH_SAMPLE,
    ConformanceBase,
    expect_equal,
    expect_refused,
    expect_same,
)
from weightsync.testing.conformance_sample import Sample, make_sample
from weightsync.testing.memory import LIVE, SLOTS


class SourceConformance(ConformanceBase):
    """A snapshot is a copy, attributes and all, that no later step reaches; a diff sees bits."""

    @EACH_SAMPLE
    def test_a_snapshot_has_every_bit(self, what: str) -> None:
        sample = make_sample(what)
        sources = self.sources(sample)
        self.each(sources, lambda verbs, _: verbs.snapshot(0))
        expect_same(self._slot(sample, sources, 0), self._shards(sample, sample.before), "snapshot(0)")

    def test_a_snapshot_has_every_bit_of_parameters_of_any_strides(self) -> None:
        sample = make_sample()
        sources = {}
        for rank in sample.trainers:
            shards = sample.deployment.shards(rank.rank, sample.before)
            for name, tensor in shards.items():
                turned = torch.empty(tensor.shape[::-1], dtype=tensor.dtype)
                shards[name] = torch.nn.Parameter(
                    turned.permute(*reversed(range(tensor.dim()))), requires_grad=False
                )
            sources[rank] = self.make_source(sample.plan, rank.rank, shards)
            self.train(sample, rank, sources[rank], sample.before)
        self.each(sources, lambda verbs, _: verbs.snapshot(0))
        expect_same(
            self._slot(sample, sources, 0),
            self._shards(sample, sample.before),
            "snapshot(0) of transposed parameters",
        )

    def test_a_snapshot_is_independent_of_later_training_steps(self) -> None:
        sample = make_sample()
        sources = self.sources(sample)
        self.each(sources, lambda verbs, _: verbs.snapshot(0))
        for rank, source in sources.items():
            self.train(sample, rank, source, sample.after)
        expect_same(
            self._slot(sample, sources, 0),
            self._shards(sample, sample.before),
            "snapshot(0), then a training step,",
        )

    def test_the_two_slots_are_independent(self) -> None:
        sample = make_sample()
        sources = self.sources(sample)
        self._snapshot_both(sample, sources)
        expect_same(
            self._slot(sample, sources, 0),
            self._shards(sample, sample.before),
            "snapshot(1) after snapshot(0)",
        )
        expect_same(self._slot(sample, sources, 1), self._shards(sample, sample.after), "snapshot(1)")

    def test_a_snapshot_carries_every_attribute(self) -> None:
        sample = make_sample()
        sources = self.sources(sample)
        self.each(sources, lambda verbs, _: verbs.snapshot(0))
        self._expect_attributes(sample, sources, "snapshot(0)")

    def test_attributes_are_carried_at_every_snapshot_not_at_the_first_alone(self) -> None:
        sample = make_sample()
        sources = self.sources(sample)
        self.each(sources, lambda verbs, _: verbs.snapshot(0))
        for rank, source in sources.items():
            for number, (name, tensor) in enumerate(
                sample.deployment.shards(rank.rank, sample.after).items()
            ):
                TPAttributes({"partition_stride": number, "allreduce": True} if number % 2 else {}).stamp(
                    tensor
                )
                self.poke(source, LIVE, name, tensor)
        self.each(sources, lambda verbs, _: verbs.snapshot(0))
        self._expect_attributes(sample, sources, "a second snapshot(0), after the attributes changed,")

    @EACH_SAMPLE
    def test_a_diff_counts_exactly_the_elements_whose_bits_changed(self, what: str) -> None:
        sample = make_sample(what)
        sources = self.sources(sample)
        self._snapshot_both(sample, sources)
        changes = self.each(sources, lambda verbs, _: verbs.diff(1, 0)).values()
        pieces = [sum(column) for column in zip(*(one.counts for one in changes), strict=True)]
        counts = sample.plan.tensor_counts(pieces)
        for meta, found, expected in zip(sample.deployment.tensors, counts, sample.changed(), strict=True):
            expect_equal(found, expected, f"changed elements of {meta.name} after diff(1, 0)")

    @EACH_SAMPLE
    def test_a_diff_of_equal_bits_is_empty(self, what: str) -> None:
        sample = make_sample(what)
        sources = self.sources(sample)

        async def main(verbs: Verbs, _: Any) -> Any:
            await verbs.snapshot(0)
            await verbs.snapshot(1)
            return (await verbs.diff(1, 0)).nnz

        found = self.each(sources, main)
        expect_equal(
            sum(found.values()), 0, "elements in diff(1, 0) of two snapshots of one state, NaNs among them"
        )

    def test_a_diff_advances_nothing(self) -> None:
        sample = make_sample()
        sources = self.sources(sample)
        self._snapshot_both(sample, sources)

        async def main(verbs: Verbs, _: Any) -> tuple[Any, Any]:
            return (await verbs.diff(1, 0)).counts, (await verbs.diff(1, 0)).counts

        for rank, (first, second) in self.each(sources, main).items():
            expect_equal(second, first, f"counts of a repeated diff(1, 0) on {rank}")

    def test_a_diff_without_a_base_counts_every_owned_element(self) -> None:
        sample = make_sample()
        sources = self.sources(sample)

        async def main(verbs: Verbs, _: Any) -> Any:
            await verbs.snapshot(0)
            return (await verbs.diff(0, None)).nnz

        numel = sum(meta.numel for meta in sample.deployment.tensors)
        expect_equal(
            sum(self.each(sources, main).values()), numel, "elements in diff(0, None) over all ranks"
        )

    def test_a_diff_with_a_slot_that_holds_nothing_is_refused(self) -> None:
        sample = make_sample()
        rank = sample.trainers[0]

        async def main(verbs: Verbs) -> None:
            await verbs.snapshot(0)
            await verbs.diff(0, 1)

        source = self.sources(sample)[rank]
        expect_refused(
            self.ends({rank: main}, {rank: source})[rank], StaleVersion, "diff(0, 1) before snapshot(1)", "1"
        )

    @pytest.mark.parametrize("diffed", [True, False], ids=["after a diff", "alone"])
    def test_digest_shares_add_up_to_the_reference_digest(self, diffed: bool) -> None:
        sample = make_sample()
        sources = self.sources(sample)

        async def main(verbs: Verbs, source: Any) -> tuple[int, int]:
            await verbs.snapshot(0)
            old = await verbs.source_digest(0)
            self.train(sample, verbs.me, source, sample.after)
            await verbs.snapshot(1)
            if diffed:
                await verbs.diff(1, 0)
            return old, await verbs.source_digest(1)

        shares = self.each(sources, main).values()
        for slot, state in enumerate((sample.before, sample.after)):
            found = combine(share[slot] for share in shares)
            expect_equal(found, sample.digest(state), f"source_digest({slot}), summed over the ranks")

    # ---- helpers -------------------------------------------------------------------------------------------

    def _snapshot_both(self, sample: Sample, sources: dict[RankId, Any]) -> None:
        """``before`` in slot 0, ``after`` in slot 1."""

        async def main(verbs: Verbs, source: Any) -> None:
            await verbs.snapshot(0)
            self.train(sample, verbs.me, source, sample.after)
            await verbs.snapshot(1)

        self.each(sources, main)

    def _slot(
        self, sample: Sample, sources: dict[RankId, Any], slot: int
    ) -> dict[tuple[RankId, str], Tensor]:
        return self.bits(sources, SLOTS[slot], lambda rank: tuple(sample.deployment.trainer_maps[rank.rank]))

    def _shards(self, sample: Sample, state: dict[str, Tensor]) -> dict[tuple[RankId, str], Tensor]:
        return {
            (rank, name): tensor.detach()
            for rank in sample.trainers
            for name, tensor in sample.deployment.shards(rank.rank, state).items()
        }

    def _expect_attributes(self, sample: Sample, sources: dict[RankId, Any], call: str) -> None:
        for rank, source in sources.items():
            for name in sample.deployment.trainer_maps[rank.rank]:
                differences = compare(self.peek(source, SLOTS[0], name), self.peek(source, LIVE, name))
                said = "; ".join(differences)
                assert not differences, f"{call} on {rank}: {name} differs from its live parameter: {said}"
