"""The ledger of reads and writes: what it calls a race, and the races that no comparison of bits shows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weightsync.reference.members import RankId
from weightsync.reference.params import int_view
from weightsync.reference.source import Source
from weightsync.reference.steps import Step, Touched
from weightsync.sim.backend import SimCluster, SimEngine, SimVerbs
from weightsync.sim.costs import cost_ns
from weightsync.sim.hardware import load_profile
from weightsync.sim.ledger import Ledger, Race
from weightsync.sim.world import SimWorld
from weightsync.testing.tiny import tiny_deployment

T = TypeVar("T")
RANK = RankId("trainer", 0, 0)
SNAPSHOT_NS = cost_ns("snapshot", 0, load_profile("laptop"))

# ---- the ledger alone --------------------------------------------------------------------------------------------


def touch(reads: str = "", writes: str = "") -> Touched:
    return Touched(0, tuple(reads.split()), tuple(writes.split()))


@pytest.mark.parametrize(
    ("first", "second", "memories"),
    [
        (touch(reads="live"), touch(writes="live"), ["live"]),
        (touch(writes="live"), touch(reads="live"), ["live"]),
        (touch(writes="live"), touch(writes="live"), ["live"]),
        (touch(reads="live"), touch(reads="live"), []),
        (touch(reads="live", writes="slot0"), touch(reads="slot1", writes="live"), ["live"]),
        (touch(reads="live", writes="slot0"), touch(reads="slot0", writes="live"), ["live", "slot0"]),
        (touch(reads="slot0"), touch(writes="slot1"), []),
        (touch(), touch(writes="live"), []),
    ],
)
def test_a_race_is_two_open_intervals_on_one_memory_one_of_them_a_write(
    first: Touched, second: Touched, memories: list[str]
) -> None:
    ledger = Ledger()
    ledger.begin("trainer.0", "first", first, 5)
    ledger.begin("trainer.0", "second", second, 7)
    assert [race.memory for race in ledger.races] == memories
    assert all((race.rank, race.at_ns) == ("trainer.0", 7) for race in ledger.races)


def test_a_race_names_both_verbs_and_what_they_do() -> None:
    ledger = Ledger()
    ledger.begin("trainer.1", "snapshot", touch(reads="live", writes="slot1"), 10)
    ledger.begin("trainer.1", "optimizer", touch(writes="live"), 20)
    assert ledger.races == [Race("trainer.1", "live", "snapshot (read)", "optimizer (write)", 20)]
    assert str(ledger.races[0]) == (
        "race on live of trainer.1 at 20 ns: optimizer (write) began while snapshot (read) was under way"
    )


def test_a_closed_interval_races_with_nobody_and_closing_again_is_harmless() -> None:
    ledger = Ledger()
    interval = ledger.begin("trainer.0", "snapshot", touch(reads="live"), 0)
    twin = ledger.begin("trainer.0", "digest", touch(reads="live"), 0)
    ledger.end(interval)
    ledger.end(interval)
    ledger.end(twin)
    ledger.begin("trainer.0", "optimizer", touch(writes="live"), 0)
    assert ledger.races == []


def test_ranks_share_no_memory() -> None:
    ledger = Ledger()
    ledger.begin("rollout0.0", "apply", touch(writes="weights"), 0)
    ledger.begin("rollout1.0", "apply", touch(writes="weights"), 0)
    assert ledger.races == []


def test_what_a_killed_rank_was_doing_is_forgotten_and_nothing_else() -> None:
    ledger = Ledger()
    ledger.begin("rollout0.0", "apply", touch(writes="weights"), 0)
    ledger.begin("rollout1.0", "apply", touch(writes="weights"), 0)
    ledger.forget("rollout0.0")
    ledger.begin("rollout0.0", "digest", touch(reads="weights"), 1)
    assert ledger.races == []
    ledger.begin("rollout1.0", "digest", touch(reads="weights"), 1)
    assert [race.rank for race in ledger.races] == ["rollout1.0"]


def test_the_ledger_sees_a_local_step_while_it_lasts_and_an_engine_while_it_generates() -> None:
    with SimWorld() as world:
        cluster = SimCluster(world, load_profile("laptop"), lease_ns=1)
        leader = RankId("rollout", 0, 0)
        verbs = cluster.verbs(leader, None)
        engine = SimEngine(cluster, (leader,))

        def write() -> Step[None]:
            yield touch(writes="weights")

        async def main() -> None:
            await verbs.perform("apply", write())
            await engine.resume()
            await engine.pause()
            await verbs.perform("apply", write())
            assert cluster.ledger.races == []
            await engine.resume()
            await verbs.perform("apply", write())

        task = verbs.spawn(main(), "main")
        assert world.run([task]) == ()
        task.result()
    assert [(race.first, race.second) for race in cluster.ledger.races] == [
        ("generate (read)", "apply (write)")
    ]


# ---- a background writer, planted ----------------------------------------------------------------------------------


class CopyAtVerbStart(SimVerbs):
    """A wrong backend: all bytes of a step move when its verb starts, so nothing that comes later is seen."""

    async def perform(self, name: str, step: Step[T]) -> T:
        touched = next(step)
        interval = self.cluster.ledger.begin(str(self.me), name, touched, self.clock.now_ns())
        try:
            return next(step)  # type: ignore[return-value]
        except StopIteration as stop:
            result: T = stop.value
        finally:
            step.close()
        await self.clock.sleep_until(
            self.clock.now_ns() + cost_ns(name, touched.nbytes, self.cluster.profile)
        )
        self.cluster.ledger.end(interval)
        return result


@dataclass(frozen=True)
class Seen:
    """What two ways to look at one run showed: versions with wrong bits, and the ledger's races."""

    wrong: tuple[int, ...]
    races: tuple[Race, ...]


def fill(params: Sequence[Tensor], value: int) -> None:
    for param in params:
        int_view(param.detach()).fill_(value)


def snapshots(kind: type[SimVerbs], steps: Sequence[tuple[int, int]], *, background: bool) -> Seen:
    """One trainer rank that takes (optimizer ns, idle ns) steps and a snapshot after each.

    With ``background``, the planted error, it does not wait for a snapshot before the next optimizer step begins to
    write, half of the parameters at its start and half at its end.
    """
    deployment = tiny_deployment()
    blank = {meta.name: torch.zeros(meta.shape, dtype=meta.dtype) for meta in deployment.tensors}
    params = deployment.shards(0, blank)
    source = Source(deployment.plan, 0, params)
    tensors = list(params.values())
    wrong: list[int] = []
    with SimWorld() as world:
        cluster = SimCluster(world, load_profile("laptop"), lease_ns=1)
        plain = cluster.verbs(RANK, source)
        verbs = kind(
            plain.me, plain.clock, plain.control, plain.fabric, source, None, None, None, cluster=cluster
        )

        async def optimize(value: int, lasts_ns: int) -> None:
            interval = cluster.ledger.begin(str(RANK), "optimizer", touch(writes="live"), world.now_ns())
            fill(tensors[: len(tensors) // 2], value)
            await verbs.clock.sleep_until(world.now_ns() + lasts_ns)
            fill(tensors[len(tensors) // 2 :], value)
            cluster.ledger.end(interval)

        async def push(version: int) -> None:
            await verbs.snapshot(version % 2)
            held = source.held(version % 2).values()
            if any((int_view(tensor) != version).any() for tensor in held):
                wrong.append(version)

        async def main() -> None:
            pending: list[Any] = []
            for version, (lasts_ns, idle_ns) in enumerate(steps, start=1):
                await optimize(version, lasts_ns)
                await verbs.clock.join(pending, None)
                pending = [verbs.spawn(push(version), "push")]
                if not background:
                    await verbs.clock.join(pending, None)
                await verbs.clock.sleep_until(world.now_ns() + idle_ns)
            await verbs.clock.join(pending, None)

        task = verbs.spawn(main(), "main")
        assert world.run([task]) == ()
        task.result()
    return Seen(tuple(wrong), tuple(cluster.ledger.races))


DURATIONS = st.integers(1, 2 * SNAPSHOT_NS)
STEPS = st.lists(st.tuples(DURATIONS, DURATIONS), min_size=1, max_size=5)


@given(STEPS)
def test_without_the_planted_writer_neither_bits_nor_ledger_show_anything(
    steps: list[tuple[int, int]],
) -> None:
    for kind in (SimVerbs, CopyAtVerbStart):
        assert snapshots(kind, steps, background=False) == Seen((), ())


@given(STEPS)
def test_copy_at_verb_start_hides_the_writer_from_the_bits_but_not_from_the_ledger(
    steps: list[tuple[int, int]],
) -> None:
    right = snapshots(SimVerbs, steps, background=True)
    masked = snapshots(CopyAtVerbStart, steps, background=True)
    assert masked.wrong == ()
    assert masked.races == right.races
    assert not right.wrong or right.races, "wrong bits without a race in the ledger"
    assert all(race.memory == "live" for race in right.races)


def test_how_many_of_a_hundred_seeds_show_the_writer() -> None:
    found = {"bits": 0, "ledger": 0, "bits, copied at verb start": 0, "ledger, copied at verb start": 0}
    for seed in range(100):
        stream = random.Random(seed)
        steps = [(stream.randint(1, SNAPSHOT_NS), stream.randint(1, SNAPSHOT_NS)) for _ in range(5)]
        right = snapshots(SimVerbs, steps, background=True)
        masked = snapshots(CopyAtVerbStart, steps, background=True)
        found["bits"] += bool(right.wrong)
        found["ledger"] += bool(right.races)
        found["bits, copied at verb start"] += bool(masked.wrong)
        found["ledger, copied at verb start"] += bool(masked.races)
    assert found["bits, copied at verb start"] == 0
    assert found["ledger"] == found["ledger, copied at verb start"] == 100
    assert 50 <= found["bits"] <= 100
