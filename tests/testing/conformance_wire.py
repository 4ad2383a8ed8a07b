"""Conformance of the wire: a backend encodes what the reference encodes, and each reads the other's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import Tensor

from weightsync.reference.buckets import DELTA, END_BYTES, FULL, Bucket, end_bucket
from weightsync.reference.errors import WeightSyncError
from weightsync.reference.rank import Verbs
from weightsync.testing.conformance_base import (
    DELTA_AND_FULL,
    EACH_SAMPLE,
    ConformanceBase,
    attempt,
    expect_bytes,
    expect_equal,
    expect_refused,
    expect_same,
    take_in,
    trainer_group,
    wire_bytes,
)
from weightsync.testing.conformance_sample import Sample, make_sample


class WireConformance(ConformanceBase):
    """Parity laws: one side by the backend, one by the reference, since a round trip hides paired faults."""

    @DELTA_AND_FULL
    @EACH_SAMPLE
    def test_buckets_are_byte_for_byte_those_of_the_reference(self, what: str, kind: str) -> None:
        sample = make_sample(what)
        found, expected = self.encoded(sample, kind), sample.reference_buckets(kind)[:-1]
        expect_equal(len(found), len(expected), f"number of {kind} buckets that gather and encode gave")
        for number, (bucket, wanted) in enumerate(zip(found, expected, strict=True)):
            expect_bytes(self.wire(bucket), wire_bytes(wanted), f"bucket {number} of the {kind} update")

    @DELTA_AND_FULL
    def test_the_plan_foretells_every_byte(self, kind: str) -> None:
        sample = make_sample()
        found = sum(bucket.nbytes for bucket in self.encoded(sample, kind)) + END_BYTES
        counts = None if kind == FULL else sample.changed()
        expect_equal(
            found, sample.plan.update_bytes(counts), f"bytes of the {kind} update, its trailer included"
        )

    @DELTA_AND_FULL
    def test_the_reference_applies_what_the_backend_encodes(self, kind: str) -> None:
        sample = make_sample()
        buckets = [self._as_reference(bucket) for bucket in self.encoded(sample, kind)]
        nbytes = sum(bucket.nbytes for bucket in buckets)
        head = sample.heading(kind).at(len(buckets))
        buckets.append(end_bucket(head, sample.digest(sample.after), len(buckets), nbytes))
        found = sample.reference_apply(sample.before, kind, buckets)
        expect_same(
            found, self.held(sample, sample.after), f"the reference's apply of the backend's {kind} update"
        )

    @DELTA_AND_FULL
    @EACH_SAMPLE
    def test_the_backend_applies_what_the_reference_encodes(self, what: str, kind: str) -> None:
        sample = make_sample(what)
        targets, buckets = self.targets(sample), sample.reference_buckets(kind)
        self.each(targets, lambda verbs, _: take_in(verbs, sample, kind, buckets))
        found, held = self.weights(sample, targets), self.held(sample, sample.after)
        expect_same(found, held, f"apply of the reference's {kind} update")

    def test_a_delta_travels_from_backend_to_backend(self) -> None:
        sample = make_sample()
        targets, buckets = self.targets(sample), self.encoded(sample, DELTA)
        self.each(targets, lambda verbs, _: take_in(verbs, sample, DELTA, buckets))
        expect_same(self.weights(sample, targets), self.held(sample, sample.after), "a delta's round trip")

    @pytest.mark.parametrize("silent", [0, 1], ids=["lead", "other"])
    def test_a_rank_without_a_change_takes_its_turn_in_every_gather(self, silent: int) -> None:
        sample = make_sample()
        keep = sample.deployment.shards(silent, sample.before)
        change = sample.deployment.shards(1 - silent, sample.after)
        shards = [keep, change] if silent == 0 else [change, keep]
        state = sample.deployment.export(shards)
        found, expected = self.encoded(sample, DELTA, state), sample.reference_buckets(DELTA, state)[:-1]
        expect_equal(
            len(found), len(expected), f"buckets of a delta in which trainer.{silent} changed nothing"
        )
        for number, (bucket, wanted) in enumerate(zip(found, expected, strict=True)):
            expect_bytes(
                self.wire(bucket),
                wire_bytes(wanted),
                f"bucket {number} of a delta in which trainer.{silent} changed nothing",
            )

    def test_an_update_without_a_change_has_no_bucket(self) -> None:
        sample = make_sample()
        expect_equal(
            self.encoded(sample, DELTA, sample.before), [], "buckets of a delta in which nothing changed"
        )

    def test_encoding_a_bucket_again_gives_the_same_bytes(self) -> None:
        sample = make_sample()
        twice = self.encoded(sample, DELTA, times=2)
        for first, second in zip(twice[::2], twice[1::2], strict=True):
            expect_equal(
                self.wire(second), self.wire(first), "bytes of a bucket that was encoded a second time"
            )

    @DELTA_AND_FULL
    def test_the_backend_refuses_damage_in_every_bucket(self, kind: str) -> None:
        sample = make_sample()
        rank, buckets = sample.rollout_ranks[0], sample.reference_buckets(kind)
        target = self.targets(sample)[rank]

        async def main(verbs: Verbs) -> list[Any]:
            found: list[Any] = []
            for bucket in buckets:
                damaged = bucket.copy()
                damaged.payload[-1] ^= 1
                found += await attempt(verbs.decode(damaged))
            return found

        for number, found in enumerate(self.results({rank: main}, {rank: target})[rank]):
            expect_refused(found, WeightSyncError, f"decode of bucket {number} with one bit flipped")

    # ---- helpers -------------------------------------------------------------------------------------------

    def encoded(
        self, sample: Sample, kind: str, state: Mapping[str, Tensor] | None = None, *, times: int = 1
    ) -> list[Any]:
        """The buckets of the update from ``before`` to ``state`` (``after``), by the backend's verbs."""
        sources, group = self.sources(sample), trainer_group(sample)
        state, full = sample.after if state is None else state, kind == FULL

        async def main(verbs: Verbs, source: Any) -> list[Any]:
            deadline_ns = verbs.now_ns() + self.limit_ns
            buckets: list[Any] = []
            await verbs.connect(group, deadline_ns)
            await verbs.snapshot(0)
            self.train(sample, verbs.me, source, state)
            await verbs.snapshot(1)
            changes = await verbs.diff(1, 0)
            matrix = await verbs.exchange(group, changes.counts, deadline_ns)
            counts = [sum(column) for column in zip(*matrix, strict=True)]
            for rows in sample.plan.groups(None if full else counts):
                sizes = sample.plan.part_sizes(rows, matrix)
                given = None if full else changes
                parts = await verbs.gather(group, rows, 1, given, sizes, deadline_ns)
                if parts is None:
                    continue
                merged = await verbs.merge(parts, rows, matrix)
                for spec in rows.buckets:
                    head = sample.heading(kind).at(len(buckets) // times)
                    for _ in range(times):
                        buckets.append(await verbs.encode(merged, spec, head))
            return buckets

        buckets: list[Any] = self.each(sources, main)[sample.trainers[0]]
        return buckets

    def _as_reference(self, bucket: Any) -> Bucket:
        return Bucket(bucket.header, bucket.payload.cpu())
