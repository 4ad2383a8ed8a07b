"""Pushing without a snapshot: the live parameters are what is sent, and every update is a full one.

It saves the memory of both slots. It costs the trainer the whole update, since the parameters must stand still until
it is over, and every rollout a full update, since nothing is left to find changes against.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from weightsync.reference.baselines import Traits
from weightsync.reference.detect import Detector, Differing
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.issue_order import OrderedTrainer
from weightsync.reference.pieces import OwnedRows
from weightsync.reference.rowmap import RowMap
from weightsync.reference.steps import Step, Touched
from weightsync.reference.transmit import Job

NONE = Traits("none", ("raw",), False, False)
"""Nothing to tell changes by."""


class LiveBaseline:
    """The live parameters in the place of both slots; implements ``baselines.Baseline``.

    Args:
        maps: the maps of the rank's parameters.
        params: the live parameters; looked up anew at every use, and not to be changed during an update.
    """

    def __init__(self, maps: Sequence[RowMap], params: Mapping[str, Tensor]) -> None:
        self.maps = tuple(maps)
        self.traits = NONE
        self._params = params

    @property
    def nbytes(self) -> int:
        """Nothing is held."""
        return 0

    def write(self, slot: int, params: Mapping[str, Tensor]) -> Step[int]:
        """Nothing is copied. Raises PlanMismatch when a parameter would have to be cast or made contiguous."""
        self.tensors(slot)
        yield Touched(0, reads=("live",))
        return 0

    def tensors(self, slot: int) -> Mapping[str, Tensor]:
        """See ``Baseline.tensors``: those that are live, whatever the slot."""
        for one in self.maps:
            live = self._params[one.name]
            if live.dtype != one.dtype or not live.is_contiguous():
                raise PlanMismatch(
                    f"parameter {one.name!r} is {live.dtype} with strides {live.stride()}, expected contiguous "
                    f"{one.dtype}; only a snapshot casts and copies, so push with one"
                )
        return {one.name: self._params[one.name].detach() for one in self.maps}

    def memory(self, slot: int) -> str:
        """Not the source's own."""
        return "live"

    def scanned(self, names: Sequence[str]) -> int:
        """Nothing is compared."""
        return 0

    def find(self, name: str, slot: int, base: int, detector: Detector) -> Differing:
        """Raises PlanMismatch: no base is there."""
        raise PlanMismatch(
            f"a diff of parameter {name!r} against slot {base} without snapshots, expected a full update; push with a "
            "LiveTrainer"
        )

    def rows(self, rows: OwnedRows) -> OwnedRows:
        """As they are."""
        return rows


class LiveTrainer(OrderedTrainer):
    """A trainer rank whose source has a ``LiveBaseline``: no baseline outlives an update."""

    async def connect(self, deadline_ns: int) -> None:
        """See ``Trainer.connect``; every member needs everything, whatever it holds."""
        await super().connect(deadline_ns)
        self.behind = dict.fromkeys(self.members)
        self.slots.acknowledge(None)

    async def commit(self, job: Job, deadline_ns: int) -> None:
        """See ``Trainer.commit``; what was sent is gone with the next optimizer step."""
        await super().commit(job, deadline_ns)
        self.slots.acknowledge(None)
        self.slots.invalidate(job.slot)
