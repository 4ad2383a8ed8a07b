"""Conformance of data groups: everything arrives, in order, bit for bit, in memory of one's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from weightsync.reference.buckets import FULL, Bucket, abort_bucket
from weightsync.reference.errors import (
    DeadlineExceeded,
    GroupBroken,
    PeerLost,
    WeightSyncError,
)
from weightsync.reference.members import Group, RankId
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Part
from weightsync.testing.conformance_base import (
    ConformanceBase,
    attempt,
    expect_bytes,
    expect_equal,
    expect_refused,
)
from weightsync.testing.conformance_sample import EPOCH, make_sample

LOST = (DeadlineExceeded, GroupBroken, PeerLost)

A, B, C = RankId("trainer", 0, 0), RankId("rollout", 0, 0), RankId("rollout", 1, 0)
ALL = Group("data", EPOCH, (A, B, C))
EXTREMES = (0, 1, -1, (1 << 63) - 1, -(1 << 63))


class GroupConformance(ConformanceBase):
    """What goes in comes out, in order, and what came out belongs to whoever received it."""

    def test_buckets_arrive_in_order_and_bit_for_bit(self) -> None:
        buckets = self._buckets()

        async def send(verbs: Verbs) -> None:
            for bucket in buckets:
                await verbs.send(ALL, bucket, verbs.now_ns() + self.limit_ns)

        async def receive(verbs: Verbs) -> list[bytes]:
            found = [await verbs.receive(ALL, verbs.now_ns() + self.limit_ns) for _ in buckets]
            return [self.wire(bucket) for bucket in found]

        results = self.results(self._connected({A: send, B: receive, C: receive}))
        for rank in (B, C):
            for number, (found, bucket) in enumerate(zip(results[rank], buckets, strict=True)):
                expect_bytes(found, self.wire(bucket), f"bytes of receive number {number} on {rank}")

    def test_what_was_received_belongs_to_the_receiver(self) -> None:
        bucket = self._buckets()[0]

        async def send(verbs: Verbs) -> None:
            mine, deadline_ns = bucket.copy(), verbs.now_ns() + self.limit_ns
            await verbs.send(ALL, mine, deadline_ns)
            await verbs.exchange(ALL, [0], deadline_ns)
            mine.payload.fill_(0xA5)
            await verbs.exchange(ALL, [0], deadline_ns)

        async def receive(verbs: Verbs) -> bytes:
            deadline_ns = verbs.now_ns() + self.limit_ns
            found = await verbs.receive(ALL, deadline_ns)
            if verbs.me == B:
                found.payload.fill_(0x5A)
            await verbs.exchange(ALL, [0], deadline_ns)
            await verbs.exchange(ALL, [0], deadline_ns)
            return self.wire(found)

        found = self.results(self._connected({A: send, B: receive, C: receive}))[C]
        expect_bytes(
            found,
            self.wire(bucket),
            "a received bucket, after its sender and another receiver wrote to theirs",
        )

    def test_a_sent_bucket_may_be_overwritten_once_send_returned(self) -> None:
        bucket = self._buckets()[0]

        async def send(verbs: Verbs) -> None:
            mine = bucket.copy()
            await verbs.send(ALL, mine, verbs.now_ns() + self.limit_ns)
            mine.payload.fill_(0xA5)

        async def receive(verbs: Verbs) -> bytes:
            return self.wire(await verbs.receive(ALL, verbs.now_ns() + self.limit_ns))

        results = self.results(self._connected({A: send, B: receive, C: receive}))
        for rank in (B, C):
            expect_bytes(
                results[rank],
                self.wire(bucket),
                f"bucket received on {rank}, its sender's memory overwritten",
            )

    def test_a_gathered_part_may_be_overwritten_once_gather_returned(self) -> None:
        async def main(verbs: Verbs) -> Any:
            deadline_ns, part = (
                verbs.now_ns() + self.limit_ns,
                torch.full((8,), verbs.me.rollout, dtype=torch.uint8),
            )
            found = await verbs.fabric.gather(ALL, Part(part), [8, 8, 8], deadline_ns)
            part.fill_(0xA5)
            await verbs.exchange(ALL, [0], deadline_ns)
            return None if found is None else [_bytes(one) for one in found]

        found = self.results(self._connected(dict.fromkeys(ALL.members, main)))[A]
        expected = [bytes([rank.rollout] * 8) for rank in ALL.members]
        expect_equal(found[1:], expected[1:], "parts at the root, after the members overwrote theirs")

    def test_an_exchange_gives_everybody_everything_in_member_order(self) -> None:
        vectors = {
            rank: [number, *EXTREMES[number:], *EXTREMES[:number]] for number, rank in enumerate(ALL.members)
        }

        async def main(verbs: Verbs) -> list[list[int]]:
            return await verbs.exchange(ALL, vectors[verbs.me], verbs.now_ns() + self.limit_ns)

        for rank, found in self.results(self._connected(dict.fromkeys(ALL.members, main))).items():
            rows = [list(row) for row in found]
            expect_equal(rows, list(vectors.values()), f"rows of an exchange on {rank}")

    @pytest.mark.parametrize("sizes", [(8, 24, 16), (0, 16, 0), (16, 0, 8), (0, 0, 0)], ids=str)
    def test_a_gather_gives_the_root_every_part_in_member_order(self, sizes: Sequence[int]) -> None:
        """Parts of no byte are parts: a rank without a change takes its turn."""
        parts = {
            rank: torch.full((n,), 10 * n, dtype=torch.uint8)
            for rank, n in zip(ALL.members, sizes, strict=True)
        }

        async def main(verbs: Verbs) -> Any:
            deadline_ns = verbs.now_ns() + self.limit_ns
            found = await verbs.fabric.gather(ALL, Part(parts[verbs.me].clone()), sizes, deadline_ns)
            await verbs.exchange(ALL, [0], deadline_ns)
            return None if found is None else [_bytes(part) for part in found]

        results = self.results(self._connected(dict.fromkeys(ALL.members, main)))
        expected = [bytes(part.numpy()) for part in parts.values()]
        expect_equal(results[A], expected, f"parts of a gather of {list(sizes)} bytes at the root")
        for rank in (B, C):
            expect_equal(results[rank], None, f"parts of a gather on {rank}, which is not the root")

    def test_a_part_of_another_size_than_announced_is_refused(self) -> None:
        """Not sent short, and not filled up: the size is what the peers have made room for."""

        async def main(verbs: Verbs) -> Any:
            nbytes = 8 if verbs.me == B else 16
            part = Part(torch.zeros(nbytes, dtype=torch.uint8))
            deadline_ns = verbs.now_ns() + self.patience_ns
            return await attempt(verbs.fabric.gather(ALL, part, [16, 16, 16], deadline_ns))

        (end,) = self.results(self._connected(dict.fromkeys(ALL.members, main)))[B]
        expect_refused(end, WeightSyncError, f"gather of 8 bytes where 16 were announced, on {B}")

    def test_a_bucket_that_is_not_what_its_header_says_never_counts_as_received(self) -> None:
        good = self._buckets()[0]
        long = Bucket(good.header, torch.cat([good.payload, torch.zeros(64, dtype=torch.uint8)]))
        sample = make_sample()
        holdings = {B: self.targets(sample)[sample.rollout_ranks[0]]}

        async def send(verbs: Verbs) -> Any:
            return await attempt(verbs.send(ALL, long, verbs.now_ns() + self.patience_ns))

        async def receive(verbs: Verbs) -> Any:
            async def both() -> Any:
                return await verbs.decode(await verbs.receive(ALL, verbs.now_ns() + self.patience_ns))

            return await attempt(both())

        holdings[C] = self.targets(sample)[sample.rollout_ranks[0]]
        results = self.results(self._connected({A: send, B: receive, C: receive}), holdings)
        for rank in (B, C):
            (end,) = results[rank]
            expect_refused(
                end, WeightSyncError, f"receive and decode of a payload of 64 bytes too many, on {rank}"
            )

    # ---- helpers -------------------------------------------------------------------------------------------

    def _connected(self, programs: Mapping[RankId, Callable[[Verbs], Awaitable[Any]]]) -> dict[RankId, Any]:
        return connected(programs, self.limit_ns)

    def _buckets(self) -> list[Bucket]:
        """Buckets of several sizes, among them a trailer and a payload of no byte."""
        buckets = make_sample().reference_buckets(FULL)
        return [*buckets, abort_bucket(buckets[-1].header.heading, "")]


def connected(
    programs: Mapping[RankId, Callable[[Verbs], Awaitable[Any]]], limit_ns: int
) -> dict[RankId, Any]:
    """The programs, each after its rank connected the group of all."""

    def after(program: Callable[[Verbs], Awaitable[Any]]) -> Any:
        async def main(verbs: Verbs) -> Any:
            await verbs.connect(ALL, verbs.now_ns() + limit_ns)
            return await program(verbs)

        return main

    return {rank: after(program) for rank, program in programs.items()}


def _bytes(part: Any) -> bytes:
    """A gathered part is a ``Part``, or its bytes as a tensor."""
    payload: torch.Tensor = getattr(part, "payload", part)
    return bytes(payload.cpu().numpy())
