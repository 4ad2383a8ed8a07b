"""What optimizer steps report: samples seen, which the learning rate follows, and norms before clipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weightsync.reference.errors import BatchError


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step.

    Attributes:
        samples: that it saw, over all ranks.
        lr: the learning rate it took.
        grad_norm: of the whole model, before clipping.
        coefficient: what the gradients were multiplied by, 1 where they were short enough.
    """

    samples: int
    lr: float
    grad_norm: float
    coefficient: float


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """All optimizer steps of one training update.

    Attributes:
        steps: how many.
        samples: that they saw.
        lr: of the last step.
        grad_norm: the largest one, which says whether anything was clipped.
        clipped: steps whose gradients were shortened.
    """

    steps: int
    samples: int
    lr: float
    grad_norm: float
    clipped: int

    @classmethod
    def of(cls, steps: Sequence[StepRecord]) -> UpdateRecord:
        """What ``steps``, at least one, come to."""
        if not steps:
            raise BatchError("an update without an optimizer step; expected one at least")
        return cls(
            len(steps),
            sum(step.samples for step in steps),
            steps[-1].lr,
            max(step.grad_norm for step in steps),
            sum(step.coefficient < 1 for step in steps),
        )


class SampleClock:
    """The samples seen so far, which a learning-rate schedule follows, as Megatron's does.

    A step moves it by its own samples. Moved by the whole batch at each of N steps, it would run N times too fast.

    Args:
        rate: the learning rate after so many samples.
        seen: samples seen before, from a checkpoint.
    """

    def __init__(self, rate: Callable[[int], float], seen: int = 0) -> None:
        self._rate = rate
        self.seen = seen

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._rate(self.seen)

    def step(self, samples: int, grad_norm: float, max_norm: float) -> StepRecord:
        """Take in one optimizer step of ``samples`` samples over all ranks; its record, with its clip coefficient."""
        if samples < 1:
            raise BatchError(
                f"an optimizer step of {samples} samples; expected 1 or more, the step's own number"
            )
        record = StepRecord(samples, self.lr, grad_norm, clip_coefficient(grad_norm, max_norm))
        self.seen += samples
        return record


def clip_coefficient(grad_norm: float, max_norm: float) -> float:
    """What gradients of ``grad_norm`` are multiplied by so that their norm is ``max_norm`` at most; 1 if it is."""
    return 1.0 if grad_norm <= max_norm else max_norm / grad_norm
