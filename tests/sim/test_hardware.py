"""Profiles: every number with its provenance, and refusals that say what to write instead."""

from __future__ import annotations

import dataclasses
import re
from importlib import resources
from pathlib import Path

import pytest

from weightsync.sim.fluid import Link
from weightsync.sim.hardware import KINDS, UNITS, ProfileError, load_profile, parse_profile, profile_names


@pytest.fixture(scope="module")
def text() -> str:
    return resources.files("weightsync.sim").joinpath("profiles", "laptop.toml").read_text(encoding="utf-8")


def section(text: str, number: str) -> str:
    return re.search(rf"\[{re.escape(number)}\]\n(?:.+\n)+", text)[0]


def test_laptop_is_built_in_and_every_number_in_it_is_a_guess_with_a_reason():
    profile = load_profile("laptop")
    assert "laptop" in profile_names()
    assert profile.of_kind("guess") == tuple(profile.quantities)
    assert all(profile.of_kind(kind) == () for kind in KINDS if kind != "guess")
    assert all(len(quantity.source) > 10 for quantity in profile.quantities.values())


@pytest.mark.parametrize("name", profile_names())
def test_every_built_in_profile_says_its_own_name_and_every_part_is_stated(name):
    profile = load_profile(name)
    assert profile.name == name
    for part in ("host", "device", "control", "generation"):
        for number, value in dataclasses.asdict(getattr(profile, part)).items():
            assert profile.quantities[f"{part}.{number}"].value == value
    assert profile.network == Link(
        "network",
        profile.quantities["network.bandwidth_bytes_per_s"].value,
        profile.quantities["network.latency_ns"].value,
    )


def test_units_are_converted_to_the_unit_in_the_name(text):
    profile = parse_profile(text)
    assert (profile.host.memory_bytes, profile.host.memcpy_bytes_per_s) == (16 * 2**30, 8 * 10**9)
    assert (profile.host.verb_ns, profile.generation.pause_ns) == (50_000, 5_000_000)
    assert profile.quantities["host.verb_ns"].stated == "50 us"


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [("0.1", "GB/s", 10**8), ("1.5", "Gbit/s", 187_500_000), ("3", "MiB/s", 3 * 2**20), ("1e3", "B/s", 1000)],
)
def test_decimal_numbers_are_exact(text, value, unit, expected):
    number = section(text, "host.memcpy_bytes_per_s")
    changed = number.replace("value = 8", f"value = {value}").replace("GB/s", unit)
    assert parse_profile(text.replace(number, changed)).host.memcpy_bytes_per_s == expected


def test_an_interval_is_in_the_same_unit_and_holds_the_value(text):
    number = section(text, "host.memcpy_bytes_per_s")
    with_ci = text.replace(number, number + "ci = [7.5, 9]\n")
    assert parse_profile(with_ci).quantities["host.memcpy_bytes_per_s"].ci == (75 * 10**8, 9 * 10**9)
    for wrong, words in (("[9, 10]", "must lie inside"), ("[1]", "give [lower, upper] in GB/s")):
        with pytest.raises(ProfileError, match=re.escape(words)):
            parse_profile(text.replace(number, number + f"ci = {wrong}\n"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[host.memcpy_bytes_per_s]", "[host.memcpy_bytes_per_sec]",
         "[host]: unknown key 'memcpy_bytes_per_sec'; did you mean 'memcpy_bytes_per_s'"),
        ("[network.latency_ns]", "[netwrk.latency_ns]", "unknown key 'netwrk'; did you mean 'network'"),
        ('unit = "GB/s"', 'unit = "GBps"', "memcpy_bytes_per_s: unknown unit 'GBps'; did you mean 'GB/s'"),
        ('unit = "us"', 'unit = "GB/s"', "host.verb_ns: unknown unit 'GB/s'; did you mean"),
        ('kind = "guess"', 'kind = "guessed"', "unknown kind 'guessed'; did you mean 'guess'"),
        ('kind = "guess"\n', "", "host.memory_bytes lacks 'kind'"),
        ('kind = "guess"', 'kind = "guess"\nci95 = [1, 2]', "unknown key 'ci95'; did you mean 'ci'"),
        ("value = 8", "value = -8", "is -8; give 0 or more"),
        ("value = 8", "value = 0", "is 0 GB/s; give more than 0"),
        ("value = 8", "value = 1e-12", "a unit in which it is a whole number"),
        ("value = 8", "value = true", "is True; give a number"),
        ("value = 8", "value = nan", "give a number"),
        ("value = 8", 'value = "8"', "is '8'; give a number"),
        ('source = "a common size"', 'source = " "', "host.memory_bytes.source is ' '; give a text"),
        ('name = "laptop"', "name = 3", "name is 3; give a text"),
        ('name = "laptop"', 'name = "laptop', "profile is not TOML"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name(text, old, new, words):
    assert old in text
    with pytest.raises(ProfileError, match=re.escape(words)):
        parse_profile(text.replace(old, new, 1))


def test_missing_numbers_and_flat_sections_are_refused(text):
    number = section(text, "control.connect_ns")
    with pytest.raises(
        ProfileError, match=re.escape("[control] lacks 'connect_ns'; every number must be stated")
    ):
        parse_profile(text.replace(number, ""))
    with pytest.raises(ProfileError, match="connect_ns is 3; give a table"):
        parse_profile(text.replace(number, "[control]\nconnect_ns = 3\n"))
    with pytest.raises(ProfileError, match="profile lacks 'host', 'device'"):
        parse_profile('name = "x"\nsummary = "y"')


def test_profiles_are_found_by_name_or_path(tmp_path: Path, text):
    path = tmp_path / "mine.toml"
    path.write_text(text.replace('name = "laptop"', 'name = "mine"'), encoding="utf-8")
    assert load_profile(path).name == load_profile(str(path)).name == "mine"
    with pytest.raises(ProfileError, match="unknown hardware profile 'labtop'; did you mean 'laptop'"):
        load_profile("labtop")
    with pytest.raises(ProfileError, match=r"'nowhere\.toml' is no file"):
        load_profile("nowhere.toml")


def test_profiles_are_values_and_their_provenance_cannot_be_changed(text):
    profile = parse_profile(text)
    assert profile == parse_profile(text)
    with pytest.raises(TypeError):
        profile.quantities["host.verb_ns"] = None  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.host.verb_ns = 1  # type: ignore[misc]


def test_no_suffix_hides_another():
    suffixes = list(UNITS)
    assert all(not long.endswith(short) for long in suffixes for short in suffixes if long != short)
