"""The smallest backend: all ranks on one asyncio loop, buckets handed over in memory, no cost but the machine's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from weightsync.backends.asyncio_clock import AsyncioClock
from weightsync.reference.control import Control, Message
from weightsync.reference.members import RankId
from weightsync.reference.rank import Engine, Hooks, Verbs
from weightsync.reference.rendezvous import MeetingFabric, Meetings
from weightsync.reference.trace import Trace


class InprocessWorld:
    """What the ranks of one process share: their mailboxes and their groups. One event loop runs them all."""

    def __init__(self) -> None:
        self.meetings = Meetings(lambda rendezvous, meeting: rendezvous.done(meeting))
        self.controls: dict[str, Control] = {}

    def put(self, peer: str, message: Message) -> None:
        """Deliver a message on the loop's next turn; through JSON, so that it owns its memory and hides no object."""
        text = json.dumps(message)
        control = self.controls.get(peer)
        if control is not None:
            asyncio.get_running_loop().call_soon(lambda: control.deliver(json.loads(text)))

    def verbs(
        self,
        me: RankId,
        local: Any,
        *,
        engine: Engine | None = None,
        trace: Trace | None = None,
        hooks: Hooks | None = None,
    ) -> Verbs:
        """The verbs of one rank; call it on the loop that will run the rank.

        Args:
            me: the rank.
            local: its bytes, a ``Source`` or a ``Target``; they stay the caller's.
            engine: what generates, on the leader of a rollout.
            trace: where spans go; shared between ranks if the caller likes.
            hooks: sees every verb.
        """
        clock = AsyncioClock(asyncio.get_running_loop(), rank_name=str(me))
        control = Control(str(me), clock, self)
        self.controls[str(me)] = control
        return Verbs(me, clock, control, MeetingFabric(me, clock, self.meetings), local, engine, trace, hooks)
