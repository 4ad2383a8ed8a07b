"""Conformance of the control plane, of tasks, and of the spans that verbs leave."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.reference.errors import DeadlineExceeded, PeerLost, RemoteError, UnsupportedCapability
from weightsync.reference.members import RankId
from weightsync.reference.rank import PHASES, Verbs
from weightsync.reference.trace import Trace
from weightsync.reference.votes import Vote
from weightsync.testing.conformance_base import ConformanceBase, attempt, expect_equal, expect_refused
from weightsync.testing.conformance_sample import make_sample

A, B, C = RankId("trainer", 0, 0), RankId("rollout", 0, 0), RankId("rollout", 1, 0)
BODY = {"text": "\0é\u2028", "numbers": [0, -1, (1 << 63) - 1], "none": None, "nested": {"yes": True}}


class Recorder:
    """Hooks that note the names of verbs, and can make one fail."""

    def __init__(self, fail: str = "") -> None:
        self.seen: list[tuple[str, str, int]] = []
        self.fail = fail

    async def before(self, verb: str) -> int:
        """See ``reference.rank.Hooks``."""
        self.seen.append(("before", verb, len(self.seen)))
        if verb == self.fail:
            raise OSError("planted")
        return len(self.seen) - 1

    async def after(self, verb: str, ordinal: int) -> None:
        """See ``reference.rank.Hooks``."""
        self.seen.append(("after", verb, ordinal))


class ControlConformance(ConformanceBase):
    """A call is answered, or ends by its deadline and names the peer; all leave a stage with one verdict."""

    def test_a_call_gets_its_reply(self) -> None:
        async def ask(verbs: Verbs) -> Any:
            return dict(await verbs.call(B, "look", BODY, verbs.now_ns() + self.limit_ns))

        async def answer(verbs: Verbs) -> Any:
            request = await verbs.serve(verbs.now_ns() + self.limit_ns, A)
            await verbs.reply(request, {"got": dict(request.body)})
            await verbs.reply(request, {"got": "again"})
            return request.source, request.op, dict(request.body)

        results = self.results({A: ask, B: answer})
        expect_equal(results[B], (str(A), "look", BODY), "request that serve gave")
        expect_equal(results[A], {"got": BODY}, "reply to a call")

    def test_requests_are_served_in_the_order_in_which_one_peer_sent_them(self) -> None:
        async def tell(verbs: Verbs) -> None:
            for number in range(5):
                await verbs.post(B, "note", {"number": number})

        async def listen(verbs: Verbs) -> list[int]:
            requests = [await verbs.serve(verbs.now_ns() + self.limit_ns, A) for _ in range(5)]
            return [request.body["number"] for request in requests]

        expect_equal(self.results({A: tell, B: listen})[B], [0, 1, 2, 3, 4], "posts that serve gave")

    def test_a_message_owns_its_memory(self) -> None:
        async def tell(verbs: Verbs) -> None:
            numbers = [1]
            await verbs.post(B, "note", {"numbers": numbers})
            numbers.append(2)

        async def listen(verbs: Verbs) -> Any:
            return (await verbs.serve(verbs.now_ns() + self.limit_ns, A)).body["numbers"]

        expect_equal(
            self.results({A: tell, B: listen})[B], [1], "a message whose sender changed it after post"
        )

    def test_an_error_reply_is_an_error_that_names_the_peer(self) -> None:
        async def ask(verbs: Verbs) -> Any:
            return await attempt(verbs.call(B, "look", {}, verbs.now_ns() + self.limit_ns))

        async def answer(verbs: Verbs) -> None:
            request = await verbs.serve(verbs.now_ns() + self.limit_ns, A)
            await verbs.reply(request, error="no room", lost="rollout9.1")

        (end,) = self.results({A: ask, B: answer})[A]
        expect_refused(end, RemoteError, "call that was answered with an error", str(B), "no room")
        expect_equal((end.peer, end.lost), (str(B), "rollout9.1"), "peer and lost rank of the error")

    def test_a_call_that_nobody_answers_ends_by_its_deadline_and_names_the_peer(self) -> None:
        async def ask(verbs: Verbs) -> Any:
            (end,) = await attempt(verbs.call(B, "look", {}, verbs.now_ns() + self.patience_ns))
            await verbs.post(B, "enough", {})
            return (end,)

        async def ignore(verbs: Verbs) -> None:
            while (await verbs.serve(verbs.now_ns() + self.limit_ns, A)).op != "enough":
                pass

        (end,) = self.results({A: ask, B: ignore})[A]
        expect_refused(end, DeadlineExceeded, f"call to {B}, which does not answer", str(B))

    def test_serve_ends_by_its_deadline(self) -> None:
        async def main(verbs: Verbs) -> Any:
            return await attempt(verbs.serve(verbs.now_ns() + self.patience_ns, A))

        expect_refused(self.results({B: main})[B][0], DeadlineExceeded, "serve without a request")

    def test_a_lost_rank_ends_calls_and_serving_and_is_named(self) -> None:
        world = self.make_world()

        async def doomed(verbs: Verbs) -> None:
            await verbs.serve(verbs.now_ns() + self.limit_ns, A)
            world.kill(verbs.me)
            await verbs.serve(None, A)

        async def ask(verbs: Verbs) -> Any:
            return await attempt(verbs.call(B, "look", {}, verbs.now_ns() + self.limit_ns))

        async def follow(verbs: Verbs) -> Any:
            return await attempt(verbs.serve(verbs.now_ns() + self.limit_ns, B))

        results = world.run({A: ask, B: doomed, C: follow})
        if isinstance(results.get(B), UnsupportedCapability):
            pytest.skip(str(results[B]))
        for rank, verb in ((A, "call to"), (C, "serve under")):
            expect_refused(results[rank][0], PeerLost, f"{verb} {B}, which was killed", str(B))

    @pytest.mark.parametrize("refusing", [None, C], ids=["all", "all but one"])
    def test_every_rank_leaves_a_stage_with_one_verdict(self, refusing: RankId | None) -> None:
        async def main(verbs: Verbs) -> Any:
            deadline_ns, ok = verbs.now_ns() + self.limit_ns, verbs.me != refusing
            vote = Vote(ok, "" if ok else "no room", {"me": str(verbs.me)})
            verdict = await verbs.agree((A, B, C), "7/stage", vote, deadline_ns, 2 * deadline_ns)
            again = await verbs.agree((A, B, C), "7/stage", Vote(True), deadline_ns, 2 * deadline_ns)
            said = {name: one.data["me"] for name, one in verdict.votes.items()}
            return verdict.ok, verdict.reason, said, again.ok, again.reason

        results = self.results(dict.fromkeys((A, B, C), main))
        ok, reason = (True, "") if refusing is None else (False, f"{refusing}: no room")
        for rank, found in results.items():
            said = {str(one): str(one) for one in (A, B, C)}
            expect_equal(found, (ok, reason, said, ok, reason), f"two equal verdicts of agree on {rank}")

    def test_a_verdict_names_who_did_not_vote(self) -> None:
        async def main(verbs: Verbs) -> Any:
            deadline_ns = verbs.now_ns() + self.patience_ns
            patience_ns = verbs.now_ns() + self.limit_ns
            verdict = await verbs.agree((A, B, C), "7/stage", Vote(True), deadline_ns, patience_ns)
            return verdict.ok, verdict.missing

        for rank, found in self.results({A: main, B: main}).items():
            expect_equal(found, (False, (str(C),)), f"verdict without the vote of {C} on {rank}")

    # ---- tasks and spans -----------------------------------------------------------------------------------

    def test_join_raises_the_first_failure_at_once(self) -> None:
        async def fail() -> None:
            raise OSError("planted")

        async def main(verbs: Verbs) -> Any:
            waiting = verbs.spawn(verbs.serve(None, A), "waiting")
            (end,) = await attempt(verbs.join([waiting, verbs.spawn(fail(), "failing")], None))
            running = not waiting.done()
            await verbs.cancel(waiting)
            return (end,), running, waiting.done()

        (end,), running, ended = self.results({B: main})[B]
        expect_refused(end, OSError, "join of a waiting and a failing task", "planted")
        expect_equal(
            (running, ended), (True, True), "other task still running after join, and ended after cancel"
        )

    def test_every_verb_leaves_a_span_and_is_seen_by_the_hooks(self) -> None:
        sample, trace, hooks = make_sample(), Trace(), Recorder(fail="diff")
        rank = sample.trainers[0]
        source = self.sources(sample)[rank]

        async def main(verbs: Verbs) -> Any:
            verbs.trace, verbs.hooks, verbs.update = trace, hooks, 7
            held = await verbs.snapshot(0)
            await verbs.source_digest(0)
            await attempt(verbs.diff(0, None))
            return held.nbytes

        nbytes = self.results({rank: main}, {rank: source})[rank]
        found = [(s.rank, s.verb, s.phase, s.nbytes, s.update, s.ok) for s in trace.spans]
        expected = [
            (str(rank), verb, PHASES[verb], moved, 7, ok)
            for verb, moved, ok in (("snapshot", nbytes, True), ("digest", 0, True), ("diff", 0, False))
        ]
        expect_equal(found, expected, "rank, verb, phase, bytes, update and success of three spans")
        for span in trace.spans:
            assert span.start_ns <= span.end_ns, f"{span.verb} ends at {span.end_ns}, before {span.start_ns}"
        calls = [("before", "snapshot", 0), ("after", "snapshot", 0), ("before", "digest", 2)]
        calls += [("after", "digest", 2), ("before", "diff", 4)]
        expect_equal(hooks.seen, calls, "what the hooks were called with")
