"""How far an update has come in on one rollout rank, and whether a bucket is its next one."""

from __future__ import annotations

from collections.abc import Sequence

from weightsync.reference.buckets import DELTA, FULL, HEADER_BYTES, NO_BASE, End, Header, Range
from weightsync.reference.delta import check_positions
from weightsync.reference.encoding import Encoding
from weightsync.reference.errors import PatchMismatch, StaleVersion
from weightsync.reference.params import ParamMeta


class Progress:
    """What earlier buckets of the same update named, so that nothing is named twice and nothing is left out.

    Args:
        tensors: the plan's checkpoint tensors.
    """

    def __init__(self, tensors: Sequence[ParamMeta]) -> None:
        self._tensors = tensors
        self.reset()

    def reset(self) -> None:
        """Forget the update."""
        self._done: dict[int, int] = {}  # tensor -> positions named up to here
        self._before: dict[int, int] = {}  # the same before the latest bucket, of the tensors in it
        self._sizes: list[int] = []

    def advance(
        self,
        header: Header,
        ranges: Sequence[Range],
        end: End | None,
        *,
        version: int,
        base: int,
        epoch: int,
        sequence: int,
    ) -> None:
        """Take in one bucket, or refuse it and stay as before. The latest one may be taken in again.

        Args:
            header: its header.
            ranges: its ranges.
            end: its trailer, when it is the end.
            version: the version being received.
            base: the version held, or NO_BASE for a full update.
            epoch: the group epoch.
            sequence: number of the bucket that must come now.

        Raises:
            StaleVersion: another version or base version.
            PatchMismatch: group epoch, sequence, kind, order or positions do not fit, or the end comes too
            early.
        """
        _check_header(header, version=version, base=base, epoch=epoch, sequence=sequence)
        if sequence == 0:
            self.reset()
        if not len(self._sizes) - 1 <= sequence <= len(self._sizes):
            raise PatchMismatch(
                f"bucket {sequence} of version {version} follows {len(self._sizes)} validated buckets, "
                "expected the next one or the latest again; validate every bucket in order"
            )
        earlier = self._before if sequence == len(self._sizes) - 1 else {}
        told: dict[int, int] = {}
        for one in ranges:
            number = one.spec.tensor
            start = told.get(number, earlier.get(number, self._done.get(number, 0)))
            told[number] = self._follow(one, start, header.kind)
        if end is not None:
            self._check_end(end, {**self._done, **earlier}, full=base == NO_BASE, sequence=sequence)
        self._done.update(earlier)
        self._before = {number: self._done.get(number, 0) for number in told}
        self._done.update(told)
        self._sizes[sequence:] = [HEADER_BYTES + header.payload_bytes]

    def _follow(self, one: Range, start: int, kind: str) -> int:
        """The first position after a range; PatchMismatch when it does not follow what came before
        ``start``.
        """
        spec, meta = one.spec, self._tensors[one.spec.tensor]
        if spec.encoding is Encoding.DENSE:
            if spec.base < start or (kind == FULL and spec.base != start):
                raise PatchMismatch(
                    f"range of {meta.name!r} starts at position {spec.base} after positions up to "
                    f"{start - 1}, expected {start}{'' if kind == FULL else ' or more'}; name each element "
                    "once, in order"
                )
            return spec.base + spec.count
        positions = one.positions
        if positions is None:
            raise PatchMismatch(
                f"range of {meta.name!r} has no positions, expected int32 ones; unpack it anew"
            )
        check_positions(meta.name, meta.numel, positions, base=spec.base, after=start - 1)
        return spec.base + int(positions[-1]) + 1

    def _check_end(self, end: End, done: dict[int, int], *, full: bool, sequence: int) -> None:
        found = (sequence, sum(self._sizes[:sequence]))
        if (end.buckets, end.nbytes) != found:
            raise PatchMismatch(
                f"trailer announces {end.buckets} buckets of {end.nbytes} bytes, found {found[0]} of "
                f"{found[1]}; send the update again"
            )
        for number, meta in enumerate(self._tensors if full else ()):
            if done.get(number, 0) != meta.numel:
                raise PatchMismatch(
                    f"full update ended with {done.get(number, 0)} of {meta.numel} elements of "
                    f"{meta.name!r}, expected all; send the update again"
                )


def _check_header(header: Header, *, version: int, base: int, epoch: int, sequence: int) -> None:
    head = header.heading
    if head.version != version:
        raise StaleVersion(
            f"bucket is of version {head.version}, expected {version}; drop it, another update runs"
        )
    if head.base != base:
        raise StaleVersion(
            f"bucket of version {version} is made for base version {head.base}, expected {base}; send a "
            "full update"
        )
    if head.epoch != epoch:
        raise PatchMismatch(
            f"bucket of version {version} is of group epoch {head.epoch}, expected {epoch}; close its group"
        )
    if head.sequence != sequence:
        raise PatchMismatch(
            f"bucket of version {version} has sequence {head.sequence}, expected {sequence}; send the "
            "update again"
        )
    if (head.kind == FULL and base != NO_BASE) or (head.kind == DELTA and base == NO_BASE):
        raise PatchMismatch(
            f"bucket of version {version} is {head.kind!r} on base version {base}, expected 'full' without "
            "a base or 'delta' with one; start the update again"
        )
