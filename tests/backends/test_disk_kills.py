"""Killed at every write, rename and fsync: a reader sees an old or a new version, and everybody goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from weightsync.backends.disk.checkpoint import read_state
from weightsync.backends.disk.index import highest_tried, listing
from weightsync.backends.disk.publisher import Publisher, PublisherSettings
from weightsync.backends.disk.reader import CheckpointReader
from weightsync.backends.disk.store import LocalStore
from weightsync.testing.disk_states import bits_in, bits_of, metas, states
from weightsync.testing.faulty_files import Disk, FaultyFiles, Killed, Lost, When

STATES = states(5)
TENSORS = metas(STATES[0])
SETTINGS = PublisherSettings(anchor_every=2, keep=1, shard_bytes=40)
LOST: tuple[Lost, ...] = ("all", "none", "data", "names")
WHEN: tuple[When, ...] = ("before", "half", "after")


def clock() -> int:
    return 1_000


def publish(files: FaultyFiles, first: int, count: int) -> list[int]:
    """Publish states by number, going on from the folder's newest when it is the one before."""
    with Publisher(LocalStore(files), TENSORS, SETTINGS, {"config.json": b"{}"}, clock) as publisher:
        if first:
            publisher.adopt(STATES[first - 1])
        made = [publisher.publish(STATES[number]).version for number in range(first, first + count)]
        publisher.clean()
    return made


def operations(run: Callable[[FaultyFiles], object], disk: Disk) -> int:
    files = FaultyFiles(disk.after_crash("none"))
    run(files)
    return len(files.done)


def crashes(run: Callable[[FaultyFiles], object], disk: Disk) -> Iterator[tuple[Disk, str]]:
    """Every disk that a kill at any operation can leave, once, and what was being done."""
    seen = set()
    for at in range(operations(run, disk)):
        for when in WHEN:
            files = FaultyFiles(disk.after_crash("none"), at, when)
            with pytest.raises(Killed):
                run(files)
            for lost in LOST:
                left = files.disk.after_crash(lost)
                if left.image() not in seen:
                    seen.add(left.image())
                    yield left, f"{when} {files.done[at]}, lost {lost}"


def reader(store: FaultyFiles, folder: FaultyFiles) -> CheckpointReader:
    return CheckpointReader(LocalStore(store), folder, "reader", clock=clock)


def test_a_publisher_killed_anywhere_leaves_whole_versions_and_goes_on() -> None:
    start = FaultyFiles(Disk())
    publish(start, 0, 2)
    disk = start.disk.after_crash("all")
    assert operations(lambda files: publish(files, 2, 2), disk) > 50
    seen = set()
    for left, where in crashes(lambda files: publish(files, 2, 2), disk):
        store = FaultyFiles(left)
        newest = listing(LocalStore(store)).newest
        assert newest is not None, where
        assert not listing(LocalStore(store)).damaged, where
        seen.add(newest.version)
        tried = highest_tried(LocalStore(store))
        pulled = reader(store, FaultyFiles(Disk()))
        pulled.pull()
        assert bits_in(pulled.files) == bits_of(STATES[newest.version - 1]), where
        with Publisher(LocalStore(store), TENSORS, SETTINGS, clock=clock) as publisher:
            index = publisher.publish(STATES[4])
            assert index.version > max(tried, newest.version), where
            assert publisher.publish(STATES[0]).base == index.version
            publisher.clean()
        pulled.pull()
        assert bits_in(pulled.files) == bits_of(STATES[0]), where
        assert listing(LocalStore(store)).unfinished == ()
    assert seen == {2, 3, 4}


@pytest.mark.parametrize("fresh", [False, True], ids=["in place", "fresh"])
def test_a_reader_killed_anywhere_leaves_the_old_or_the_new_version(fresh: bool) -> None:
    start = FaultyFiles(Disk())
    publish(start, 0, 1)
    folder = Disk()
    if not fresh:
        reader(start, FaultyFiles(folder)).pull()
        folder = folder.after_crash("all")
    publish(start, 1, 3)
    shared = start.disk.after_crash("all")

    def pull(files: FaultyFiles) -> None:
        reader(FaultyFiles(shared), files).pull()

    assert operations(pull, folder) > 20
    seen = set()
    for left, where in crashes(pull, folder):
        files = FaultyFiles(left)
        if not fresh:
            state, _ = reader(FaultyFiles(shared), files).verify()
            assert state is not None, where
            assert bits_in(files) == bits_of(STATES[state.version - 1]), where
            seen.add(state.version)
        pull(files)
        assert bits_in(files) == bits_of(STATES[3]), where
        held = read_state(files)
        assert held is not None
        assert held.version == 4
    assert fresh or seen == {1, 4}


def test_a_kill_while_recovering_is_recovered_from() -> None:
    start, folder = FaultyFiles(Disk()), FaultyFiles(Disk())
    publish(start, 0, 1)
    reader(start, folder).pull()
    publish(start, 1, 3)
    probe = FaultyFiles(folder.disk.after_crash("none"))
    reader(start, probe).pull()
    first = next(number for number, name in enumerate(probe.done) if name.startswith("scatter"))
    dying = FaultyFiles(folder.disk.after_crash("none"), first + 1, "half")
    with pytest.raises(Killed):
        reader(start, dying).pull()
    half = dying.disk.after_crash("none")
    assert bits_in(FaultyFiles(half)) not in [bits_of(state) for state in STATES]
    for left, where in crashes(lambda files: reader(start, files).verify(), half):
        state, _ = reader(start, FaultyFiles(left)).verify()
        assert state is not None
        assert bits_in(FaultyFiles(left)) == bits_of(STATES[state.version - 1]), where
