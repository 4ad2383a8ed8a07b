"""Pushing without a snapshot: the live parameters are what is sent, and every update is a full one.

It saves the memory of both slots. It costs the trainer the whole update, since the parameters must stand still until
it is over, and every rollout a full update, since nothing is left to find changes against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.issue_order import OrderedTrainer
from weightsync.reference.source import Changes, Held, Part, Source
from weightsync.reference.steps import Step, Touched
from weightsync.reference.transmit import Job

T = TypeVar("T")


class LiveSource(Source):
    """The bytes of one trainer rank, of which no copy is kept. The parameters may not change during an update.

    Args:
        args: as of ``Source``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._slots = _Live(self.params, {one.name: one.dtype for one in self._maps})  # type: ignore[assignment]

    def snapshot(self, slot: int) -> Step[Held]:
        """Nothing is copied. Raises PlanMismatch when a parameter would have to be cast or made contiguous."""
        self._digests.pop(slot, None)
        self._slots.tensors(slot)
        yield Touched(0, reads=("live",))
        return Held(slot, 0)

    def digest(self, slot: int, *, afresh: bool = False) -> Step[int]:
        """See ``Source.digest``; always read afresh."""
        return (yield from _of_live(super().digest(slot, afresh=True)))

    def diff(self, slot: int, base: int | None) -> Step[Changes]:
        """Every element counts as changed. Raises PlanMismatch for a base, which is not there."""
        if base is not None:
            raise PlanMismatch(
                f"a diff against slot {base} of a source without snapshots, expected none; push with a LiveTrainer"
            )
        return (yield from _of_live(super().diff(slot, None)))

    def part(self, *args: Any) -> Step[Part]:
        """See ``Source.part``."""
        return (yield from _of_live(super().part(*args)))


class LiveTrainer(OrderedTrainer):
    """A trainer rank whose local bytes are a ``LiveSource``: no baseline outlives an update."""

    async def connect(self, deadline_ns: int) -> None:
        """See ``Trainer.connect``; every member needs everything, whatever it holds."""
        await super().connect(deadline_ns)
        self.behind = self.members
        self.slots.acknowledge(None)

    async def commit(self, job: Job, deadline_ns: int) -> None:
        """See ``Trainer.commit``; what was sent is gone with the next optimizer step."""
        await super().commit(job, deadline_ns)
        self.slots.acknowledge(None)
        self.slots.invalidate(job.slot)


class _Live:
    """The live parameters in the place of both slots."""

    def __init__(self, params: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype]) -> None:
        self._params = params
        self._dtypes = dict(dtypes)

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        for name, dtype in self._dtypes.items():
            live = self._params[name]
            if live.dtype != dtype or not live.is_contiguous():
                raise PlanMismatch(
                    f"parameter {name!r} is {live.dtype} with strides {live.stride()}, expected contiguous {dtype}; "
                    "only a snapshot casts and copies, so push with one"
                )
        return {name: self._params[name].detach() for name in self._dtypes}


def _of_live(step: Step[T]) -> Step[T]:
    """The step, reading ``live`` where it says a slot."""
    touched = next(step)
    yield replace(touched, reads=("live",))
    try:
        next(step)
    except StopIteration as stop:
        return stop.value  # type: ignore[no-any-return]
    raise RuntimeError("a step paused twice; it must yield exactly once, half-way")
