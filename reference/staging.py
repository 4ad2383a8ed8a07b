"""Host-to-device copies of multimodal inputs, through pinned buffers that live until the copies are over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from weightsync.reference.errors import BatchError


class DeviceStream(Protocol):
    """A stream of one device, on which copies are queued; all methods are the host's."""

    @property
    def pins(self) -> bool:
        """True where host buffers can be pinned and copies can be queued."""

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A pinned host tensor with unset elements. Its memory may be used anew once the tensor is dropped."""

    def copied(self, host: Tensor, *, non_blocking: bool) -> Tensor:
        """``host`` on the device, new storage. ``non_blocking``: the copy is queued, and reads ``host`` later."""

    def mark(self) -> Any:
        """A mark behind what is queued so far."""

    def passed(self, mark: Any) -> bool:
        """True once everything before the mark is done."""

    def wait(self, mark: Any) -> None:
        """Block until it is."""


class HostStream:
    """The host as its own device: nothing to pin, nothing is queued. Implements ``DeviceStream``."""

    pins = False

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pageable memory."""
        return torch.empty(tuple(shape), dtype=dtype)

    def copied(self, host: Tensor, *, non_blocking: bool) -> Tensor:
        """A copy: on one device ``Tensor.to`` would give the same object."""
        return host.clone()

    def mark(self) -> None:
        """Nothing is queued."""

    def passed(self, mark: Any) -> bool:
        """Always."""
        return True

    def wait(self, mark: Any) -> None:
        """Nothing to wait for."""


class AcceleratorStream:
    """The current stream of an accelerator. Implements ``DeviceStream``.

    Args:
        device: where tensors go.
        module: ``torch.cuda``, or ``torch.npu``: what has ``Event`` and ``current_stream``.
    """

    pins = True

    def __init__(self, device: torch.device, module: Any) -> None:
        self._device = device
        self._module = module

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Pinned memory."""
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def copied(self, host: Tensor, *, non_blocking: bool) -> Tensor:
        """Queued on the current stream."""
        return host.to(self._device, non_blocking=non_blocking)

    def mark(self) -> Any:
        """An event."""
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def passed(self, mark: Any) -> bool:
        """Ask the event."""
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        """Wait for the event."""
        mark.synchronize()


@dataclass(frozen=True, eq=False)
class Staged:
    """The inputs of several samples on the device.

    Attributes:
        tensors: key -> what the samples have under it, one after the other along dimension 0, padded with zeros in the
            others where sizes differ. A key that no sample has is absent.
        rows: key -> per sample its rows, 0 where it has none.
        sizes: key -> per sample the sizes of its other dimensions before padding, or None.
    """

    tensors: dict[str, Tensor]
    rows: dict[str, tuple[int, ...]]
    sizes: dict[str, tuple[tuple[int, ...] | None, ...]]


class Staging:
    """Brings inputs to the device.

    Args:
        stream: the device's.
        now_ns: the clock.
        pin: copy through pinned buffers, without waiting (``pin_multimodal_h2d_copy``), where there is something to
            pin for. False: plain copies, which wait.

    Attributes:
        copies: made or queued so far.
        copied_bytes: in those.
        pinned_bytes: of those through pinned buffers.
        elapsed_ns: what the host spent on them.
    """

    def __init__(self, stream: DeviceStream, now_ns: Callable[[], int], *, pin: bool = False) -> None:
        self._stream = stream
        self._now_ns = now_ns
        self._pin = pin and stream.pins
        self._held: list[tuple[Any, list[Tensor]]] = []
        self.copies = 0
        self.copied_bytes = 0
        self.pinned_bytes = 0
        self.elapsed_ns = 0

    @property
    def held(self) -> int:
        """Host buffers whose copies may still be under way."""
        return sum(len(buffers) for _, buffers in self._held)

    def stage(self, samples: Sequence[Mapping[str, Tensor | None]]) -> Staged:
        """Copy what the samples have; the bits are the same with and without ``pin``.

        What is returned may be used at once by work on the same stream. ``samples`` may be changed once it returns.

        Raises:
            BatchError: a key has tensors of several dtypes or numbers of dimensions, or of none.
        """
        start = self._now_ns()
        self.release()
        found = Staged({}, {}, {})
        buffers: list[Tensor] = []
        for key in dict.fromkeys(key for sample in samples for key in sample):
            values = [sample.get(key) for sample in samples]
            present = [value for value in values if value is not None]
            found.rows[key] = tuple(0 if value is None else _rows(key, value) for value in values)
            found.sizes[key] = tuple(None if value is None else tuple(value.shape[1:]) for value in values)
            if present:
                found.tensors[key] = self._copy(_joined(key, present), buffers)
        if buffers:
            self._held.append((self._stream.mark(), buffers))
        self.elapsed_ns += self._now_ns() - start
        return found

    def release(self) -> None:
        """Drop the buffers that the stream is done with; ``stage`` does so too."""
        self._held = [(mark, buffers) for mark, buffers in self._held if not self._stream.passed(mark)]

    def close(self) -> None:
        """Wait until the stream is done with all buffers, and drop them."""
        for mark, _ in self._held:
            self._stream.wait(mark)
        self._held = []

    def _copy(self, whole: Tensor, buffers: list[Tensor]) -> Tensor:
        self.copies += 1
        self.copied_bytes += whole.nbytes
        if not self._pin:
            return self._stream.copied(whole, non_blocking=False)
        buffer = self._stream.host_buffer(whole.shape, whole.dtype)
        buffer.copy_(whole)
        buffers.append(buffer)
        self.pinned_bytes += whole.nbytes
        return self._stream.copied(buffer, non_blocking=True)


def _rows(key: str, value: Tensor) -> int:
    if not value.dim():
        raise BatchError(
            f"key {key!r} has a tensor without dimensions; expected one row per item, so give it one"
        )
    return len(value)


def _joined(key: str, values: Sequence[Tensor]) -> Tensor:
    """One tensor along dimension 0; smaller ones are padded with zeros at the end of the other dimensions."""
    first = values[0]
    for value in values:
        if value.dtype != first.dtype or value.dim() != first.dim():
            raise BatchError(
                f"key {key!r} has {value.dtype} of {value.dim()} dimensions beside {first.dtype} of {first.dim()}; "
                "expected one dtype and as many dimensions in every sample"
            )
    if len({value.shape[1:] for value in values}) == 1:
        return torch.cat(list(values))
    largest = [max(sizes) for sizes in zip(*(value.shape[1:] for value in values), strict=True)]
    padded = []
    for value in values:
        gaps = [(0, most - size) for most, size in zip(largest, value.shape[1:], strict=True)]
        padded.append(functional.pad(value, [gap for pair in reversed(gaps) for gap in pair]))
    return torch.cat(padded)
