"""What the trainer remembers of versions, so that who missed some gets one delta and not everything. No tensors.

Every version that was tried is a node; every step from one to the next that was compared is an edge, with a handle to
the positions that it changed on this rank. The graph is equal on all trainer ranks: what is dropped is decided by
counts that all of them know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

STEP_BYTES = 256
"""What a step is charged beside its positions, so that steps without a change are dropped in time as well."""


@dataclass(frozen=True, eq=False, slots=True)
class VersionStep:
    """One step between two versions.

    Attributes:
        base: the version that was compared with.
        version: the version that it led to.
        trail: handle to the positions of this rank; has ``nbytes``.
        charged: bytes that it counts for in the budget, equal on all ranks: those of the rank with most positions.
    """

    base: int
    version: int
    trail: Any
    charged: int


@dataclass(eq=False)
class History:
    """Steps between versions, oldest first, within a budget.

    Args:
        budget_bytes: what the steps may take on one rank; 0 remembers none.

    Attributes:
        steps: what is remembered.
        digests: digest of each version at either end of a step.
    """

    budget_bytes: int
    steps: list[VersionStep] = field(default_factory=list)
    digests: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of positions that this rank holds."""
        return sum(step.trail.nbytes for step in self.steps)

    @property
    def charged(self) -> int:
        """Bytes that count for the budget."""
        return sum(step.charged for step in self.steps)

    def add(self, base: tuple[int, int], new: tuple[int, int], trail: Any, largest_bytes: int) -> None:
        """Remember a step; the oldest ones are dropped until everything fits the budget again.

        Args:
            base: version and digest of what was compared with.
            new: version and digest of what it led to.
            trail: handle to this rank's positions.
            largest_bytes: bytes of positions on the rank that has most of them.
        """
        if self.budget_bytes <= 0:
            return
        self.steps.append(VersionStep(base[0], new[0], trail, largest_bytes + STEP_BYTES))
        self.digests.update([base, new])
        while self.charged > self.budget_bytes:
            del self.steps[0]
        known = {end for step in self.steps for end in (step.base, step.version)}
        self.digests = {version: digest for version, digest in self.digests.items() if version in known}

    def clear(self) -> None:
        """Forget everything: some of it may be wrong."""
        self.steps.clear()
        self.digests.clear()

    def knows(self, version: int, digest: int) -> bool:
        """True when exactly this state is at an end of a step."""
        return self.digests.get(version) == digest

    def path(self, start: int, end: int) -> Sequence[VersionStep] | None:
        """The fewest steps from one version to another, in either direction of each; None when there are none.

        Of several such paths, the one over newer steps: those are the last to be dropped.
        """
        reached: dict[int, tuple[VersionStep, ...]] = {start: ()}
        edge = [start]
        while edge and end not in reached:
            following: list[int] = []
            for here in edge:
                for step in reversed(self.steps):
                    there = step.version if step.base == here else step.base if step.version == here else None
                    if there is not None and there not in reached:
                        reached[there] = (*reached[here], step)
                        following.append(there)
            edge = following
        return reached.get(end)
