"""The graph of versions that is remembered: paths in both directions, a budget, nothing kept for nobody."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.history import STEP_BYTES, History


@dataclass(frozen=True)
class Trail:
    nbytes: int


def history(*edges: tuple[int, int], budget: int = 1 << 20, size: int = 8) -> History:
    """Steps between versions whose digests are ten times their number."""
    found = History(budget)
    for base, version in edges:
        found.add((base, 10 * base), (version, 10 * version), Trail(size), size)
    return found


def ends(found: History, start: int, end: int) -> list[tuple[int, int]] | None:
    path = found.path(start, end)
    return None if path is None else [(step.base, step.version) for step in path]


def test_a_path_goes_either_way_along_the_fewest_steps() -> None:
    found = history((1, 2), (2, 3), (2, 4), (1, 4))
    assert ends(found, 3, 4) == [(2, 3), (2, 4)]
    assert ends(found, 1, 3) == [(1, 2), (2, 3)]
    assert ends(found, 2, 2) == []
    assert ends(found, 9, 2) is None


def test_the_oldest_steps_are_dropped_first_and_what_only_they_knew_is_forgotten() -> None:
    found = history((1, 2), (2, 3), (3, 4), budget=2 * (8 + STEP_BYTES))
    assert [(step.base, step.version) for step in found.steps] == [(2, 3), (3, 4)]
    assert found.digests == {2: 20, 3: 30, 4: 40}
    assert not found.knows(1, 10)
    assert found.knows(2, 20)
    assert not found.knows(2, 21)
    assert ends(found, 1, 4) is None


def test_a_step_that_exceeds_the_budget_alone_is_not_kept() -> None:
    found = history((1, 2), budget=100)
    assert (found.steps, found.digests, found.nbytes) == ([], {}, 0)


def test_nothing_is_remembered_without_a_budget_and_after_clear() -> None:
    assert history((1, 2), budget=0).steps == []
    found = history((1, 2))
    found.clear()
    assert (found.steps, found.digests) == ([], {})


@given(sizes=st.lists(st.integers(0, 2000), max_size=40), budget=st.integers(0, 6000))
def test_it_never_holds_more_than_its_budget(sizes: list[int], budget: int) -> None:
    """Also of steps that changed nothing."""
    found = History(budget)
    for number, size in enumerate(sizes, start=1):
        found.add((number, number), (number + 1, number + 1), Trail(size // 2), size)
        assert found.charged <= budget
        assert found.nbytes <= budget
        assert set(found.digests) == {end for step in found.steps for end in (step.base, step.version)}
