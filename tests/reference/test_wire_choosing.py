"""Choosing a form: the least total of the profile, equal everywhere, and never what a baseline cannot give."""

from __future__ import annotations

from collections.abc import Set

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.errors import PatchMismatch, PlanMismatch
from weightsync.reference.wire.choosing import choose, choose_named
from weightsync.reference.wire.costs import costs
from weightsync.reference.wire.forms import ABSOLUTE, ALL_FORMS, DENSE_FORM, Form, Positions, Values
from weightsync.reference.wire.policy import WirePolicy
from weightsync.reference.wire.rates import RATES
from weightsync.reference.wire.sections import fixed_bytes

EVERY = frozenset(Values)
ITEMSIZES = st.sampled_from([1, 2, 4, 8])
LINKS = st.floats(1e6, 1e12)


@st.composite
def counts(draw: st.DrawFn) -> tuple[int, int]:
    numel = draw(st.integers(1, 1 << 31))
    return draw(st.integers(1, numel) | st.integers(1, max(1, numel // 1000))), numel


@given(counts(), ITEMSIZES, LINKS, st.sampled_from([ABSOLUTE, EVERY, frozenset()]))
def test_no_allowed_form_is_estimated_cheaper(
    count: tuple[int, int], itemsize: int, link: float, values: Set[Values]
) -> None:
    found = choose(*count, itemsize, link_bytes_per_s=link, rates=RATES, values=values)
    allowed = [form for form in ALL_FORMS if form.values in values or form.positions is Positions.DENSE]
    assert found in allowed or found == DENSE_FORM
    totals = {form: costs(form, *count, itemsize, RATES).total_ns(link) for form in allowed}
    assert totals[found] == min(totals.values())
    assert found == choose(*count, itemsize, link_bytes_per_s=link, rates=RATES, values=values)


@given(counts(), ITEMSIZES, st.sampled_from(ALL_FORMS))
def test_no_estimate_exceeds_the_fixed_form(count: tuple[int, int], itemsize: int, form: Form) -> None:
    elements = count[1] if form.positions is Positions.DENSE else count[0]
    estimate = costs(form, *count, itemsize, RATES)
    assert 0 < estimate.nbytes <= fixed_bytes(form, elements, itemsize)
    assert estimate.encode_ns > 0
    assert estimate.decode_ns > 0


@given(st.sampled_from(["auto", *(form.name for form in ALL_FORMS)]), st.booleans(), st.data())
def test_many_forms_at_once_are_those_one_by_one(encoding: str, absolute: bool, data: st.DataObject) -> None:
    wire = WirePolicy(encoding, link_bytes_per_s=1e9)
    every = data.draw(st.lists(st.tuples(counts(), ITEMSIZES), min_size=1, max_size=8))
    found = wire.forms_of(
        [count for (count, _), _ in every], [numel for (_, numel), _ in every], [size for _, size in every],
        absolute=absolute,
    )  # fmt: skip
    assert found == [wire.form(*one, itemsize, absolute=absolute) for one, itemsize in every]


def test_slow_links_get_the_smallest_form_and_fast_ones_the_quickest() -> None:
    def at(link: float, count: int) -> Form:
        return choose(count, 1 << 22, 2, link_bytes_per_s=link, rates=RATES, values=EVERY)

    slow = at(1e7, 41943)
    assert slow.name in ("gap8+step+zstd", "gap16+step+zstd")
    assert at(1e13, 41943).packing < slow.packing
    assert at(1e13, 1 << 22) == DENSE_FORM
    assert at(1e7, 400).positions is Positions.GAP16


def test_without_old_bits_only_raw_values_or_a_dense_range_are_chosen() -> None:
    for count in (10, 1 << 10, 1 << 16, 1 << 20):
        assert (
            choose(count, 1 << 22, 2, link_bytes_per_s=1e9, rates=RATES, values=ABSOLUTE).values is Values.RAW
        )
    assert (
        choose(9, 1 << 22, 2, link_bytes_per_s=1e9, rates=RATES, values=frozenset()).positions
        is Positions.DENSE
    )


def test_receivers_that_know_less_are_sent_less() -> None:
    known = [Form.named("int32+raw"), Form.named("gap8+raw+streams")]
    for link in (1e6, 1e9, 1e13):
        found = choose(40000, 1 << 22, 2, link_bytes_per_s=link, rates=RATES, values=EVERY, forms=known)
        assert found in (*known, DENSE_FORM)


@given(st.sampled_from(ALL_FORMS))
def test_names_and_numbers_are_found_again(form: Form) -> None:
    assert Form.named(form.name) == form
    assert Form.of(*form, "w") == form
    assert choose_named(form.name, EVERY) == form


def test_what_cannot_be_is_refused_by_name() -> None:
    with pytest.raises(
        PlanMismatch, match=r"encoding 'rice' is unknown, expected auto or one of dense\+raw, .*block"
    ):
        Form.named("rice")
    with pytest.raises(PlanMismatch, match="needs values in xor, the baseline allows raw"):
        choose_named("gap8+xor+zstd", ABSOLUTE)
    with pytest.raises(
        PlanMismatch, match=r"receiver does not know encoding 'gap8\+step\+zstd', only int32\+raw; name"
    ):
        choose_named("gap8+step+zstd", EVERY, [Form.named("int32+raw")])
    with pytest.raises(PatchMismatch, match=r"range of 'w' has position form 9, expected one of 0 \(DENSE\)"):
        Form.of(9, 0, 0, "w")
    with pytest.raises(
        PatchMismatch, match=r"range of 'w' has value form 3, expected one of 0 \(RAW\), 1 \(XOR\)"
    ):
        Form.of(1, 3, 0, "w")
    with pytest.raises(PatchMismatch, match=r"range of 'w' has packing 7, expected one of 0 \(FIXED\)"):
        Form.of(1, 0, 7, "w")
    with pytest.raises(
        PatchMismatch, match=r"'w' is dense\+step\+zstd, a combination that the wire does not have"
    ):
        Form.of(0, 2, 2, "w")
    with pytest.raises(PlanMismatch, match="5 elements of 4 were given, expected 1 to 4"):
        choose(5, 4, 2, link_bytes_per_s=1e9, rates=RATES, values=EVERY)
    with pytest.raises(PlanMismatch, match="link_bytes_per_s is 0, expected more than 0"):
        choose(4, 4, 2, link_bytes_per_s=0, rates=RATES, values=EVERY)
