"""One flat buffer per dtype for many tensors, with views that look like them: few allocations, any sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.params import ParamMeta

ALIGNMENT = 256
"""Each tensor starts at a multiple of this many bytes, as torch's own allocators start theirs at least at 64."""


@dataclass(frozen=True)
class FlatLayout:
    """Where each of some tensors stands in the buffer of its dtype.

    Attributes:
        metas: name -> metadata, in order.
        offsets: name -> first byte in the buffer of its dtype; a multiple of ``ALIGNMENT``.
        nbytes: dtype -> bytes of its buffer, padding included.
    """

    metas: Mapping[str, ParamMeta]
    offsets: Mapping[str, int]
    nbytes: Mapping[torch.dtype, int]

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> FlatLayout:
        """The layout for tensors like ``params``; aliases among them get room of their own."""
        metas = {name: ParamMeta.of(name, tensor) for name, tensor in params.items()}
        offsets: dict[str, int] = {}
        nbytes: dict[torch.dtype, int] = {}
        for name, meta in metas.items():
            offsets[name] = nbytes.get(meta.dtype, 0)
            nbytes[meta.dtype] = offsets[name] + math.ceil(meta.nbytes / ALIGNMENT) * ALIGNMENT
        return cls(metas, offsets, nbytes)

    @property
    def total(self) -> int:
        """Bytes of all buffers, padding included."""
        return sum(self.nbytes.values())

    def require(self, params: Mapping[str, Tensor]) -> None:
        """Return if ``params`` are tensors of this layout. Raises PlanMismatch with every difference."""
        wrong = [f"{name!r} is missing" for name in self.metas if name not in params]
        wrong += [f"{name!r} is new" for name in params if name not in self.metas]
        for name, meta in self.metas.items():
            if name in params and ParamMeta.of(name, params[name]) != meta:
                now = params[name]
                wrong.append(
                    f"{name!r} is {now.dtype} {list(now.shape)}, was {meta.dtype} {list(meta.shape)}"
                )
        if wrong:
            raise PlanMismatch(
                f"the live parameters are not those that were snapshotted: {'; '.join(wrong)}; expected the same "
                "names, shapes and dtypes; make new snapshots for a changed model"
            )


class FlatBuffers:
    """Memory of one layout: a buffer per dtype, and the views into them.

    Args:
        layout: what to make room for.
        allocate: from a number of bytes to uint8 memory (nbytes,), which is kept.

    Attributes:
        views: name -> tensor of the layout's dtype and shape, contiguous; shares the memory of its dtype's buffer, and
            carries whatever attributes are stamped on it, as the same object is there at every look.
    """

    def __init__(self, layout: FlatLayout, allocate: Callable[[int], Tensor]) -> None:
        self.layout = layout
        self.buffers = {dtype: allocate(nbytes) for dtype, nbytes in layout.nbytes.items()}
        self.views = {name: self._view(name, meta) for name, meta in layout.metas.items()}

    def _view(self, name: str, meta: ParamMeta) -> Tensor:
        start = self.layout.offsets[name]
        return self.buffers[meta.dtype][start : start + meta.nbytes].view(meta.dtype).view(meta.shape)
