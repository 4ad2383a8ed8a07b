"""Streams: named byte runs of a section, each as it is or as one zstd frame, behind a table of their sizes.

A section in STREAMS or ZSTD packing begins with 8 bytes a stream, u32 stored and u32 plain bytes, and the stored
bytes follow in the same order without gaps. A stream whose two sizes are equal is stored as it is.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from weightsync.reference.errors import PatchMismatch

Bytes = NDArray[np.uint8]
Integers = NDArray[Any]

STREAM_BYTES = 8
LARGEST_STREAM = (1 << 32) - 1


class Zstd:
    """Compresses and restores frames; every thread has contexts of its own, made once.

    The match finder is set to long matches in a tiny table: what is left in the planes is skew, which the entropy
    coder takes, and hardly any repetition. Measured on gaps of 0.1 % to 30 % changed elements, that is never larger
    and up to four times as fast as level 1 as it comes.
    """

    def __init__(self) -> None:
        self._threads = threading.local()

    def compress(self, plain: Bytes) -> bytes:
        """One frame of level 1 that states its content size."""
        if not hasattr(self._threads, "compressor"):
            parameters = zstandard.ZstdCompressionParameters.from_level(
                1, min_match=7, hash_log=6, write_content_size=True
            )
            self._threads.compressor = zstandard.ZstdCompressor(compression_params=parameters)
        frame: bytes = self._threads.compressor.compress(plain)
        return frame

    def restore(self, frame: Bytes, nbytes: int, what: str) -> Bytes:
        """The content of a frame, which must be ``nbytes`` long; no more than that is ever allocated.

        Raises:
            PatchMismatch: not exactly one sound frame that states this content size.
        """
        if not hasattr(self._threads, "decompressor"):
            self._threads.decompressor = zstandard.ZstdDecompressor()
        raw = frame.tobytes()
        try:
            stated = zstandard.get_frame_parameters(raw).content_size
            if stated != nbytes:
                raise PatchMismatch(
                    f"{what} holds a zstd frame of {stated} bytes, expected {nbytes}; send the update again"
                )
            content = self._threads.decompressor.decompress(
                raw, max_output_size=nbytes, read_across_frames=False, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise PatchMismatch(
                f"{what} holds no sound zstd frame ({error}), expected one of {nbytes} bytes; "
                "send the update again"
            ) from error
        return np.frombuffer(content, np.uint8)


def planes(items: Integers, split: bool) -> list[Bytes]:
    """``items`` as one stream of little-endian bytes or, split, as one stream a byte, lowest first."""
    raw = np.ascontiguousarray(items).view(np.uint8)
    if not split or items.itemsize == 1:
        return [raw]
    return [np.ascontiguousarray(raw[byte :: items.itemsize]) for byte in range(items.itemsize)]


def plane_sizes(count: int, itemsize: int, split: bool) -> list[int]:
    """Plain bytes of the streams that ``planes`` makes of ``count`` items."""
    return [count] * itemsize if split else [count * itemsize]


def unplane(streams: Sequence[Bytes], dtype: Any) -> Integers:
    """What ``planes`` was given, from its streams; new memory unless it was one aligned stream."""
    itemsize = np.dtype(dtype).itemsize
    if len(streams) == 1:
        (raw,) = streams
        aligned = raw.ctypes.data % itemsize == 0 and raw.flags.c_contiguous
        return (raw if aligned else raw.copy()).view(dtype)
    raw = np.empty((streams[0].size, itemsize), np.uint8)
    for byte, stream in enumerate(streams):
        raw[:, byte] = stream
    return raw.reshape(-1).view(dtype)


def write_streams(streams: Sequence[Bytes], zstd: Zstd | None) -> list[Bytes] | None:
    """The table and the stored bytes of ``streams``, in order; None when a stream is too large for the table.

    Args:
        streams: plain bytes.
        zstd: compresses each where that is smaller; None stores them as they are.
    """
    table = np.empty((len(streams), 2), "<u4")
    stored: list[Bytes] = []
    for index, plain in enumerate(streams):
        if plain.size > LARGEST_STREAM:
            return None
        taken = plain
        if zstd is not None and plain.size:
            frame = zstd.compress(plain)
            if len(frame) < plain.size:
                taken = np.frombuffer(frame, np.uint8)
        table[index] = taken.size, plain.size
        stored.append(taken)
    return [table.reshape(-1).view(np.uint8), *stored]


class StreamReader:
    """The streams of one section, handed out one by one, each only after its plain size was found plausible.

    Args:
        section: the section's bytes.
        count: streams it has.
        zstd: restores frames; None where none may be.
        name: the tensor, for errors.

    Raises:
        PatchMismatch: the table does not fit the section.
    """

    def __init__(self, section: Bytes, count: int, zstd: Zstd | None, name: str) -> None:
        self._section, self._zstd, self._name = section, zstd, name
        self._start, self._next = count * STREAM_BYTES, 0
        if section.size < self._start:
            raise self.refusal(
                f"has {section.size} bytes", f"a table of {count} streams, {self._start} bytes"
            )
        self._table: list[list[int]] = section[: self._start].copy().view("<u4").reshape(-1, 2).tolist()
        ends = self._start + sum(stored for stored, _ in self._table)
        if ends != section.size:
            raise self.refusal(f"has {section.size} bytes", f"the {ends} that its streams come to")
        for number, (stored, plain) in enumerate(self._table):
            if stored > plain or (zstd is None and stored != plain):
                raise self.refusal(
                    f"stores {stored} bytes for {plain} in stream {number}",
                    "as many" if zstd is None else "no more than that",
                )

    def refusal(self, found: str, expected: str) -> PatchMismatch:
        """The error for this section."""
        return PatchMismatch(f"section of {self._name!r} {found}, expected {expected}; send the update again")

    @property
    def size(self) -> int:
        """Plain bytes that the next stream announces."""
        return self._table[self._next][1]

    def take(self, expected: int) -> Bytes:
        """The next stream, of exactly ``expected`` plain bytes; in the section's memory unless compressed."""
        stored, plain = self._table[self._next]
        if plain != expected:
            raise self.refusal(f"announces {plain} bytes in stream {self._next}", str(expected))
        raw = self._section[self._start : self._start + stored]
        self._start += stored
        self._next += 1
        if stored == plain or self._zstd is None:
            return raw
        return self._zstd.restore(raw, plain, f"stream {self._next - 1} of {self._name!r}")

    def take_planes(self, count: int, itemsize: int, split: bool) -> list[Bytes]:
        """The next streams, those of ``count`` items."""
        return [self.take(size) for size in plane_sizes(count, itemsize, split)]
