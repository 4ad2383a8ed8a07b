"""Which forms an update's ranges travel in: what was asked for, what the baseline allows, what receivers know."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weightsync.reference.encoding import element_bytes
from weightsync.reference.errors import PlanMismatch
from weightsync.reference.wire.choosing import AUTO, choose, choose_named
from weightsync.reference.wire.costs import Rates, costs
from weightsync.reference.wire.forms import ABSOLUTE, ALL_FORMS, DENSE_FORM, Form, Packing, Positions, Values
from weightsync.reference.wire.rates import RATES
from weightsync.reference.wire.sections import fixed_bytes

FIXED = "int32+raw"
"""The encoding whose bytes follow from the counts."""

LINK_BYTES_PER_S = 12_500_000_000
"""100 Gbit/s, what is assumed of a link of which nothing is said."""


@dataclass(frozen=True, slots=True)
class WirePolicy:
    """How ranges are encoded; a function of counts alone, equal on every rank.

    Attributes:
        encoding: ``"auto"``, or a form's name.
        link_bytes_per_s: what the slowest link on the way carries; only auto uses it.
        values: value forms that the baseline allows.
        forms: those that every receiver knows.
        rates: the frozen profile that auto and estimates go by.

    Raises:
        PlanMismatch: no form has that name, a receiver does not know it, or the baseline does not allow it.
    """

    encoding: str = FIXED
    link_bytes_per_s: float = LINK_BYTES_PER_S
    values: frozenset[Values] = frozenset(Values)
    forms: tuple[Form, ...] = ALL_FORMS
    rates: Rates = RATES
    _named: Form | None = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.encoding != AUTO:
            object.__setattr__(self, "_named", choose_named(self.encoding, self.values, self.forms))
        if not self.link_bytes_per_s > 0:
            raise PlanMismatch(
                f"link_bytes_per_s is {self.link_bytes_per_s}, expected more than 0; pass the link's rate"
            )

    def allowing(self, values: Iterable[Values]) -> WirePolicy:
        """The policy under a baseline that allows these value forms only."""
        return replace(self, values=self.values & frozenset(values))

    def knowing(self, forms: Iterable[Form]) -> WirePolicy:
        """The policy towards receivers that know these forms only; PlanMismatch when it asks for another one."""
        known = frozenset(forms)
        return replace(self, forms=tuple(form for form in self.forms if form in known))

    def form(self, count: int, numel: int, itemsize: int, *, absolute: bool = False) -> Form:
        """The form of ``count`` changed elements of ``numel``: dense where that is asked for, or smaller.

        ``absolute`` says that of these changes nobody knows the old bits: their values are RAW.
        """
        form = self._named
        if form is None:
            return choose(
                count,
                numel,
                itemsize,
                link_bytes_per_s=self.link_bytes_per_s,
                rates=self.rates,
                values=self.values & ABSOLUTE if absolute else self.values,
                forms=self.forms,
            )
        if absolute:
            form = self._absolute(form)
        if form.positions is Positions.DENSE:
            return form
        dense = fixed_bytes(DENSE_FORM, numel, itemsize)
        return DENSE_FORM if dense <= self.likely_bytes(form, count, numel, itemsize) else form

    def forms_of(
        self,
        counts: Sequence[int],
        numels: Sequence[int],
        itemsizes: Sequence[int],
        *,
        absolute: bool = False,
    ) -> list[Form]:
        """``form`` of each of many ranges; of a fixed form, whose sizes are a product, of all at once."""
        form = self._named
        if form is None or form.packing is not Packing.FIXED or form.positions is Positions.DENSE:
            every = zip(counts, numels, itemsizes, strict=True)
            return [self.form(*one, absolute=absolute) for one in every]
        if absolute:
            form = self._absolute(form)
        widths = np.array(itemsizes, np.int64)
        dense = np.array(numels, np.int64) * (widths + element_bytes(Positions.DENSE, 0))
        sparse = np.array(counts, np.int64) * (widths + element_bytes(form.positions, 0))
        return [DENSE_FORM if one else form for one in (dense <= sparse).tolist()]

    def _absolute(self, form: Form) -> Form:
        """The form with RAW values, or what stands in for it where a receiver does not know that one."""
        form = form._replace(values=Values.RAW)
        return form if form in self.forms else form.fixed

    def full_form(self, numel: int, itemsize: int) -> Form:
        """The form of a range of a full update."""
        form = self._named
        if form is None:
            return choose(
                numel,
                numel,
                itemsize,
                link_bytes_per_s=self.link_bytes_per_s,
                rates=self.rates,
                values=frozenset(),
                forms=self.forms,
            )
        return form if form.positions is Positions.DENSE else DENSE_FORM

    def likely_bytes(self, form: Form, count: int, numel: int, itemsize: int) -> int:
        """Bytes of a section: exact for fixed forms, else an estimate."""
        if form.packing is Packing.FIXED:
            return fixed_bytes(form, numel if form.positions is Positions.DENSE else count, itemsize)
        return costs(form, count, numel, itemsize, self.rates).nbytes


PLAIN_WIRE = WirePolicy()
"""Fixed forms only: what an update takes follows from its counts."""
