"""Envelopes: control messages as signed JSON, each one delivered once and in order per sender. Never pickled."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets

from weightsync.reference.control import Message
from weightsync.reference.errors import WeightSyncError

MAC_BYTES = hashlib.sha256().digest_size
LEAST_SECRET_BYTES = 16
_NUMBER_BITS = 32


class Rejected(WeightSyncError):
    """A control message that is dropped: not signed with this run's secret, or delivered before."""


class Envelopes:
    """One rank's way to wrap and unwrap control messages.

    A process that is started in a rank's place is another life of it, with the same name and the same inbox. So
    an envelope says which life it is for, as far as its sender knows, and the numbers of calls are unique to a life:
    neither an order nor a reply for a former life is taken for one to this.

    Args:
        me: name of this rank.
        secret: shared by all ranks of a run, at least 16 bytes; who knows it may give orders.

    Attributes:
        life: 12 hex digits, other ones for each process.

    Raises:
        WeightSyncError: the secret is too short.
    """

    def __init__(self, me: str, secret: bytes) -> None:
        if len(secret) < LEAST_SECRET_BYTES:
            raise WeightSyncError(
                f"the secret of the control plane has {len(secret)} bytes, expected at least {LEAST_SECRET_BYTES}; "
                "make one per run with secrets.token_bytes(32) and give it to every rank"
            )
        self.me = me
        self.life = f"{secrets.randbits(48):012x}"
        self._secret = secret
        self._sent = 0
        self._received: dict[tuple[str, str], int] = {}

    def freeze(self, message: Message) -> bytes:
        """The message as JSON: later changes of it do not reach what is sent."""
        if message.get("kind") == "request" and message.get("number") is not None:
            message = {**message, "number": (int(self.life, 16) << _NUMBER_BITS) | message["number"]}
        return json.dumps(message, separators=(",", ":")).encode()

    def wrap(self, to: str, frozen: bytes, life: str | None = None) -> bytes:
        """The envelope of one message to ``to``. One thread wraps, in the order of sending.

        Args:
            to: name of the rank.
            frozen: what ``freeze`` made.
            life: which life of that rank it is for; None for whichever reads it.
        """
        self._sent += 1
        head = {"from": self.me, "life": self.life, "count": self._sent, "for": life}
        text = json.dumps(head, separators=(",", ":")).encode() + b"\n" + frozen
        return self._mac(to, text) + text

    def unwrap(self, raw: bytes) -> tuple[str, bytes, Message | None]:
        """Sender, its life, and the message to this rank; None for one that is meant for a former life of it.

        One thread unwraps, in the order of arrival.

        Raises:
            Rejected: signed with another secret, addressed to another rank, or seen before.
        """
        mac, text = raw[:MAC_BYTES], raw[MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(self.me, text)):
            raise Rejected(
                f"a control message of {len(raw)} bytes for {self.me} is not signed with this run's secret; "
                "give every rank the same secret"
            )
        head, _, body = text.partition(b"\n")
        envelope, message = json.loads(head), json.loads(body)
        sender, life, count = envelope["from"], envelope["life"], envelope["count"]
        last = self._received.get((sender, life), 0)
        if count <= last:
            raise Rejected(
                f"control message {count} of {sender} came after its message {last}; it is a repetition"
            )
        self._received[sender, life] = count
        if envelope["for"] not in (None, self.life):
            return sender, life.encode(), None
        if message.get("kind") == "reply":
            if message["number"] >> _NUMBER_BITS != int(self.life, 16):
                return sender, life.encode(), None
            message["number"] &= (1 << _NUMBER_BITS) - 1
        return sender, life.encode(), message

    def _mac(self, to: str, text: bytes) -> bytes:
        return hmac.digest(self._secret, to.encode() + b"\0" + text, "sha256")
