"""Prices: every verb has one, and it is exactly fixed part + messages + bytes over rate."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.reference.rank import PHASES
from weightsync.sim.costs import PRICES, UnknownVerb, cost_ns, price
from weightsync.sim.hardware import load_profile

PROFILE = load_profile("laptop")
verbs = st.sampled_from(sorted(PRICES))


def test_every_verb_of_the_protocol_has_a_price():
    assert set(PHASES) - set(PRICES) == set()
    assert set(PRICES) - set(PHASES) == {"optimizer", "snapshot_on_device", "status"}


def test_prices_name_numbers_of_the_profile_in_their_unit():
    for how in PRICES.values():
        assert how.fixed.endswith("_ns")
        assert how.fixed in PROFILE.quantities
        if how.rate is not None:
            assert how.rate.endswith("_bytes_per_s")
            assert how.rate in PROFILE.quantities


def test_every_number_of_a_profile_is_used_by_a_price_or_is_room_or_a_link():
    used = {how.fixed for how in PRICES.values()} | {how.rate for how in PRICES.values()}
    elsewhere = {"host.memory_bytes", "device.memory_bytes", "control.message_ns"}
    links = {"network.bandwidth_bytes_per_s", "network.latency_ns"}
    assert set(PROFILE.quantities) == (used - {None}) | elsewhere | links


def test_resources():
    def of(resource: str) -> set[str]:
        return {verb for verb, how in PRICES.items() if how.resource == resource}

    assert of("link") == {"exchange", "gather", "send", "receive"}
    assert of("cpu") == {
        "snapshot", "snapshot_on_device", "diff", "squash", "merge", "narrow", "encode", "decode", "validate", "apply",
        "rollback", "digest",
        "optimizer",
    }  # fmt: skip
    assert all(PRICES[verb].rate is not None for verb in of("cpu"))
    assert all(PRICES[verb].rate is None for verb in of("none"))


@given(verbs, st.integers(0, 10**15))
def test_a_cost_is_the_fixed_part_the_messages_and_the_bytes_rounded_up(verb, nbytes):
    how = price(verb)
    expected = Fraction(PROFILE.quantities[how.fixed].value + how.messages * PROFILE.control.message_ns)
    if how.rate is not None:
        expected += Fraction(nbytes * 10**9, PROFILE.quantities[how.rate].value)
    found = cost_ns(verb, nbytes, PROFILE)
    assert type(found) is int
    assert found == ceil(expected)


def test_a_few_by_hand():
    assert cost_ns("snapshot", 8_000, PROFILE) == 50_000 + 1_000
    assert cost_ns("snapshot", 1, PROFILE) == 50_000 + 1
    assert cost_ns("post", 10**9, PROFILE) == 50_000 + 200_000
    assert cost_ns("call", 0, PROFILE) == 50_000 + 2 * 200_000
    assert cost_ns("pause", 0, PROFILE) == 5_000_000


def test_unknown_verbs_and_negative_bytes_are_refused():
    with pytest.raises(UnknownVerb, match="no price for verb 'snapshoot'; did you mean 'snapshot'"):
        cost_ns("snapshoot", 1, PROFILE)
    with pytest.raises(UnknownVerb, match="did you mean 'agree', 'apply'"):
        price("zzz")
    with pytest.raises(ValueError, match="'apply' on -1 bytes"):
        cost_ns("apply", -1, PROFILE)
