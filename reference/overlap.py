"""Weights that share memory without being the same weight: writing one would change the other unseen."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from weightsync.reference.errors import PlanMismatch


def check_disjoint(weights: Mapping[str, Tensor]) -> None:
    """Return if no two weights share bytes, unless they are one and the same memory.

    Only weights that fill their memory are looked at; views that lie in the gaps of one another are left alone.

    Raises:
        PlanMismatch: two overlap in part; both are named.
    """
    spans = sorted(
        (weight.data_ptr(), weight.nbytes, name) for name, weight in weights.items() if _fills(weight)
    )
    reach, holder, whole = 0, "", (0, 0)
    for start, nbytes, name in spans:
        if start < reach and (start, nbytes) != whole:
            raise PlanMismatch(
                f"weights {holder!r} and {name!r} share {min(reach, start + nbytes) - start} bytes but are not the "
                "same tensor, expected memory of their own or a tied alias of the same shape; pass one of them"
            )
        if start + nbytes > reach:
            reach, holder, whole = start + nbytes, name, (start, nbytes)


def _fills(weight: Tensor) -> bool:
    """Whether its elements are, in some order, one run of memory."""
    if weight.is_meta or not weight.numel():
        return False
    sides = sorted(
        (stride, size) for stride, size in zip(weight.stride(), weight.shape, strict=True) if size > 1
    )
    expected = 1
    for stride, size in sides:
        if stride != expected:
            return False
        expected *= size
    return True
