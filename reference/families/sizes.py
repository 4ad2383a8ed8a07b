"""What every family requires of its sizes."""

from __future__ import annotations

from weightsync.reference.errors import PlanMismatch


def require_sizes(model: object, *names: str, least: int = 1) -> None:
    """Refuse a model with a size below ``least``.

    Raises:
        PlanMismatch: naming the size.
    """
    for name in names:
        if getattr(model, name) < least:
            raise PlanMismatch(
                f"model {name} is {getattr(model, name)}, expected {least} or more; correct it"
            )


def require_groups(heads: int, kv_heads: int) -> None:
    """Refuse query heads that do not divide by key/value heads.

    Raises:
        PlanMismatch: naming both.
    """
    if heads % kv_heads:
        raise PlanMismatch(
            f"model has {heads} query heads and {kv_heads} key/value heads, expected a whole "
            "number of query heads per key/value head; correct the head counts"
        )
