"""Preprocess images, videos and sounds once per prompt group, where its samples have the same inputs."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Processor = Callable[[str, Mapping[str, Sequence[Any]]], Mapping[str, Any]]
"""From a prompt and its media to the inputs of a model, such as token numbers and pixel values; a pure function."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """What one sample's preprocessing reads.

    Attributes:
        prompt: its text, with whatever marks the places of media.
        media: kind, such as ``images``, -> the media in order: tensors, arrays, bytes, or images of Pillow.
    """

    prompt: str
    media: Mapping[str, Sequence[Any]]


@dataclass(frozen=True, eq=False)
class Processed:
    """The outputs of one sample.

    Attributes:
        outputs: what the processor gave; no other sample's outputs share its storage.
        called: the processor was called for this sample; False where the outputs are a copy.
        elapsed_ns: what that call took; 0 without one, so that a sum over samples counts each call once.
    """

    outputs: Mapping[str, Any]
    called: bool
    elapsed_ns: int


class GroupPreprocessor:
    """Preprocesses the samples of one prompt group after the other.

    Args:
        processor: called with a sample's own prompt and media.
        dedup: call it once for all samples of a group with equal prompts and media
            (``dedup_multimodal_preprocess``). False: once for each sample.
        now_ns: the clock.

    Attributes:
        samples: preprocessed so far.
        calls: of the processor so far.
        elapsed_ns: what those took.
    """

    def __init__(self, processor: Processor, now_ns: Callable[[], int], *, dedup: bool = False) -> None:
        self._processor = processor
        self._now_ns = now_ns
        self._dedup = dedup
        self.samples = 0
        self.calls = 0
        self.elapsed_ns = 0

    def group(self, samples: Sequence[Inputs]) -> list[Processed]:
        """The outputs of each sample of a group, bit for bit those of ``processor`` for it alone.

        Samples are compared by content, never by identity: copies of one prompt are the same, and an address that is
        used again is not. Nothing is kept between two groups. Media of a kind that is not known here are never taken
        to be equal.
        """
        seen: dict[bytes, Mapping[str, Any]] = {}
        found = []
        for sample in samples:
            key = content_key(sample) if self._dedup and len(samples) > 1 else None
            if key is not None and key in seen:
                found.append(Processed(_copied(seen[key]), called=False, elapsed_ns=0))
                continue
            start = self._now_ns()
            outputs = self._processor(sample.prompt, sample.media)
            elapsed = self._now_ns() - start
            self.calls += 1
            self.elapsed_ns += elapsed
            if key is not None:
                seen[key] = outputs
            found.append(Processed(outputs, called=True, elapsed_ns=elapsed))
        self.samples += len(samples)
        return found


def content_key(sample: Inputs) -> bytes | None:
    """BLAKE2b, 32 bytes, over prompt and media: kinds, dtypes, shapes and bits; None where a medium is unknown.

    Every field stands behind its length, so that no two samples have the same fields cut differently.
    """
    state = hashlib.blake2b(digest_size=32)
    fields = [b"prompt", sample.prompt.encode("utf-8", "surrogatepass")]
    for kind, media in sorted(sample.media.items()):
        fields += [b"media", kind.encode(), str(len(media)).encode()]
        for medium in media:
            said = _fields(medium)
            if said is None:
                return None
            fields += said
    for field in fields:
        state.update(len(field).to_bytes(8, "little"))
        state.update(field)
    return state.digest()


def _fields(medium: Any) -> list[bytes] | None:
    """What tells one medium from another."""
    if isinstance(medium, bytes | bytearray):
        return [b"bytes", bytes(medium)]
    if isinstance(medium, str):
        return [b"text", medium.encode("utf-8", "surrogatepass")]
    if isinstance(medium, Tensor) and medium.layout == torch.strided and not medium.is_quantized:
        bits = medium.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
        return [
            b"tensor",
            repr((medium.dtype, tuple(medium.shape), medium.device)).encode(),
            bits.numpy().tobytes(),
        ]
    if isinstance(medium, np.ndarray) and not medium.dtype.hasobject:
        return [b"array", repr((medium.dtype.descr, medium.shape)).encode(), medium.tobytes()]
    if all(hasattr(medium, name) for name in ("mode", "size", "tobytes", "getpalette", "info")):
        # An image of Pillow: the same bytes are another picture with another palette or transparency.
        said = (medium.mode, medium.size, medium.getpalette(), medium.info.get("transparency"))
        return [b"image", repr(said).encode(), medium.tobytes()]
    return None


def _copied(value: Any) -> Any:
    """The same bits in storage of its own, with the strides it has."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy(order="K")
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.deepcopy(value)
