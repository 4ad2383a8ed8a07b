"""A device as snapshots see it: where a tensor lives, memory on both sides of it, and copies that end later.

The interface is small so that a stand-in can be tested without an accelerator (``weightsync.testing.stand_in``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from weightsync.reference.errors import WeightSyncError
from weightsync.reference.params import carry, compare, int_view

Announce = Callable[[str], None]
"""Told, in one sentence, what was done in place of what was asked for."""


class CopyEvent(Protocol):
    """The end of copies that were started."""

    def wait(self) -> None:
        """Block until they are done; repeatable. Raises what a copy failed with."""


class Done:
    """The event of copies that were done before they returned."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Device(Protocol):
    """Where a rank's live parameters are.

    Attributes:
        name: for errors and reports.
        pins: True when pinned host memory makes copies faster, as it does with an accelerator.
    """

    name: str
    pins: bool

    def empty(self, nbytes: int) -> Tensor:
        """New memory on the device, uint8 (nbytes,), not initialised."""

    def pinned(self, nbytes: int) -> Tensor:
        """New page-locked host memory, uint8 (nbytes,). Raises RuntimeError when the system gives none."""

    def holds(self, tensor: Tensor) -> bool:
        """True when a collective of this device takes ``tensor``."""

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        """Start copying the bits of ``source`` to ``out``, of one dtype and shape; ``out`` is contiguous.

        Neither may be written, and ``out`` not read, before the event's ``wait`` returned.
        """


class TorchDevice:
    """A device of torch's; copies to and from an accelerator are asynchronous, on its present stream.

    Args:
        device: such as ``torch.device("cpu")`` or ``"cuda:0"``.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.name = str(self.device)
        self.pins = self.device.type not in ("cpu", "meta")

    def empty(self, nbytes: int) -> Tensor:
        """See ``Device.empty``."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> Tensor:
        """See ``Device.pinned``."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def holds(self, tensor: Tensor) -> bool:
        """See ``Device.holds``; an index left out is any of the kind."""
        same = tensor.device.type == self.device.type
        return same and str(tensor.device).startswith(self.name)

    def copy(self, source: Tensor, out: Tensor) -> CopyEvent:
        """See ``Device.copy``."""
        bits = int_view(out)
        bits.copy_(int_view(source), non_blocking=self.pins)
        if not self.pins:
            return Done()
        event = torch.get_device_module(self.device).Event()
        event.record()
        return _Recorded(event)


class _Recorded:
    def __init__(self, event: Any) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()


class HostMemory:
    """Host memory for copies of a device's tensors: pinned where that helps, pageable where it cannot be had.

    Args:
        device: the other end of the copies.
        announce: told when pinning failed; pageable memory is used from then on, and copies are slower.
    """

    def __init__(self, device: Device, announce: Announce) -> None:
        self._device = device
        self._announce = announce
        self._pins = device.pins

    def allocate(self, nbytes: int) -> tuple[Tensor, str]:
        """uint8 (nbytes,), the caller's, and where it is: ``"pinned"`` or ``"host"``."""
        if self._pins:
            try:
                return self._device.pinned(nbytes), "pinned"
            except RuntimeError as error:
                self._pins = False
                self._announce(
                    f"pinning {nbytes} bytes of host memory for {self._device.name} failed ({error}); copies go "
                    "through pageable memory from here on, which is slower"
                )
        return torch.empty(nbytes, dtype=torch.uint8), "host"


def stage(device: Device, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every tensor where a collective of ``device`` takes it, bit for bit, with its attributes.

    To be called, with everything that goes into a collective, before any rank enters it: what cannot be staged then
    costs nobody else's time. Tensors that are there already come back as they are, others as new contiguous ones,
    whose copies are done.

    Raises:
        WeightSyncError: one cannot be staged, or lost an attribute on the way; named.
    """
    staged: dict[str, Tensor] = {}
    started: list[tuple[str, CopyEvent]] = []
    for name, tensor in params.items():
        if device.holds(tensor):
            staged[name] = tensor
            continue
        try:
            flat = device.empty(max(1, tensor.numel()) * tensor.itemsize)[: tensor.numel() * tensor.itemsize]
            out = carry(tensor, flat.view(tensor.dtype).view(tensor.shape))
            started.append((name, device.copy(tensor, out)))
        except Exception as error:
            raise _unstaged(name, tensor, device, error) from error
        staged[name] = out
    for name, event in started:
        try:
            event.wait()
        except Exception as error:
            raise _unstaged(name, params[name], device, error) from error
        lost = compare(params[name], staged[name])
        if lost or not device.holds(staged[name]):
            raise WeightSyncError(
                f"parameter {name!r} staged on {device.name} is not what it was: "
                f"{'; '.join(lost) or 'it is elsewhere'}; expected its device, its bits and its attributes"
            )
    return staged


def _unstaged(name: str, tensor: Tensor, device: Device, error: Exception) -> WeightSyncError:
    return WeightSyncError(
        f"parameter {name!r} of shape {list(tensor.shape)} on {tensor.device} cannot be staged on {device.name} "
        f"({type(error).__name__}: {error}); no rank has entered the collective; free memory on the device, or "
        "send fewer parameters at a time"
    )
