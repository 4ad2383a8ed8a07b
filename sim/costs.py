"""Nanoseconds and resource of one verb. Pure: a table, a profile and integers.

A verb costs a fixed part, its messages' way, and its bytes at the rate of what works on them. What a data
group carries over a link is not in the cost: links are shared, so ``FluidNet`` says how long that takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from weightsync.reference.errors import WeightSyncError
from weightsync.sim.hardware import Profile

Resource = Literal["link", "cpu", "none"]


class UnknownVerb(WeightSyncError, KeyError):
    """A verb that has no price."""

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(frozen=True, slots=True)
class Price:
    """How a verb is priced; names are dotted names of a profile's numbers.

    Attributes:
        resource: ``link`` when a data group carries bytes for it, ``cpu`` when only the rank itself works on
            bytes, ``none`` when nobody does.
        rate: bytes per second at which the rank itself works on the verb's bytes; None when it does not.
        fixed: ns of its fixed part.
        messages: control messages that must arrive, one after the other, before it can return.
    """

    resource: Resource
    rate: str | None = None
    fixed: str = "host.verb_ns"
    messages: int = 0


PRICES: Mapping[str, Price] = {
    "connect": Price("none", fixed="control.connect_ns"),
    "disconnect": Price("none"),
    "call": Price("none", messages=2),
    "post": Price("none", messages=1),
    "reply": Price("none", messages=1),
    "serve": Price("none"),
    "agree": Price("none", messages=2),
    "spawn": Price("none"),
    "join": Price("none"),
    "until_found": Price("none"),
    "cancel": Price("none"),
    "pause": Price("none", fixed="generation.pause_ns"),
    "resume": Price("none", fixed="generation.resume_ns"),
    "status": Price("none"),
    "snapshot": Price("cpu", "host.memcpy_bytes_per_s"),
    "snapshot_on_device": Price("cpu", "device.scan_bytes_per_s"),
    "diff": Price("cpu", "device.scan_bytes_per_s"),
    "squash": Price("cpu", "device.encode_bytes_per_s"),
    "exchange": Price("link"),
    "gather": Price("link", "host.memcpy_bytes_per_s"),
    "merge": Price("cpu", "host.memcpy_bytes_per_s"),
    "narrow": Price("cpu", "host.memcpy_bytes_per_s"),
    "encode": Price("cpu", "device.encode_bytes_per_s"),
    "send": Price("link"),
    "receive": Price("link"),
    "decode": Price("cpu", "device.decode_bytes_per_s"),
    "validate": Price("cpu", "device.validate_bytes_per_s"),
    "apply": Price("cpu", "device.apply_bytes_per_s"),
    "rollback": Price("cpu", "device.apply_bytes_per_s"),
    "commit": Price("none"),
    "digest": Price("cpu", "device.digest_bytes_per_s"),
    "compare_digests": Price("none"),
    "optimizer": Price("cpu", "device.optimizer_bytes_per_s"),
}
"""Every verb, a snapshot that stays on the device, and the optimizer step between two updates."""


def price(verb: str) -> Price:
    """How ``verb`` is priced; raises UnknownVerb, naming near names."""
    try:
        return PRICES[verb]
    except KeyError:
        near = get_close_matches(verb, PRICES, n=3) or sorted(PRICES)
        raise UnknownVerb(f"no price for verb {verb!r}; did you mean {', '.join(map(repr, near))}?") from None


def cost_ns(verb: str, nbytes: int, profile: Profile) -> int:
    """What ``verb`` costs the rank itself on ``nbytes`` bytes, in ns, rounded up; a link's time comes on top.

    Raises UnknownVerb, and ValueError for a negative byte count.
    """
    if nbytes < 0:
        raise ValueError(f"{verb!r} on {nbytes} bytes; give 0 or more")
    how, numbers = price(verb), profile.quantities
    total = numbers[how.fixed].value + how.messages * profile.control.message_ns
    if how.rate is not None:
        total -= -nbytes * 10**9 // numbers[how.rate].value
    return total
