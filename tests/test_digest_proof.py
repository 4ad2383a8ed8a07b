"""What comparing digests proves at every update, what only a recount shows, and that an audit is one on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from weightsync.reference.audit import AuditReport
from weightsync.reference.buckets import DELTA, END, Range, end_bucket, pack_bucket, unpack
from weightsync.reference.detect import Differing
from weightsync.reference.digest import combine
from weightsync.reference.errors import StaleVersion
from weightsync.reference.members import Group, RankId
from weightsync.reference.params import int_view
from weightsync.reference.protocol import Outcome, ProtocolSettings
from weightsync.reference.source import Source
from weightsync.reference.target import Decoded
from weightsync.testing.faults import FaultRun
from weightsync.testing.inprocess_run import InprocessRun, WholeTensors
from weightsync.testing.tiny import SETTINGS
from weightsync.testing.wrong_backends import Groups

OLD = {"w": torch.arange(12.0), "v": torch.zeros(5)}
NEW = {"w": OLD["w"].clone(), "v": OLD["v"].clone()}
NEW["w"][[1, 4, 7]] = torch.tensor([-1.0, -4.0, -7.0])
NEW["v"][2] = 1.0
LAST = {"w": NEW["w"] + 1, "v": NEW["v"].clone()}
NEVER = ProtocolSettings(verify_every=0)
FIRST = RankId("rollout", 0, 0)


# ---- a diff that misses a change -----------------------------------------------------------------------------------


def misses_a_change(verbs: Any) -> None:
    """Have a trainer rank's diff overlook one element, so that its own digest overlooks it as well."""
    source = verbs.local
    if not isinstance(source, Source):
        return
    whole, names = source.baseline.find, list[str]()

    def fewer(name: str, *rest: Any) -> Differing:
        found = whole(name, *rest)
        if found.positions.numel() and name in (*names, name)[:1]:
            names[:] = [name]
            return Differing(
                found.positions[:-1], found.new[:-1], None if found.old is None else found.old[:-1]
            )
        return found

    source.baseline.find = fewer  # type: ignore[method-assign]


def test_a_diff_that_misses_a_change_does_not_commit_where_every_element_is_read() -> None:
    run = FaultRun(verbs=misses_a_change)
    outcomes = run.run().outcomes["trainer.0"]
    assert outcomes[0].committed
    assert not outcomes[1].committed
    assert "its digest in version 2" in outcomes[1].reason
    assert outcomes[2].full, "whoever saw the difference is dirty, and gets everything next"
    assert not any("torn" in sentence for sentence in run.report.violations)


def test_where_elements_are_never_read_the_same_diff_tears_the_weights() -> None:
    run = FaultRun(verbs=misses_a_change, settings=replace(SETTINGS, verify_every=0))
    assert any("torn" in sentence for sentence in run.run().violations)


# ---- what an update did wrong, seen without a recount --------------------------------------------------------------

Tamper = Callable[[Sequence[Range]], list[Range]]


def first(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Tamper:
    """Change positions and bits of the first range."""

    def tamper(ranges: Sequence[Range]) -> list[Range]:
        one = ranges[0]
        assert one.positions is not None
        positions, bits = change(one.positions.clone(), one.bits.clone())
        spec = one.spec._replace(count=len(positions))
        return [Range(spec, positions, bits), *ranges[1:]]

    return tamper


def values_swapped(positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    bits[[0, 1]] = bits[[1, 0]]
    return positions, bits


def positions_swapped(positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    positions[[0, 1]] = positions[[1, 0]]
    return positions, bits


def position_moved(positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    positions[0] -= 1
    return positions, bits


def bit_flipped(positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    bits[0] ^= 1
    return positions, bits


def element_missing(positions: Tensor, bits: Tensor) -> tuple[Tensor, Tensor]:
    return positions[:-1], bits[:-1]


TAMPERS: dict[str, Tamper] = {
    "two values swapped": first(values_swapped),
    "a position moved": first(position_moved),
    "a bit flipped": first(bit_flipped),
    "an element missing": first(element_missing),
    "a patch missing": lambda ranges: list(ranges[1:]),
}
ON_THE_RECEIVER = {**TAMPERS, "two positions swapped": first(positions_swapped)}


class Tampering(Groups):
    """Sends other ranges than were encoded, sealed anew: what a wrong encoder would send."""

    def __init__(self, inner: Any, tensors: Any, tamper: Tamper) -> None:
        super().__init__(inner)
        self.tensors, self.tamper = tensors, tamper
        self.sizes: list[int] = []

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        heading = bucket.header.heading
        if heading.base and heading.kind == DELTA:
            bucket = pack_bucket(heading, self.tamper(unpack(bucket, self.tensors)), self.tensors)
            self.sizes.append(bucket.nbytes)
        elif heading.base and heading.kind == END:
            digest = int.from_bytes(bytes(bucket.payload[:8].tolist()), "little", signed=True)
            bucket = end_bucket(heading, digest, len(self.sizes), sum(self.sizes))
            self.sizes.clear()
        await self.inner.send(group, bucket, deadline_ns)


def on_the_wire(run: InprocessRun, tamper: Tamper) -> None:
    run.lead.verbs.fabric = Tampering(run.lead.verbs.fabric, run.deployment.tensors, tamper)


def on_the_receiver(run: InprocessRun, tamper: Tamper) -> None:
    target = run.targets[FIRST]
    whole = target.apply

    def apply(decoded: Decoded, undo: bool) -> Any:
        ranges = tuple(tamper(decoded.ranges)) if undo else decoded.ranges
        return whole(replace(decoded, ranges=ranges), undo)

    target.apply = apply  # type: ignore[method-assign]


PLANTS = [(on_the_wire, name) for name in TAMPERS] + [(on_the_receiver, name) for name in ON_THE_RECEIVER]


async def started(run: InprocessRun) -> None:
    run.set(OLD)
    assert (await run.push()).committed


@pytest.mark.parametrize(("plant", "name"), PLANTS, ids=[f"{p.__name__}-{name}" for p, name in PLANTS])
def test_what_an_update_did_wrong_is_seen_at_once_and_healed(plant: Any, name: str) -> None:
    async def story() -> tuple[Outcome, Outcome]:
        async with InprocessRun(WholeTensors.of(OLD), settings=NEVER) as run:
            await started(run)
            plant(run, ON_THE_RECEIVER[name])
            run.set(NEW)
            wrong = await run.push()
            assert run.rollouts[FIRST].dirty is not None
            assert not run.engines[0].on
            healed = await run.push()
            assert run.differences(FIRST) == []
            assert run.violations == []
            return wrong, healed

    wrong, healed = asyncio.run(story())
    assert not wrong.committed
    assert "its digest in version 2" in wrong.reason
    assert (healed.committed, healed.full) == (True, (0,))


# ---- bits that flipped by themselves -------------------------------------------------------------------------------


def flip(run: InprocessRun, element: int) -> None:
    int_view(run.targets[FIRST].weights["w"])[element] ^= 2


@pytest.mark.parametrize(
    ("element", "every", "found_in"),
    [(4, 0, 2), (5, 0, None), (5, 1, 2), (5, 3, 3), (5, 4, None)],
    ids=["written over", "never recounted", "recounted now", "recounted in update 3", "not recounted yet"],
)
def test_a_flipped_bit_is_seen_where_it_is_written_over_or_at_the_next_recount(
    element: int, every: int, found_in: int | None
) -> None:
    async def story() -> list[bool]:
        settings = ProtocolSettings(verify_every=every)
        async with InprocessRun(WholeTensors.of(OLD), settings=settings) as run:
            await started(run)
            flip(run, element)
            committed = []
            for state in (NEW, NEW):
                run.set(state)
                committed.append((await run.push()).committed)
                if not committed[-1]:
                    break
            return committed

    committed = asyncio.run(story())
    assert committed == ([True, True] if found_in is None else [True] * (found_in - 2) + [False])


# ---- an audit ------------------------------------------------------------------------------------------------------


async def audited(run: InprocessRun) -> AuditReport:
    deadline_ns = run.lead.deadline_ns(10**10)
    reports = await asyncio.gather(*(trainer.audit(deadline_ns) for trainer in run.trainers.values()))
    assert all(report == reports[0] for report in reports)
    return reports[0]


def test_an_audit_finds_a_flipped_bit_and_the_next_update_heals_that_rollout_only() -> None:
    async def story() -> None:
        async with InprocessRun(WholeTensors.of(OLD, rollouts=2), settings=NEVER) as run:
            with pytest.raises(StaleVersion, match="nothing is acknowledged"):
                await audited(run)
            await started(run)
            clean = await audited(run)
            assert (clean.ok, clean.version, clean.digest, clean.rollouts) == (
                True, 1, run.lead.last.digest, (0, 1),
            )  # fmt: skip
            run.set(NEW)
            assert (await run.push()).full == ()
            flip(run, 5)
            found = await audited(run)
            assert not found.ok
            assert list(found.problems) == ["rollout 0"]
            assert "its digest in an audit of version 2" in found.problems["rollout 0"]
            assert run.rollouts[FIRST].dirty is not None
            assert (run.engines[0].on, run.engines[1].on) == (False, True)
            run.violations.clear()  # it generated until it was found
            run.set(LAST)
            healed = await run.push()
            assert (healed.committed, healed.full) == (True, (0,))
            assert (await audited(run)).ok
            assert run.violations == []

    asyncio.run(story())


def test_an_audit_finds_a_flipped_bit_of_the_trainers_own_snapshot() -> None:
    async def story() -> None:
        async with InprocessRun(WholeTensors.of(OLD, rollouts=2), settings=NEVER) as run:
            await started(run)
            slot = run.lead.slots.acknowledged
            assert slot is not None
            int_view(run.lead.verbs.local.held(slot)["w"])[3] ^= 1
            assert list((await audited(run)).problems) == ["trainer"]
            run.set(NEW)
            healed = await run.push()
            assert (healed.committed, set(healed.full)) == (True, {0, 1})
            assert (await audited(run)).ok

    asyncio.run(story())


def test_shares_that_ranks_keep_add_up_to_the_trainers_digest() -> None:
    async def story() -> None:
        async with InprocessRun(WholeTensors.of(OLD), settings=NEVER) as run:
            for state in (OLD, NEW, LAST):
                run.set(state)
                outcome = await run.push()
                assert (
                    combine([await rollout.verbs.digest() for rollout in run.rollouts.values()])
                    == outcome.digest
                )

    asyncio.run(story())
