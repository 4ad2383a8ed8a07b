"""The memory of one snapshot tag: what it costs, who reads it, and which copies into it still run."""

from __future__ import annotations

from dataclasses import dataclass, field

from weightsync.reference.devices import CopyEvent
from weightsync.reference.flat_buffers import FlatBuffers


@dataclass(frozen=True, slots=True)
class TagMemory:
    """What one tag costs.

    Attributes:
        tag: its name.
        place: ``"pinned"``, ``"host"`` (pageable) or ``"device"``.
        nbytes: bytes there, padding included.
    """

    tag: str
    place: str
    nbytes: int


@dataclass
class HeldTag:
    """One tag's weights.

    Attributes:
        buffers: its memory.
        places: place -> bytes.
        digest: of the weights, or None while they are torn.
        events: copies into it that may still run.
        readers: who reads it; nobody may write it then.
    """

    buffers: FlatBuffers
    places: dict[str, int]
    digest: int | None = None
    events: list[CopyEvent] = field(default_factory=list)
    readers: list[str] = field(default_factory=list)

    def settle(self) -> None:
        """Wait for every copy under way. Raises what one failed with; the weights count as torn then."""
        events, self.events = self.events, []
        try:
            for event in events:
                event.wait()
        except BaseException:
            self.digest = None
            raise
