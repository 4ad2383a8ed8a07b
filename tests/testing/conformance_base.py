"""What every part of the conformance kit stands on: what an author supplies, and how the kit speaks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor

from weightsync.reference.buckets import DELTA, FULL
from weightsync.reference.members import Group, RankId
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.rank import Verbs
from weightsync.testing.conformance_sample import EPOCH, SAMPLES, Sample
from weightsync.testing.memory import LIVE, WEIGHTS, Memory
from weightsync.testing.worlds import Program, World

EACH_SAMPLE = pytest.mark.parametrize("what", SAMPLES)
DELTA_AND_FULL = pytest.mark.parametrize("kind", [DELTA, FULL])


class ConformanceBase(Memory):
    """What an author supplies, and how the kit runs it.

    Attributes:
        limit_ns: deadline of what must work.
        patience_ns: deadline of what waits for a rank that never comes; a real clock waits its whole length.
    """

    limit_ns = 20_000_000_000
    patience_ns = 300_000_000

    # ---- the author's --------------------------------------------------------------------------------------

    @abstractmethod
    def make_world(self) -> World:
        """The ranks of one run; every call gives a new world."""

    def wire(self, bucket: Any) -> bytes:
        """The bytes of a bucket as they go on the wire."""
        return wire_bytes(bucket)

    # ---- the kit's -----------------------------------------------------------------------------------------

    def sources(self, sample: Sample, state: Mapping[str, Tensor] | None = None) -> dict[RankId, Any]:
        """Every trainer rank's bytes, at ``state`` (``before``)."""
        state = sample.before if state is None else state
        return {
            rank: self.make_source(sample.plan, rank.rank, sample.deployment.shards(rank.rank, state))
            for rank in sample.trainers
        }

    def targets(self, sample: Sample, state: Mapping[str, Tensor] | None = None) -> dict[RankId, Any]:
        """Every rollout rank's bytes, at ``state`` (``before``)."""
        state = sample.before if state is None else state
        return {
            rank: self.make_target(sample.deployment, rank, sample.deployment.weights(rank, state))
            for rank in sample.rollout_ranks
        }

    def train(self, sample: Sample, rank: RankId, source: Any, state: Mapping[str, Tensor]) -> None:
        """An optimizer step on one trainer rank."""
        for name, tensor in sample.deployment.shards(rank.rank, state).items():
            self.poke(source, LIVE, name, tensor)

    def ends(
        self, programs: Mapping[RankId, Program], holdings: Mapping[RankId, Any] | None = None
    ) -> dict[RankId, Any]:
        """What each program returned or the Exception it ended with, in a world of its own."""
        return self.make_world().run(programs, holdings or {})

    def results(
        self, programs: Mapping[RankId, Program], holdings: Mapping[RankId, Any] | None = None
    ) -> dict[RankId, Any]:
        """What each program returned; the first Exception is raised, with the rank's name noted."""
        ends = self.ends(programs, holdings)
        for rank, end in ends.items():
            if isinstance(end, Exception):
                end.add_note(f"on {rank}")
                raise end
        return ends

    def each(
        self, holdings: Mapping[RankId, Any], program: Callable[[Verbs, Any], Awaitable[Any]]
    ) -> dict[RankId, Any]:
        """``results`` of one program that every rank runs with its own bytes."""

        def bound(holding: Any) -> Program:
            async def main(verbs: Verbs) -> Any:
                return await program(verbs, holding)

            return main

        return self.results({rank: bound(holding) for rank, holding in holdings.items()}, holdings)

    def bits(
        self, holdings: Mapping[RankId, Any], memory: str, names: Callable[[RankId], Sequence[str]]
    ) -> dict[tuple[RankId, str], Tensor]:
        """(rank, name) -> copy of what every rank's memory holds."""
        return {
            (rank, name): self.peek(holding, memory, name)
            for rank, holding in holdings.items()
            for name in names(rank)
        }

    def weights(self, sample: Sample, targets: Mapping[RankId, Any]) -> dict[tuple[RankId, str], Tensor]:
        """What every rollout rank holds."""
        return self.bits(targets, WEIGHTS, lambda rank: tuple(sample.deployment.rollout_maps(rank)))

    def held(self, sample: Sample, state: Mapping[str, Tensor]) -> dict[tuple[RankId, str], Tensor]:
        """What every rollout rank must hold of a state."""
        return {
            (rank, name): tensor
            for rank in sample.rollout_ranks
            for name, tensor in sample.deployment.weights(rank, state).items()
        }


def wire_bytes(bucket: Any) -> bytes:
    """The bytes of a bucket as they go on the wire."""
    raw: bytes = bucket.header.pack() + bytes(bucket.payload.cpu().numpy())
    return raw


def trainer_group(sample: Sample) -> Group:
    """The trainer's ranks as a data group."""
    return Group("trainer", EPOCH, sample.trainers)


async def attempt(effect: Awaitable[Any]) -> tuple[Any]:
    """What a verb returned or raised, in a tuple: a program that returns an Exception counts as failed."""
    try:
        return (await effect,)
    except Exception as error:
        return (error,)


async def take_in(verbs: Verbs, sample: Sample, kind: str, buckets: Sequence[Any], *, first: int = 0) -> None:
    """Decode, validate and apply buckets on one rollout rank, a delta with its old bits kept; no commit."""
    for sequence, bucket in enumerate(buckets, first):
        decoded = await verbs.decode(bucket)
        await verbs.validate(decoded, **sample.numbers(kind), sequence=sequence)
        if decoded.end is None:
            await verbs.apply(decoded, undo=kind == DELTA)


def expect_same(found: Mapping[Any, Tensor], expected: Mapping[Any, Tensor], call: str) -> None:
    """Every tensor bit for bit; the sentence says which element is wrong, its bits, and after which call."""
    __tracebackhide__ = True
    assert set(found) == set(expected), (
        f"{call} left {sorted(map(str, found))}, expected {sorted(map(str, expected))}"
    )
    for key, tensor in expected.items():
        expect_bits(
            found[key], tensor, f"{call} on {' '.join(map(str, key)) if isinstance(key, tuple) else key}"
        )


def expect_bits(found: Tensor, expected: Tensor, call: str) -> None:
    """One tensor bit for bit."""
    __tracebackhide__ = True
    if same_bits(found, expected):
        return
    kinds = [f"{one.dtype} {list(one.shape)}" for one in (found, expected)]
    assert kinds[0] == kinds[1], f"{call}: got {kinds[0]}, expected {kinds[1]}"
    got, want = int_view(found), int_view(expected)
    wrong = (got != want).nonzero().reshape(-1)
    at, mask = int(wrong[0]), (1 << 8 * found.itemsize) - 1
    raise AssertionError(
        f"{call}: {len(wrong)} of {len(want)} elements are wrong, the first at position {at}: got bits "
        f"{int(got[at]) & mask:#x}, expected {int(want[at]) & mask:#x}"
    )


def expect_bytes(found: bytes, expected: bytes, call: str) -> None:
    """Equal bytes; the sentence says which is wrong."""
    __tracebackhide__ = True
    assert len(found) == len(expected), f"{call}: got {len(found)} bytes, expected {len(expected)}"
    wrong = [at for at, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b]
    assert not wrong, (
        f"{call}: {len(wrong)} of {len(expected)} bytes are wrong, the first at byte {wrong[0]}: got "
        f"{found[wrong[0]]:#04x}, expected {expected[wrong[0]]:#04x}"
    )


def expect_equal(found: Any, expected: Any, call: str) -> None:
    """Equal values, with a whole sentence."""
    __tracebackhide__ = True
    assert found == expected, f"{call}: got {found!r}, expected {expected!r}"


def expect_refused(
    end: Any, kinds: type[Exception] | tuple[type[Exception], ...], call: str, *words: str
) -> None:
    """An Exception of one of these kinds whose text holds every word."""
    __tracebackhide__ = True
    wanted = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    assert isinstance(end, kinds), f"{call}: got {end!r}, expected {wanted}"
    for word in words:
        assert word in str(end), f"{call}: got the text {str(end)!r}, expected it to name {word!r}"
