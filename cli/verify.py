"""Every rollout rank's bytes against the trainer's export, version by version; and the bit that a fault flips."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weightsync.cli.scenario import Scenario
from weightsync.cli.tables import CheckRow
from weightsync.reference.digest import wrap
from weightsync.reference.members import RankId
from weightsync.reference.params import int_view, same_bits
from weightsync.reference.rollout import Rollout
from weightsync.reference.steps import run
from weightsync.reference.target import Target


@dataclass(frozen=True, slots=True)
class Audit:
    """What one rollout rank held when a version had been committed. JSON-ready.

    Attributes:
        version: the version that the trainer committed.
        rank: name of the rank.
        label: the version the rank says it holds.
        dirty: None, or why it may hold anything else.
        share: its share of the digest of what it holds, computed anew, signed 64 bit.
        differences: one sentence per tensor that is not the trainer's, bit for bit; empty when all are.
    """

    version: int
    rank: str
    label: int
    dirty: str | None
    share: int
    differences: tuple[str, ...] = ()

    @property
    def check(self) -> CheckRow:
        """The audit as one check, which names rollout, rank, version and tensor when it failed."""
        rank = RankId.parse(self.rank)
        name = f"rollout {rank.rollout}, rank {rank.rank}, version {self.version}"
        problems = list(self.differences)
        if self.label != self.version or self.dirty is not None:
            problems.insert(0, f"says it holds version {self.label} ({self.dirty or 'clean'})")
        return CheckRow(name, not problems, "; ".join(problems))


def audit(version: int, half: Rollout, target: Target, expected: Mapping[str, Tensor]) -> Audit:
    """Compare all of a rank's weights with ``expected``, by runtime name. To be called between two updates."""
    return Audit(
        version,
        str(half.verbs.me),
        half.version,
        half.dirty,
        run(target.digest(afresh=True)),
        differences(expected, target.weights),
    )


def differences(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> tuple[str, ...]:
    """One sentence per tensor of ``found`` whose bits differ: how many, where the first is, and both patterns."""
    sentences = []
    for name, right in expected.items():
        held = found.get(name)
        if held is None:
            sentences.append(f"{name}: missing")
        elif (held.dtype, held.shape) != (right.dtype, right.shape):
            sentences.append(
                f"{name}: {held.dtype} {list(held.shape)}, expected {right.dtype} {list(right.shape)}"
            )
        elif not same_bits(held, right):
            left_bits, right_bits = int_view(held), int_view(right)
            unequal = (left_bits != right_bits).nonzero().reshape(-1)
            first = int(unequal[0])
            sentences.append(
                f"{name}: {len(unequal)} of {right.numel()} elements, first at {first}: "
                f"{_pattern(left_bits[first])}, expected {_pattern(right_bits[first])}"
            )
    return tuple(sentences)


def group_digests(audits: Iterable[Audit]) -> dict[str, int]:
    """Rank name -> digest of the state that all ranks of its rollout hold together, from audits of one version."""
    audits = list(audits)
    totals: dict[int, int] = {}
    for one in audits:
        number = RankId.parse(one.rank).rollout
        totals[number] = wrap(totals.get(number, 0) + one.share)
    return {one.rank: totals[RankId.parse(one.rank).rollout] for one in audits}


def is_flipped(scenario: Scenario, rank: RankId, version: int) -> bool:
    """True when the scenario plants a flipped bit on this rank after this version."""
    flip = scenario.faults.flip_bit
    return flip is not None and (flip.rollout, flip.rank, flip.version) == (*rank[1:], version)


def flip_bit(weights: Mapping[str, Tensor]) -> str:
    """Flip the lowest bit of the middle element of the largest tensor, in place, and return its name."""
    name = max(weights, key=lambda one: weights[one].numel())
    raw = (
        weights[name].view(torch.uint8) if weights[name].dim() else weights[name].reshape(1).view(torch.uint8)
    )
    bits = raw.reshape(-1)
    middle = weights[name].numel() // 2 * weights[name].itemsize
    bits[middle] ^= 1
    return name


def _pattern(bits: Tensor) -> str:
    width = 8 * bits.element_size()
    return f"0x{int(bits) & ((1 << width) - 1):0{width // 4}x}"
