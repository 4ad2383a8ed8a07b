"""A bucket, taken apart."""

from __future__ import annotations

from dataclasses import dataclass

from weightsync.reference.buckets import End, Header, Range


@dataclass(eq=False, slots=True)
class Decoded:
    """A bucket, taken apart; the ranges share its payload's memory, which must outlive the apply.

    Attributes:
        header: its header.
        nbytes: bytes on the wire.
        ranges: its ranges, none in a trailer.
        end: the trailer of a success, or None.
        aborted: the sender's reason in the trailer of a failure, or None.
        validated: True once ``Target.validate`` let it pass.
    """

    header: Header
    nbytes: int
    ranges: tuple[Range, ...] = ()
    end: End | None = None
    aborted: str | None = None
    validated: bool = False

    @property
    def kind(self) -> str:
        """Kind of the bucket."""
        return self.header.kind

    @property
    def nnz(self) -> int:
        """Elements that its ranges name."""
        return sum(one.spec.count for one in self.ranges)
