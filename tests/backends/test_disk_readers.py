"""Many readers, a publisher and a cleaner at once; chains; live tensors; and a rollout's target."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightsync.backends.disk import (
    CheckpointReader,
    Index,
    LiveReader,
    LocalFiles,
    LocalStore,
    Publisher,
    PublisherSettings,
    cheapest_chain,
    listing,
    reading,
)
from weightsync.backends.disk.index import FileEntry
from weightsync.reference.errors import StaleVersion
from weightsync.reference.params import int_view, same_bits
from weightsync.testing.disk_states import bits_in, bits_of, metas, states
from weightsync.testing.faulty_files import Disk, FaultyFiles

STATES = states(8)
VERSIONS = 200


def test_eight_readers_and_a_cleaner_over_two_hundred_versions_lose_nothing(tmp_path: Path) -> None:
    """Readers share two checkpoint folders and live tensors, and jump; whatever they see is a version, whole."""
    store = LocalStore(tmp_path / "out")
    settings = PublisherSettings(anchor_every=7, keep=3)
    errors: list[BaseException] = []
    news, published = threading.Condition(), [1]

    def expected(version: int) -> dict[str, bytes]:
        return bits_of(STATES[version % len(STATES)])

    def reached(wanted: int) -> bool:
        return published[0] >= wanted

    def read(number: int) -> None:
        try:
            reader = CheckpointReader(store, tmp_path / f"host{number % 2}", f"reader{number}")
            last = 0
            while last < VERSIONS:
                with news:
                    wanted = min(VERSIONS, last + 1 + 3 * number)  # jumps of another length for each
                    news.wait_for(partial(reached, wanted))
                last = reader.pull().version
                assert last >= wanted
                with reading(LocalFiles(reader.files.root)) as (state, checkpoint):  # type: ignore[attr-defined]
                    assert state is not None
                    found = {name: checkpoint.read(name).tobytes() for name in checkpoint.metas}
                    assert found == expected(state.version)
                    assert state.version >= last
        except BaseException as error:
            errors.append(error)

    with Publisher(store, metas(STATES[0]), settings) as publisher:
        publisher.publish(STATES[1])
        threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        removed = 0
        for version in range(2, VERSIONS + 1):
            assert publisher.publish(STATES[version % len(STATES)]).version == version
            with news:
                published[0] = version
                news.notify_all()
            if version % 5 == 0:
                removed += len(publisher.clean())
        for thread in threads:
            thread.join()
        publisher.clean()
    assert errors == []
    assert removed > 0
    assert len(listing(store).indexes) <= settings.keep + settings.anchor_every + 1
    for host in (0, 1):
        assert bits_in(LocalFiles(tmp_path / f"host{host}")) == expected(VERSIONS)


def test_readers_of_one_host_apply_once(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "out")
    readers = [CheckpointReader(store, tmp_path / "host", f"reader{number}") for number in range(8)]
    with Publisher(store, metas(STATES[0])) as publisher:
        publisher.publish(STATES[0])
        readers[0].pull()
        publisher.publish(STATES[1])
        publisher.publish(STATES[2])
    steps = [reader.prepare() for reader in readers]
    assert [step.chain for step in steps] == [(2, 3), *[()] * 7]  # read and decoded once
    assert [step.apply() for step in steps] == [True, *[False] * 7]
    for step in steps:
        step.settle()
        step.close()
    assert bits_in(readers[0].files) == bits_of(STATES[2])
    assert [
        name for name in readers[0].files.list(".weightsync") if "stage" in name or name == "journal"
    ] == []


@given(first=st.integers(1, 8), last=st.integers(1, 8), full=st.sets(st.integers(1, 8)))
def test_any_jump_is_equal_to_going_step_by_step(first: int, last: int, full: set[int]) -> None:
    first, last = min(first, last), max(first, last)
    store = LocalStore(FaultyFiles(Disk()))
    with Publisher(store, metas(STATES[0])) as publisher:
        for version, state in enumerate(STATES, 1):
            publisher.publish(state, full=version in full)
    live = {name: tensor.clone() for name, tensor in STATES[first - 1].items()}
    reader = LiveReader(store, live, first)
    prepared = reader.prepare(last)
    assert all(same_bits(live[name], STATES[first - 1][name]) for name in live)
    reader.apply(prepared)
    assert all(same_bits(live[name], STATES[last - 1][name]) for name in live)
    reader.rollback()
    assert all(same_bits(live[name], STATES[first - 1][name]) for name in live)
    assert (reader.pull(last), reader.digest) == (last, reader.count())


def index(version: int, base: int, nbytes: int) -> Index:
    kind = "delta" if base else "full"
    return Index(version, base, kind, 0, base, version, (FileEntry("x", nbytes, ""),), 0, 0)


def test_the_cheapest_chain_is_taken() -> None:
    there = {
        1: index(1, 0, 100),
        2: index(2, 1, 30),
        3: index(3, 2, 30),
        4: index(4, 0, 50),
        5: index(5, 4, 1),
    }
    assert [one.version for one in cheapest_chain(there, 3, 1)] == [2, 3]
    assert [one.version for one in cheapest_chain(there, 5, 1)] == [4, 5]
    assert [one.version for one in cheapest_chain(there, 3)] == [1, 2, 3]
    assert cheapest_chain(there, 5, 5) == ()
    with pytest.raises(StaleVersion, match="no chain leads from version 2 to 3"):
        cheapest_chain({3: there[3]}, 3, 2, digest=7)  # another state than the delta starts from


def test_live_tensors_of_any_strides(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with Publisher(store, metas(STATES[0])) as publisher:
        publisher.publish(STATES[0])
        publisher.publish(STATES[4])
    live = {name: tensor.clone() for name, tensor in STATES[0].items()}
    live["a.weight"] = live["a.weight"].t().contiguous().t()
    LiveReader(store, live, 1).pull()
    assert torch.equal(int_view(live["a.weight"]), int_view(STATES[4]["a.weight"]))


def test_a_folder_without_state_is_counted_and_known_by_its_digest(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "out")
    with Publisher(store, metas(STATES[0])) as publisher:
        publisher.publish(STATES[0])
        CheckpointReader(store, tmp_path / "host", "a").pull()
        publisher.publish(STATES[2])
    for path in (tmp_path / "host" / ".weightsync").iterdir():
        path.unlink()
    assert CheckpointReader(store, tmp_path / "host", "b").pull().chain == (2,)
    assert bits_in(LocalFiles(tmp_path / "host")) == bits_of(STATES[2])
