"""Tagged snapshots: several sets of weights for one live model, such as actor, ref, teacher and old_actor.

Every silent trap of such a store is an error here. A tag is declared before it is used, so that a misspelt one is
none. Weights that were trained and not backed up are told from the bits, so that no switch reverts an optimizer step.
Attributes are refreshed at every copy and compared after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from weightsync.reference.attribute_ledger import AttributeLedger
from weightsync.reference.devices import Announce, Device, HostMemory
from weightsync.reference.digest import state_digest
from weightsync.reference.errors import TagError
from weightsync.reference.flat_buffers import FlatBuffers, FlatLayout
from weightsync.reference.params import ParamMeta
from weightsync.reference.tag_memory import HeldTag, TagMemory

Place = Literal["host", "device"]


class TaggedSnapshots:
    """Snapshots of one rank's live parameters by tag, and which tag the live model holds.

    All methods belong to one thread, that which changes the live parameters, except what ``reading`` hands out.

    Args:
        live: gives the live parameters by name; asked anew each time, so they may be replaced by others alike.
        tags: tag -> where its snapshot lives, ``"host"`` or ``"device"``.
        device: where the live parameters are.
        active: the tag whose weights the live model holds now.
        announce: told when pinned memory could not be had.

    Attributes:
        active: the tag whose weights the live model holds, perhaps trained on since; None after a ``sleep``.
    """

    def __init__(
        self,
        live: Callable[[], Mapping[str, Tensor]],
        tags: Mapping[str, Place],
        device: Device,
        active: str,
        announce: Announce,
    ) -> None:
        self._live = live
        self._places = dict(tags)
        self._device = device
        self._host = HostMemory(device, announce)
        self._held: dict[str, HeldTag] = {}
        self._declared(active)
        self.active: str | None = active
        self._ledger = AttributeLedger(live())
        self._layout = FlatLayout.of(live())

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that hold weights, in the order of their declaration."""
        return tuple(tag for tag in self._places if tag in self._held)

    def memory(self) -> tuple[TagMemory, ...]:
        """Bytes per tag and place; a declared tag costs nothing before its first backup."""
        return tuple(
            TagMemory(tag, place, nbytes)
            for tag in self.tags
            for place, nbytes in self._held[tag].places.items()
        )

    # ---- live model to tag -------------------------------------------------------------------------------------

    def backup(self, tag: str, *, wait: bool = True) -> None:
        """The live weights, bit for bit, are in ``tag``. Memory is allocated once.

        With ``wait`` False the copies may still run: the live parameters must not be written before ``settle()``, and
        whatever reads the tag waits by itself.

        Raises:
            TagError: undeclared, being read, or the model is asleep.
            PlanMismatch: a parameter changed its shape or dtype, is missing, or is new. Nothing was written.
            AttributeMismatch: a live parameter lost an attribute that it had. Nothing was written.
        """
        live = self._awake(f"back up {tag!r}")
        held = self._writable(tag)
        self._ledger.refresh(live)
        self._copy(live, held, tag)
        held.digest = _digest(live)
        if wait:
            self.settle()

    def load(self, tag: str, fill: Callable[[], object]) -> None:
        """Weights from elsewhere go through the live model into ``tag``, which is active then.

        ``fill`` writes the live parameters, such as from a checkpoint. Raises TagError, before it is called, when the
        live weights are not backed up; what ``fill`` raises, with the former weights back in place.
        """
        self._declared(tag)
        self._require_saved(f"load {tag!r}")
        before = self.active
        try:
            fill()
            self.active = tag
            self.backup(tag)
        except Exception:
            if before is not None:
                self.restore(before)
            raise

    def is_saved(self) -> bool:
        """True when the live weights are, bit for bit, those of the active tag. Reads every live byte once."""
        held = self._held.get(self.active) if self.active is not None else None
        return held is not None and held.digest == _digest(self._live())

    # ---- tag to live model -------------------------------------------------------------------------------------

    def switch(self, tag: str) -> None:
        """The live model holds ``tag``, which is active now; the way to work under other weights for a while.

        Raises:
            TagError: the tag is undeclared or holds nothing; or the live weights changed since their tag's backup,
                so that the switch would take an optimizer step back: back them up, or ``restore`` on purpose.
        """
        self._whole(tag)
        if tag == self.active and self.is_saved():
            return
        self._require_saved(f"switch to {tag!r}")
        self.restore(tag)

    def restore(self, tag: str) -> None:
        """The live model holds ``tag``, which is active now; whatever it held before is dropped, on purpose.

        Attributes of the live parameters stay. Raises TagError, PlanMismatch or AttributeMismatch, as ``backup`` does,
        before anything is written.
        """
        self._awake(f"restore {tag!r}")
        self._restore(tag)

    def _restore(self, tag: str) -> None:
        held, live = self._whole(tag), self._live()
        self._layout.require(live)
        self._ledger.refresh(live)
        self.settle()
        for name, tensor in live.items():
            out = tensor.detach()
            staged = out if out.is_contiguous() else out.contiguous()
            self._device.copy(held.buffers.views[name], staged).wait()
            if staged is not out:
                out.copy_(staged)
        self._ledger.check(f"restore of {tag!r}", live)
        self.active = tag

    # ---- between tags ------------------------------------------------------------------------------------------

    def copy(self, source: str, target: str) -> None:
        """The weights of tag ``source`` are in tag ``target`` as well, in memory of its own; allocated if need be.

        Raises TagError when one is undeclared, ``source`` holds nothing, both are one, or ``target`` is being read or
        is the active tag, whose live weights would then be those of no tag.
        """
        held = self._whole(source)
        if target in (source, self.active):
            raise TagError(
                f"copy of {source!r} to {target!r}, expected another tag than itself and than the active one; "
                "switch first"
            )
        other = self._writable(target)
        held.settle()
        self._copy(held.buffers.views, other, target)
        other.digest = held.digest
        other.settle()

    def drop(self, tag: str) -> None:
        """Free the memory of ``tag``. Raises TagError when it holds nothing, is read, or is active and unsaved."""
        self._whole(tag)
        self._writable(tag)
        del self._held[tag]

    # ---- reading -----------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, tag: str, reader: str) -> Iterator[Mapping[str, Tensor]]:
        """The weights of ``tag``, by name, for a push, say, that goes on while the live model is switched.

        Read-only views of the snapshot's memory, which nobody may write while the block lasts: ``backup`` and ``copy``
        to this tag then raise TagError. They carry the attributes that the live parameters have now.

        Args:
            tag: what to read.
            reader: who reads, for that error.
        """
        held = self._whole(tag)
        held.settle()
        self._ledger.refresh(self._live())
        views = held.buffers.views
        for name, view in views.items():
            self._ledger[name].stamp(view)
        self._ledger.check(f"reading of {tag!r}", views)
        held.readers.append(reader)
        try:
            yield MappingProxyType(dict(views))
        finally:
            held.readers.remove(reader)

    def settle(self) -> None:
        """Wait for every copy under way; the live parameters may be written then."""
        for held in self._held.values():
            held.settle()

    # ---- sleep and wake ----------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """The live model's memory is about to be given up. Raises TagError when its weights are not backed up."""
        self._require_saved("sleep")
        self.settle()
        self.active = None

    def wake(self, tag: str) -> None:
        """The live model has memory again, of any content; it is filled from ``tag``, which is active now."""
        if self.active is not None:
            raise TagError(f"wake() while {self.active!r} is live, expected a sleeping model; sleep() first")
        self._restore(tag)

    # ---- helpers -----------------------------------------------------------------------------------------------

    def _copy(self, source: Mapping[str, Tensor], held: HeldTag, tag: str) -> None:
        held.digest = None
        held.events = [
            self._device.copy(tensor.detach(), held.buffers.views[name]) for name, tensor in source.items()
        ]
        for name in source:
            self._ledger[name].stamp(held.buffers.views[name])
        self._ledger.check(f"copy to {tag!r}", held.buffers.views, moved_from=source)

    def _writable(self, tag: str) -> HeldTag:
        """The tag's memory, allocated if need be, with nobody in it."""
        self._declared(tag)
        if tag not in self._held:
            places: dict[str, int] = {}

            def allocate(nbytes: int) -> Tensor:
                on_device = self._places[tag] == "device"
                memory, place = (
                    (self._device.empty(nbytes), "device") if on_device else self._host.allocate(nbytes)
                )
                places[place] = places.get(place, 0) + nbytes
                return memory

            self._held[tag] = HeldTag(FlatBuffers(self._layout, allocate), places)
        held = self._held[tag]
        if held.readers:
            raise TagError(
                f"tag {tag!r} is to be written while {held.readers[0]} reads it, expected nobody; join it first"
            )
        held.settle()
        return held

    def _whole(self, tag: str) -> HeldTag:
        self._declared(tag)
        held = self._held.get(tag)
        if held is None or held.digest is None:
            raise TagError(
                f"tag {tag!r} holds no weights, expected one of {list(self.tags)}; back it up first"
            )
        return held

    def _declared(self, tag: str) -> None:
        if tag not in self._places:
            raise TagError(f"tag {tag!r} is unknown, expected one of {list(self._places)}; declare it first")

    def _awake(self, what: str) -> Mapping[str, Tensor]:
        if self.active is None:
            raise TagError(f"cannot {what} while the live model is asleep, expected it awake; wake() first")
        live = self._live()
        self._layout.require(live)
        return live

    def _require_saved(self, what: str) -> None:
        self._awake(what)
        if not self.is_saved():
            raise TagError(
                f"cannot {what}: the live weights of {self.active!r} are not those of its backup, and would be lost; "
                f"backup({self.active!r}) first, or restore({self.active!r}) to drop them"
            )


def _digest(params: Mapping[str, Tensor]) -> int:
    return state_digest((ParamMeta.of(name, tensor), tensor) for name, tensor in params.items())
