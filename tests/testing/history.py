"""What each version must be, and what each rollout rank must hold of it: the oracle of every run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from weightsync.reference.deployment import Deployment
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view, same_bits


class History:
    """The dense export of every version that left the trainer, kept apart from the protocol's own snapshots.

    Args:
        deployment: who holds what.
        memo: where exports are kept that several runs share; see ``record``.
    """

    def __init__(self, deployment: Deployment, memo: dict[Hashable, Any] | None = None) -> None:
        self.deployment = deployment
        self.memo = memo if memo is not None else {}
        self.versions: dict[int, dict[str, Tensor]] = {}
        self.reused: list[int] = []
        self._keys: dict[int, Hashable] = {}

    def record(self, version: int, params: Sequence[Mapping[str, Tensor]], key: Hashable = None) -> None:
        """A version is about to leave the trainer.

        Args:
            version: its number.
            params: every trainer rank's live parameters, which are as they were snapshotted.
            key: names the parameters' bits, so that runs with equal bits may share the export; None shares nothing.
        """
        if version in self.versions:
            self.reused.append(version)
        self._keys[version] = key if key is not None else ("version", id(self), version)
        self.versions[version] = self._once(
            "export", self._keys[version], lambda: self.deployment.export(params)
        )

    def held(self, version: int, rank: RankId) -> dict[str, Tensor]:
        """What ``rank`` must hold of ``version``, by runtime name."""
        checkpoint = self.versions[version]
        return self._once(rank, self._keys[version], lambda: self.deployment.weights(rank, checkpoint))

    def _once(
        self, what: Hashable, key: Hashable, make: Callable[[], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        if (what, key) not in self.memo:
            self.memo[what, key] = make()
        return self.memo[what, key]  # type: ignore[no-any-return]

    def differences(self, version: int, rank: RankId, weights: Mapping[str, Tensor]) -> list[str]:
        """Where ``weights`` are not bit for bit what ``rank`` must hold of ``version``; empty when they are."""
        if version not in self.versions:
            return [f"version {version} never left the trainer"]
        found = []
        for name, expected in self.held(version, rank).items():
            if same_bits(weights[name], expected):
                continue
            unequal = (int_view(weights[name]) != int_view(expected)).nonzero().reshape(-1)
            if len(unequal):
                found.append(
                    f"{name}: {len(unequal)} of {expected.numel()} elements, the first at {int(unequal[0])}"
                )
        return found
