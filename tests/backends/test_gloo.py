"""What gloo does not forgive: differing sizes, pending operations, dead peers. None may end the process or hang."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from weightsync.backends.gloo_fabric import _broadcast
from weightsync.reference.buckets import Bucket, Heading, abort_bucket
from weightsync.reference.errors import (
    DeadlineExceeded,
    GroupBroken,
    PatchMismatch,
    PlanMismatch,
    WeightSyncError,
)
from weightsync.reference.members import Group, RankId
from weightsync.reference.rank import Verbs
from weightsync.reference.source import Part
from weightsync.testing.ranks import GlooRanks

A, B, C = RankId("trainer", 0, 0), RankId("trainer", 0, 1), RankId("rollout", 0, 0)
PAIR, ALL = Group("pair", 1, (A, B)), Group("all", 1, (A, B, C))
LONG_NS, SHORT_NS = 60_000_000_000, 300_000_000
BUCKET = abort_bucket(Heading("full", 1, 0, 1), "a payload of some bytes")

Main = Callable[[Verbs], Awaitable[Any]]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def run(group: Group, **mains: Main) -> dict[str, Any]:
    """Run a program per member, named by the last letters of the alphabet's first three; the group is connected."""
    ranks = {"a": A, "b": B, "c": C}

    def connected(main: Main) -> Any:
        async def program(verbs: Verbs) -> Any:
            await verbs.connect(group, verbs.now_ns() + LONG_NS)
            try:
                return await main(verbs)
            except WeightSyncError as error:
                return (error,)

        return program

    world = GlooRanks()
    ends = world.run({ranks[name]: connected(main) for name, main in mains.items()})
    assert world.left_over == []
    for end in ends.values():
        if isinstance(end, BaseException):
            raise end
    return {name: ends[ranks[name]] for name in mains if ranks[name] in ends}


def later(verbs: Verbs, ns: int = LONG_NS) -> int:
    return verbs.now_ns() + ns


def part(nbytes: int) -> Part:
    return Part(torch.zeros(nbytes, dtype=torch.uint8))


# ---- sizes that differ -----------------------------------------------------------------------------------------


def test_exchanges_of_different_lengths_break_the_group_on_every_rank() -> None:
    async def main(verbs: Verbs) -> Any:
        await verbs.exchange(PAIR, [1] * (2 + verbs.me.rank), later(verbs))

    for (error,) in run(PAIR, a=main, b=main).values():
        assert isinstance(error, GroupBroken)
        assert "'exchange' as operation 1 with 3" in str(error)


def test_gathers_of_different_sizes_break_the_group_on_every_rank() -> None:
    async def main(verbs: Verbs) -> Any:
        sizes = [8, 8] if verbs.me == A else [8, 64]
        await verbs.fabric.gather(PAIR, part(sizes[verbs.me.rank]), sizes, later(verbs))

    for (error,) in run(PAIR, a=main, b=main).values():
        assert isinstance(error, GroupBroken)
        assert "issued 'gather'" in str(error)


def test_an_exchange_and_a_gather_do_not_meet() -> None:
    async def exchange(verbs: Verbs) -> Any:
        await verbs.exchange(PAIR, [1], later(verbs))

    async def gather(verbs: Verbs) -> Any:
        await verbs.fabric.gather(PAIR, part(8), [8, 8], later(verbs))

    for (error,) in run(PAIR, a=exchange, b=gather).values():
        assert isinstance(error, GroupBroken)
        assert "'exchange'" in str(error)
        assert "'gather'" in str(error)


def test_a_bucket_that_differs_from_its_header_is_not_sent() -> None:
    header = BUCKET.header

    async def send(verbs: Verbs) -> Any:
        found = []
        for payload in (BUCKET.payload[:-1], BUCKET.payload.to(torch.int16)):
            with pytest.raises(PatchMismatch) as raised:
                await verbs.send(PAIR, Bucket(header, payload), later(verbs))
            found.append(str(raised.value))
        await verbs.send(PAIR, BUCKET, later(verbs))
        return found

    async def receive(verbs: Verbs) -> Any:
        return (await verbs.receive(PAIR, later(verbs))).payload

    ends = run(PAIR, a=send, b=receive)
    assert torch.equal(ends["b"], BUCKET.payload)
    assert "carries 22 bytes, its header announces 23" in ends["a"][0]
    assert "payload is torch.int16 on cpu, expected torch.uint8" in ends["a"][1]


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (bytes([255] * 64), "header starts with"),
        (BUCKET.header.pack()[:40] + bytes([16]) + BUCKET.header.pack()[41:], "header has check"),
    ],
    ids=["noise", "another size"],
)
def test_what_is_no_header_breaks_the_group(raw: bytes, said: str) -> None:
    """Before a payload of a wrong size is waited for, which would end the process."""

    async def send(verbs: Verbs) -> Any:
        fabric: Any = verbs.fabric
        head = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        await fabric._open[PAIR.key].finish(
            fabric._open[PAIR.key].issue(_broadcast(head), later(verbs)),
            "send",
            later(verbs),
        )
        await verbs.send(PAIR, BUCKET, later(verbs))

    async def receive(verbs: Verbs) -> Any:
        with pytest.raises(PatchMismatch, match=said):
            await verbs.receive(PAIR, later(verbs))
        await verbs.receive(PAIR, later(verbs))

    for (error,) in run(PAIR, a=send, b=receive).values():
        assert isinstance(error, GroupBroken)
        assert "trainer.1 received no header" in str(error)


def test_a_header_may_announce_no_payload() -> None:
    empty = abort_bucket(Heading("full", 1, 0, 1), "")
    assert empty.payload.numel() == 0

    async def send(verbs: Verbs) -> Any:
        await verbs.send(PAIR, empty, later(verbs))
        await verbs.send(PAIR, replace(BUCKET), later(verbs))

    async def receive(verbs: Verbs) -> Any:
        return [(await verbs.receive(PAIR, later(verbs))).payload.numel() for _ in range(2)]

    assert run(PAIR, a=send, b=receive)["b"] == [0, 23]


def test_a_strided_payload_arrives_as_it_reads() -> None:
    """gloo broadcasts the memory under a strided view, other elements than the view's, without a word."""
    twice = torch.stack([BUCKET.payload, 255 - BUCKET.payload], dim=1)
    strided = Bucket(BUCKET.header, twice[:, 0])
    assert not strided.payload.is_contiguous()

    async def send(verbs: Verbs) -> Any:
        await verbs.send(PAIR, strided, later(verbs))
        strides = torch.arange(16, dtype=torch.uint8)[::2]
        return await verbs.fabric.gather(PAIR, part(0), [0, 8], later(verbs)), strides

    async def receive(verbs: Verbs) -> Any:
        bucket = await verbs.receive(PAIR, later(verbs))
        await verbs.fabric.gather(PAIR, Part(torch.arange(16, dtype=torch.uint8)[::2]), [0, 8], later(verbs))
        return bucket.payload

    ends = run(PAIR, a=send, b=receive)
    assert torch.equal(ends["b"], BUCKET.payload)
    (_, gathered), strides = ends["a"]
    assert torch.equal(gathered, strides)


def test_only_the_root_sends_and_only_the_others_receive() -> None:
    async def main(verbs: Verbs) -> Any:
        wrong = verbs.receive(PAIR, later(verbs)) if verbs.me == A else verbs.send(PAIR, BUCKET, later(verbs))
        with pytest.raises(PlanMismatch, match="whose root"):
            await wrong
        return await verbs.exchange(PAIR, [1], later(verbs))

    assert run(PAIR, a=main, b=main) == {"a": [[1], [1]], "b": [[1], [1]]}


def test_a_part_of_another_size_than_announced_is_refused_before_the_peers_are_met() -> None:
    async def main(verbs: Verbs) -> Any:
        if verbs.me == B:
            with pytest.raises(
                PlanMismatch, match=r"trainer\.1 brings 4 bytes to a gather where its peers expect 8"
            ):
                await verbs.fabric.gather(PAIR, part(4), [8, 8], later(verbs))
        return await verbs.fabric.gather(PAIR, part(8), [8, 8], later(verbs))

    ends = run(PAIR, a=main, b=main)
    assert [len(getattr(one, "payload", one)) for one in ends["a"]] == [8, 8]


# ---- operations that are given up --------------------------------------------------------------------------------


def test_a_cancelled_receive_breaks_the_group_and_says_who_gave_up() -> None:
    """Its buffer may still be written to, and the next receive would take the other half."""

    async def send(verbs: Verbs) -> Any:
        await verbs.serve(later(verbs), B)
        while True:
            await verbs.send(PAIR, BUCKET, later(verbs))

    async def receive(verbs: Verbs) -> Any:
        waiting = verbs.spawn(verbs.receive(PAIR, later(verbs)), "waiting")
        with pytest.raises(DeadlineExceeded):
            await verbs.join([waiting], later(verbs, 20_000_000))
        await verbs.cancel(waiting)
        await verbs.post(A, "cancelled", {})
        await verbs.receive(PAIR, later(verbs))

    for (error,) in run(PAIR, a=send, b=receive).values():
        assert isinstance(error, GroupBroken)
        assert "trainer.1 gave 'receive' up half-way" in str(error)


def test_closing_with_an_operation_under_way_blocks_nobody_and_frees_the_peers() -> None:
    """The process group's destructor waits for the operation; the members are told over the control plane."""

    async def closes(verbs: Verbs) -> Any:
        waiting = verbs.spawn(verbs.exchange(ALL, [1], later(verbs, 3_000_000_000)), "waiting")
        for peer in (B, C):
            await verbs.serve(later(verbs), peer)
        with pytest.raises(DeadlineExceeded):  # by now it waits
            await verbs.join([waiting], later(verbs, 20_000_000))
        began = verbs.now_ns()
        await verbs.disconnect(ALL)
        took = verbs.now_ns() - began
        with pytest.raises(GroupBroken, match=r"trainer\.0 closed it"):
            await verbs.join([waiting], later(verbs))
        return took

    async def waits(verbs: Verbs) -> Any:
        waiting = verbs.spawn(verbs.exchange(ALL, [1], later(verbs)), "waiting")
        await verbs.post(A, "waiting", {})
        await verbs.join([waiting], later(verbs))

    async def never(verbs: Verbs) -> Any:
        await verbs.post(A, "connected", {})
        await verbs.receive(ALL, later(verbs))

    ends = run(ALL, a=closes, b=waits, c=never)
    assert ends["a"] < 1_000_000_000
    for name in ("b", "c"):
        (error,) = ends[name]
        assert isinstance(error, GroupBroken)
        assert "trainer.0 closed it" in str(error)


def test_a_killed_rank_with_an_operation_under_way_is_named() -> None:
    world = GlooRanks()

    async def connected(verbs: Verbs, work: Main) -> Any:
        await verbs.connect(ALL, later(verbs))
        try:
            await work(verbs)
        except WeightSyncError as error:
            return (error,)

    async def die(verbs: Verbs) -> Any:
        verbs.spawn(verbs.receive(ALL, later(verbs, 1_000_000_000)), "waiting")
        await verbs.serve(later(verbs), A)
        world.kill(C)
        await verbs.serve(None, A)

    async def survive(verbs: Verbs) -> Any:
        await verbs.post(C, "die", {})
        await verbs.exchange(ALL, [1, 2], later(verbs))

    ends = world.run(
        {
            A: lambda v: connected(v, survive),
            B: lambda v: connected(v, survive),
            C: lambda v: connected(v, die),
        }
    )
    assert C not in ends
    for rank in (A, B):
        (error,) = ends[rank]
        assert "rollout0.0" in str(error)
        assert isinstance(error, GroupBroken)
