"""Which form a range travels in: the one that is written, sent and read in the least time, by a frozen profile."""

from __future__ import annotations

from collections.abc import Iterable, Set

from weightsync.reference.errors import PlanMismatch
from weightsync.reference.wire.costs import Rates, costs
from weightsync.reference.wire.forms import ALL_FORMS, DENSE_FORM, Form, Positions, Values

AUTO = "auto"


def choose(
    count: int,
    numel: int,
    itemsize: int,
    *,
    link_bytes_per_s: float,
    rates: Rates,
    values: Set[Values],
    forms: Iterable[Form] = ALL_FORMS,
) -> Form:
    """The form whose estimated total is least; the earlier number wins a tie. Pure, equal on every rank.

    Args:
        count: changed elements, at least 1.
        numel: elements of the range, changed or not.
        itemsize: bytes of an element.
        link_bytes_per_s: what the slowest link on the way carries.
        rates: the frozen profile.
        values: value forms that the baseline allows.
        forms: those that every receiver knows; a dense one is always among them.

    Raises:
        PlanMismatch: the counts make no sense, or the link's rate is not positive.
    """
    if not link_bytes_per_s > 0:
        raise PlanMismatch(
            f"link_bytes_per_s is {link_bytes_per_s}, expected more than 0; pass the link's rate"
        )
    allowed = [form for form in forms if form.values in values or form.positions is Positions.DENSE]
    best, least = DENSE_FORM, costs(DENSE_FORM, count, numel, itemsize, rates).total_ns(link_bytes_per_s)
    for form in allowed:
        total = costs(form, count, numel, itemsize, rates).total_ns(link_bytes_per_s)
        if total < least:
            best, least = form, total
    return best


def choose_named(name: str, values: Set[Values], forms: Iterable[Form] = ALL_FORMS) -> Form:
    """The form that ``name`` stands for, if the baseline and every receiver allow it.

    Raises:
        PlanMismatch: nothing has that name, a receiver does not know it, or the baseline does not allow it.
    """
    form = Form.named(name)
    known = tuple(forms)
    if form not in known:
        offered = ", ".join(one.name for one in known)
        raise PlanMismatch(f"a receiver does not know encoding {name!r}, only {offered}; name one of these")
    if form.values not in values and form.positions is not Positions.DENSE:
        offered = ", ".join(sorted(one.name.lower() for one in values))
        raise PlanMismatch(
            f"encoding {name!r} needs values in {form.values.name.lower()}, the baseline allows {offered}; keep a "
            "baseline with its bits, or name another encoding"
        )
    return form
