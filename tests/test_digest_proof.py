"""What comparing digests proves: a diff that misses a change is found, since the trainer's digest is read afresh."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from weightsync.reference.changes import Changes
from weightsync.reference.source import Source
from weightsync.testing.faults import FaultRun
from weightsync.testing.tiny import SETTINGS


def forgets_one_change(verbs: Any) -> None:
    """Have a trainer rank's diff leave out the last changed element of one piece."""
    source = verbs.local
    if not isinstance(source, Source):
        return
    whole = source.diff

    def diff(slot: int, base: int | None) -> Generator[Any, None, Changes]:
        changes = yield from whole(slot, base)
        if not changes.patches:
            return changes
        piece, (positions, bits, old) = next(iter(changes.patches.items()))
        patches = {**changes.patches, piece: (positions[:-1], bits[:-1], None if old is None else old[:-1])}
        if len(positions) == 1:
            del patches[piece]
        counts = tuple(n - (number == piece) for number, n in enumerate(changes.counts))
        return replace(changes, counts=counts, patches=patches)

    source.diff = diff  # type: ignore[method-assign]


def test_a_diff_that_misses_a_change_never_commits_where_digests_are_compared() -> None:
    run = FaultRun(verbs=forgets_one_change)
    outcomes = run.run().outcomes["trainer.0"]
    assert outcomes[0].committed
    assert not outcomes[1].committed
    assert "its digest in version 2" in outcomes[1].reason
    assert outcomes[2].full, "whoever saw the difference is dirty, and gets everything next"
    assert not any("torn" in sentence for sentence in run.report.violations)


def test_without_comparing_digests_the_same_diff_tears_the_weights() -> None:
    run = FaultRun(verbs=forgets_one_change, settings=replace(SETTINGS, verify_every=0))
    report = run.run()
    assert any("torn" in sentence for sentence in report.violations)
