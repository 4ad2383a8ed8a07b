"""The control plane of one rank: calls with deadlines, posts, requests to serve, votes. Knows no wire.

It is a state machine over plain messages: ``deliver`` and ``lost`` put events in, ``put`` of the transport takes
messages out, and waiting goes through the clock that is passed in. So one control plane runs in one process, over a
TCPStore and in simulated time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from weightsync.reference.clock import Clock, Future
from weightsync.reference.errors import DeadlineExceeded, PeerLost, RemoteError
from weightsync.reference.verdict import Verdict, Vote, verdict_from, verdict_message

Message = dict[str, Any]
"""A JSON-able message: only dicts with string keys, lists, strings, ints, booleans and None. Never pickled."""

INQUIRE = "inquire"
"""The request that is answered on arrival, whatever else the rank does; see ``Control.disclose``."""

REMEMBERED_BALLOTS = 64
"""Verdicts a rank keeps, so that a late or repeated vote still gets its answer."""


class Transport(Protocol):
    """Carries messages between ranks, in order per sender; may deliver late, never twice."""

    def put(self, peer: str, message: Message) -> None:
        """Hand a message over without blocking; a message to a rank that is gone is dropped."""


@dataclass(frozen=True, slots=True)
class Request:
    """One control message to serve.

    Attributes:
        source: name of the rank that asks.
        op: what it asks for.
        body: the arguments.
        number: identifies the call at its source; None for a post, which expects no reply.
        deadline_ns: by when the caller wants the reply, on the server's own clock; None for a post.
    """

    source: str
    op: str
    body: Mapping[str, Any]
    number: int | None
    deadline_ns: int | None


@dataclass
class _Ballot:
    votes: dict[str, Vote] = field(default_factory=dict)
    verdict: Verdict | None = None
    wake: Future | None = None


class Control:
    """One rank's end of the control plane; all methods run on the rank's own loop.

    Args:
        me: name of this rank.
        clock: the rank's clock.
        transport: where messages go.
    """

    def __init__(self, me: str, clock: Clock, transport: Transport) -> None:
        self.me = me
        self.clock = clock
        self.transport = transport
        self._calls: dict[int, tuple[str, Future]] = {}
        self._calls_made = 0
        self._requests: deque[Request] = deque()
        self._server: Future | None = None
        self._ballots: dict[str, _Ballot] = {}
        self._lost: dict[str, bool] = {}
        self._losses: Counter[str] = Counter()
        self._back: Future | None = None
        self._disclose: Callable[[], Mapping[str, Any]] | None = None

    # ---- events in -------------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        """Take in one message from the transport."""
        kind = message["kind"]
        if kind == "request":
            remaining = message["remaining_ns"]
            deadline = None if remaining is None else self.clock.now_ns() + remaining
            request = Request(message["from"], message["op"], message["body"], message["number"], deadline)
            if request.op == INQUIRE:
                self._answer_inquiry(request)
                return
            self._requests.append(request)
            self._wake(self._server)
        elif kind == "reply":
            _, future = self._calls.get(message["number"], ("", None))
            if future is not None:
                future.set_result(message)
        elif kind == "vote":
            self._take_vote(message)
        elif kind == "verdict":
            ballot = self._ballot(message["key"])
            ballot.verdict = ballot.verdict or verdict_from(message)
            self._wake(ballot.wake)

    def disclose(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """From now on answer inquiries with ``state()``, when they arrive: no server sees them, nothing waits."""
        self._disclose = state

    def lost(self, peer: str) -> None:
        """The lease of ``peer`` ended: everything that waits for it fails now, naming it."""
        self._lost[peer] = True
        self._losses[peer] += 1
        for name, future in list(self._calls.values()):
            if name == peer:
                future.set_exception(PeerLost(peer, "call"))
        self._wake(self._server)
        for ballot in list(self._ballots.values()):
            self._wake(ballot.wake)

    def found(self, peer: str) -> None:
        """The lease of ``peer`` is held again, by the same process or by another one in its place."""
        self._lost[peer] = False
        self._wake(self._back)

    def is_lost(self, peer: str) -> bool:
        """True while the lease of ``peer`` is over."""
        return self._lost.get(peer, False)

    def losses(self, peer: str) -> int:
        """How often the lease of ``peer`` ended so far; between equal answers it was held."""
        return self._losses[peer]

    async def until_found(self, peers: Sequence[str], deadline_ns: int) -> None:
        """Return while no lease of ``peers`` is over. DeadlineExceeded at ``deadline_ns``."""
        while missing := [peer for peer in peers if self.is_lost(peer)]:
            self._back = self.clock.future()
            try:
                await self.clock.wait(self._back, deadline_ns)
            except TimeoutError:
                raise DeadlineExceeded(f"the return of {', '.join(missing)}") from None

    # ---- what the verbs do -----------------------------------------------------------------------------------

    async def call(self, peer: str, op: str, body: Mapping[str, Any], deadline_ns: int) -> Mapping[str, Any]:
        """The peer's reply body. Raises RemoteError, PeerLost, or DeadlineExceeded at ``deadline_ns``."""
        if self.is_lost(peer):
            raise PeerLost(peer, f"call {op!r}")
        self._calls_made += 1
        number = self._calls_made
        future = self.clock.future()
        self._calls[number] = (peer, future)
        try:
            self._send(peer, op, body, number, deadline_ns - self.clock.now_ns())
            reply = await self.clock.wait(future, deadline_ns)
        except TimeoutError:
            raise DeadlineExceeded(f"call {op!r} to {peer}") from None
        finally:
            del self._calls[number]
        if reply["error"] is not None:
            raise RemoteError(peer, reply["error"], reply["lost"])
        body_out: Mapping[str, Any] = reply["body"]
        return body_out

    def post(self, peer: str, op: str, body: Mapping[str, Any]) -> None:
        """Send a request that expects no reply."""
        self._send(peer, op, body, None, None)

    async def serve(self, deadline_ns: int | None, watch: str | None) -> Request:
        """The next request, oldest first; ``unserve`` gives it back.

        Raises DeadlineExceeded at ``deadline_ns``, and PeerLost once ``watch``'s lease is over and no request waits.
        """
        while not self._requests:
            if watch is not None and self.is_lost(watch):
                raise PeerLost(watch, "serve")
            self._server = self.clock.future()
            try:
                await self.clock.wait(self._server, deadline_ns)
            except TimeoutError:
                raise DeadlineExceeded("serve") from None
        return self._requests.popleft()

    def unserve(self, request: Request) -> None:
        """Put a served request back as the oldest: whoever served it failed before looking at it."""
        self._requests.appendleft(request)

    def reply(
        self,
        request: Request,
        body: Mapping[str, Any] | None = None,
        *,
        error: str | None = None,
        lost: str | None = None,
    ) -> None:
        """Answer a request with a body or an error text; nothing happens for a post."""
        if request.number is not None:
            self.transport.put(
                request.source,
                {
                    "kind": "reply",
                    "number": request.number,
                    "body": dict(body or {}),
                    "error": error,
                    "lost": lost,
                },
            )

    async def agree(
        self, members: Sequence[str], key: str, vote: Vote, deadline_ns: int, patience_ns: int
    ) -> Verdict:
        """The verdict of ``members`` about the stage ``key``, the same on every rank that gets one.

        The first member collects votes until ``deadline_ns`` and decides; the others wait for its verdict until
        ``patience_ns``, however late it is, since leaving alone would split the group. Repeating it is safe: the
        first vote of a rank counts. Raises PeerLost when the first member's lease ends, DeadlineExceeded at
        ``patience_ns``.
        """
        ballot = self._ballot(key)
        leader = members[0]
        if leader == self.me:
            ballot.votes.setdefault(self.me, vote)
            return await self._decide(ballot, members, key, deadline_ns)
        said = {"ok": vote.ok, "reason": vote.reason, "data": dict(vote.data)}
        self.transport.put(leader, {"kind": "vote", "key": key, "from": self.me, **said})
        while ballot.verdict is None:
            if self.is_lost(leader):
                raise PeerLost(leader, f"agree {key!r}")
            ballot.wake = self.clock.future()
            try:
                await self.clock.wait(ballot.wake, patience_ns)
            except TimeoutError:
                raise DeadlineExceeded(f"agree {key!r} with {leader}") from None
        return ballot.verdict

    # ---- inner -----------------------------------------------------------------------------------------------

    async def _decide(self, ballot: _Ballot, members: Sequence[str], key: str, deadline_ns: int) -> Verdict:
        while ballot.verdict is None:
            missing = [name for name in members if name not in ballot.votes]
            late = not any(not self.is_lost(name) for name in missing)
            if missing and not late:
                ballot.wake = self.clock.future()
                try:
                    await self.clock.wait(ballot.wake, deadline_ns)
                    continue
                except TimeoutError:
                    missing = [name for name in members if name not in ballot.votes]
            ballot.verdict = Verdict(
                {name: ballot.votes[name] for name in members if name in ballot.votes},
                tuple(missing),
                tuple(name for name in missing if self.is_lost(name)),
            )
            for name in members:
                if name != self.me:
                    self.transport.put(name, verdict_message(key, ballot.verdict))
        return ballot.verdict

    def _answer_inquiry(self, request: Request) -> None:
        if self._disclose is None:
            self.reply(request, error=f"{self.me} has nothing to say of itself; ask a rollout rank")
        else:
            self.reply(request, self._disclose())

    def _take_vote(self, message: Message) -> None:
        ballot = self._ballot(message["key"])
        if ballot.verdict is not None:
            self.transport.put(message["from"], verdict_message(message["key"], ballot.verdict))
            return
        ballot.votes.setdefault(message["from"], Vote(message["ok"], message["reason"], message["data"]))
        self._wake(ballot.wake)

    def _ballot(self, key: str) -> _Ballot:
        if key not in self._ballots:
            while len(self._ballots) >= REMEMBERED_BALLOTS:
                del self._ballots[next(iter(self._ballots))]
            self._ballots[key] = _Ballot()
        return self._ballots[key]

    def _send(
        self, peer: str, op: str, body: Mapping[str, Any], number: int | None, remaining_ns: int | None
    ) -> None:
        asked = {"op": op, "body": dict(body), "number": number, "remaining_ns": remaining_ns}
        self.transport.put(peer, {"kind": "request", "from": self.me, **asked})

    @staticmethod
    def _wake(future: Future | None) -> None:
        if future is not None:
            future.set_result(None)
