"""Simulated runs with everything that their ranks said to each other, for the sequence charts to draw.

Three updates of one trainer of two ranks and one rollout of two ranks. The first is full, the second fails, the
third connects anew and heals.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from weightsync.reference.control import Message
from weightsync.reference.deployment import Deployment, RolloutLayout
from weightsync.reference.members import Group, RankId
from weightsync.reference.model import ModelShape
from weightsync.reference.rank import Verbs
from weightsync.reference.trace import Span, Trace
from weightsync.testing.scenario import run_scenario
from weightsync.testing.worlds import SimRanks

MODEL = ModelShape(vocab=16, hidden=16, intermediate=32, layers=1, heads=4, kv_heads=2, head_dim=4)
BUCKET_BYTES = 2048
DENSITIES = (1.0, 0.1, 0.1)


@dataclass
class Said:
    """One control message.

    Attributes:
        kind: ``request``, ``reply``, ``vote`` or ``verdict``.
        op: what was asked, in a reply too; the key of a ballot in a vote or verdict.
        arrived_ns: None while it is under way.
    """

    source: str
    target: str
    sent_ns: int
    kind: str
    op: str
    message: Message
    arrived_ns: int | None = None


@dataclass
class Sent:
    """One bucket: from when the lead offers it until the group has it."""

    kind: str
    nbytes: int
    ranks: tuple[str, ...]
    start_ns: int
    end_ns: int


@dataclass
class Recording:
    """A run and what was said in it, in the order in which it was said."""

    said: list[Said] = field(default_factory=list)
    sent: list[Sent] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)

    def spans(self, update: int) -> list[Span]:
        """Every rank's verbs of one update."""
        return [span for span in self.trace.spans if span.update == update]

    def listen(self, verbs: Verbs) -> None:
        """Look over one rank's shoulder; changes nothing of what it does."""
        me, control = str(verbs.me), verbs.control
        control.transport = Mouth(self, me, verbs, control.transport)
        verbs.fabric = Hands(self, verbs, verbs.fabric)
        deliver, now_ns = control.deliver, verbs.clock.now_ns

        def heard(message: Message) -> None:
            said = self._on_their_way[me, json.dumps(message)].pop(0)
            said.arrived_ns = now_ns()
            deliver(message)

        control.deliver = heard  # type: ignore[method-assign]

    def say(self, source: str, target: str, now_ns: int, message: Message) -> None:
        """Note a message that leaves now."""
        kind = message["kind"]
        if kind == "request":
            op = message["op"]
            if message["number"] is not None:
                self._asked[target, source, message["number"]] = op
        else:
            op = message["key"] if kind != "reply" else self._asked[source, target, message["number"]]
        said = Said(source, target, now_ns, kind, op, message)
        self.said.append(said)
        self._on_their_way[target, json.dumps(message)].append(said)

    def __post_init__(self) -> None:
        self._on_their_way: dict[tuple[str, str], list[Said]] = defaultdict(list)
        self._asked: dict[tuple[str, str, int], str] = {}


class Mouth:
    """A rank's transport that notes what it carries; ``reference.control.Transport``."""

    def __init__(self, recording: Recording, me: str, verbs: Verbs, inner: Any) -> None:
        self._recording, self._me, self._verbs, self._inner = recording, me, verbs, inner

    def put(self, peer: str, message: Message) -> None:
        """Note, then carry."""
        self._recording.say(self._me, peer, self._verbs.now_ns(), message)
        self._inner.put(peer, message)


class Hands:
    """A rank's fabric that notes what it sends; everything else is the inner one's."""

    def __init__(self, recording: Recording, verbs: Verbs, inner: Any) -> None:
        self._recording, self._verbs, self._inner = recording, verbs, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def send(self, group: Group, bucket: Any, deadline_ns: int) -> None:
        """Send, then note."""
        start_ns = self._verbs.now_ns()
        await self._inner.send(group, bucket, deadline_ns)
        ranks = tuple(map(str, group.members))
        self._recording.sent.append(
            Sent(bucket.header.kind, bucket.nbytes, ranks, start_ns, self._verbs.now_ns())
        )


@dataclass
class Failing:
    """Hooks that fail some calls of one verb before they take effect; ``reference.rank.Hooks``.

    Attributes:
        verb: its name.
        which: the calls that fail, counted from 1.
        seen: calls so far.
    """

    verb: str
    which: range
    seen: int = 0

    async def before(self, verb: str) -> int:
        """Count calls; fail the planned ones."""
        self.seen += verb == self.verb
        if verb == self.verb and self.seen in self.which:
            raise OSError("no route to host")
        return 0

    async def after(self, verb: str, ordinal: int) -> None:
        """Nothing fails after it took effect."""


def record(rank: RankId, failing: Failing, stage: str) -> Recording:
    """Run the three updates on simulated time; ``failing`` on ``rank`` ends the second one in ``stage``."""
    recording = Recording()
    deployment = Deployment(MODEL, 2, (RolloutLayout(2, True),), BUCKET_BYTES, 8, 16)
    world = SimRanks(recording.listen, hooks={rank: failing}, trace=recording.trace)
    first, second, third = run_scenario(world, deployment, densities=DENSITIES).updates
    if not (first.committed and third.committed) or f"stage {stage!r}" not in second.reason:
        raise RuntimeError(f"the run is not the one to be drawn: {(first, second, third)}")
    return recording


def record_success() -> Recording:
    """A run whose third update starts from connect, as after any failure: a snapshot failed in the second."""
    return record(RankId("trainer", 0, 1), Failing("snapshot", range(2, 3)), "source")


def record_rollback() -> Recording:
    """A run whose lead cannot say commit in the second update. It calls hello, start, prepare and commit first,
    then start and prepare, then commit and its two repetitions.
    """
    return record(RankId("trainer", 0, 0), Failing("call", range(7, 10)), "commit")
