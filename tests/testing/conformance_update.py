"""Conformance of whole updates: the reference protocol over a backend's verbs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from weightsync.reference.buckets import END_BYTES
from weightsync.reference.digest import state_digest
from weightsync.reference.members import RankId
from weightsync.reference.protocol import ProtocolSettings
from weightsync.testing.conformance_base import ConformanceBase, expect_equal
from weightsync.testing.conformance_sample import make_sample
from weightsync.testing.scenario import DENSITIES, RunResult, run_scenario

RECEIVE = pytest.mark.parametrize("receive", ["stage", "stream"])
FAILURES = [
    ("diff", "before", "stage"),
    ("gather", "after", "stage"),
    ("encode", "before", "stream"),
    ("decode", "before", "stage"),
    ("apply", "before", "stage"),
    ("apply", "after", "stream"),
    ("commit", "before", "stage"),
    ("commit", "after", "stream"),
]
"""A verb that fails once, when, and how the rollouts receive."""


class FailOnce:
    """Hooks that make the n-th call of one verb fail, after it took effect or before.

    Attributes:
        hits: how often it did.
    """

    def __init__(self, verb: str, nth: int, *, after: bool) -> None:
        self.verb = verb
        self.nth = nth
        self.late = after
        self.seen = 0
        self.hits = 0

    async def before(self, verb: str) -> int:
        """See ``reference.rank.Hooks``."""
        self.seen += verb == self.verb
        hit = int(verb == self.verb and self.seen == self.nth)
        if hit and not self.late:
            self._fail()
        return hit

    async def after(self, verb: str, ordinal: int) -> None:
        """See ``reference.rank.Hooks``."""
        if ordinal:
            self._fail()

    def _fail(self) -> None:
        self.hits += 1
        raise OSError("planted")


class UpdateConformance(ConformanceBase):
    """A label always tells the bits, a number is never used twice, and nothing is committed in part."""

    @RECEIVE
    def test_updates_reach_every_rollout_bit_for_bit(self, receive: str) -> None:
        result = self._run(receive, DENSITIES)
        expect_equal(
            result.problems(), [], "problems after an update of everything, little, nothing and most"
        )
        for outcome in result.updates:
            state = result.history.versions[outcome.version or 0]
            digest = state_digest((meta, state[meta.name]) for meta in result.deployment.tensors)
            expect_equal(outcome.digest, digest, f"digest of version {outcome.version}")
            counts = None if outcome.full else outcome.counts
            nbytes = result.deployment.plan.update_bytes(counts)
            expect_equal(outcome.nbytes, nbytes, f"bytes of version {outcome.version}, against the plan")

    @RECEIVE
    def test_an_update_without_a_change_is_free(self, receive: str) -> None:
        """The version advances, and nothing but the trailer moves."""
        result = self._run(receive, (1.0, 0.0))
        expect_equal(result.problems(), [], "problems after an update without a change")
        first, second = result.updates
        expect_equal(second.version, (first.version or 0) + 1, "version of an update without a change")
        expect_equal(
            (second.changed, second.nbytes), (0, END_BYTES), "changed elements and bytes without a change"
        )
        moved = [
            s.verb for s in result.trace.spans if s.update == 2 and s.verb in ("gather", "encode", "apply")
        ]
        expect_equal(moved, [], "verbs that move elements in an update without a change")

    @pytest.mark.parametrize(("verb", "when", "receive"), FAILURES)
    def test_a_failed_verb_leaves_no_part_of_an_update(self, verb: str, when: str, receive: str) -> None:
        """Rolled back everywhere, or tried again and committed everywhere; and the last update commits."""
        on_trainer = verb in ("diff", "gather", "encode")
        rank = RankId("trainer", 0, 0) if on_trainer else RankId("rollout", 1, 1)
        hooks = FailOnce(verb, 2 if verb in ("diff", "commit") else 12, after=when == "after")
        result = self._run(receive, (1.0, 0.3, 0.3, 0.3), {rank: hooks})
        said = f"{verb} failed once on {rank}, {when} its effect"
        expect_equal(hooks.hits, 1, f"times that {said}")
        problems = [text for text in result.problems() if "did not commit" not in text]
        expect_equal(problems, [], f"problems after {said}")
        versions = [outcome.version for outcome in result.updates if outcome.version is not None]
        expect_equal(versions, sorted(set(versions)), f"versions, rising, after {said}")
        expect_equal(result.updates[-1].committed, True, f"last update committed after {said}")

    # ---- helpers -----------------------------------------------------------------------------------------

    def _run(
        self, receive: Any, densities: Sequence[float], hooks: dict[RankId, Any] | None = None
    ) -> RunResult:
        world = self.make_world()
        world.hooks.update(hooks or {})
        settings = ProtocolSettings(
            receive=receive, update_ns=5 * self.patience_ns if hooks else self.limit_ns
        )
        deployment = make_sample().deployment
        return run_scenario(world, deployment, settings, densities=densities, memory=self)
