"""What each version must be, and what each rollout rank must hold of it: the oracle of every run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view


class History:
    """The dense export of every version that left the trainer, kept apart from the protocol's own snapshots.

    Args:
        deployment: who holds what.
    """

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.versions: dict[int, dict[str, Tensor]] = {}
        self.reused: list[int] = []
        self._held: dict[tuple[int, RankId], dict[str, Tensor]] = {}

    def record(self, version: int, params: Sequence[Mapping[str, Tensor]]) -> None:
        """A version is about to leave the trainer; ``params`` are every trainer rank's live parameters."""
        if version in self.versions:
            self.reused.append(version)
        self.versions[version] = self.deployment.export(params)

    def held(self, version: int, rank: RankId) -> dict[str, Tensor]:
        """What ``rank`` must hold of ``version``, by runtime name."""
        if (version, rank) not in self._held:
            self._held[version, rank] = self.deployment.weights(rank, self.versions[version])
        return self._held[version, rank]

    def differences(self, version: int, rank: RankId, weights: Mapping[str, Tensor]) -> list[str]:
        """Where ``weights`` are not bit for bit what ``rank`` must hold of ``version``; empty when they are."""
        if version not in self.versions:
            return [f"version {version} never left the trainer"]
        found = []
        for name, expected in self.held(version, rank).items():
            unequal = (int_view(weights[name]) != int_view(expected)).nonzero().reshape(-1)
            if len(unequal):
                found.append(f"{name}: {len(unequal)} of {expected.numel()} elements, the first at {int(unequal[0])}")
        return found
