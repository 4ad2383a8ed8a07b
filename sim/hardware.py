"""A modelled machine as frozen dataclasses with units, and profiles in TOML with provenance for every number.

In a profile every number is a table of ``value``, ``unit``, ``kind``, ``source`` and, if known, ``ci`` (the
95 % interval, in the same unit). A number's name says its dimension: ``_bytes_per_s``, ``_bytes`` or ``_ns``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from decimal import Decimal
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weightsync.reference.errors import WeightSyncError
from weightsync.sim.fluid import Link

KINDS = ("measured", "fitted", "published", "prior", "guess")
"""Where a number may come from, best first."""

UNITS: Mapping[str, Mapping[str, int]] = {
    "_bytes_per_s": {
        "B/s": 1, "kB/s": 10**3, "MB/s": 10**6, "GB/s": 10**9, "TB/s": 10**12,
        "KiB/s": 2**10, "MiB/s": 2**20, "GiB/s": 2**30, "Mbit/s": 125 * 10**3, "Gbit/s": 125 * 10**6,
    },
    "_ns": {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9},
    "_bytes": {
        "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30,
    },
}  # fmt: skip
"""Units by suffix of a number's name, each as a multiple of the unit in the suffix."""


class ProfileError(WeightSyncError, ValueError):
    """A hardware profile is missing, or one of its keys, units or numbers cannot be used."""


@dataclass(frozen=True, slots=True)
class Host:
    """One host, as each of its ranks sees it.

    Attributes:
        memory_bytes: room for snapshots and staged updates.
        memcpy_bytes_per_s: one thread copying between host buffers, counted in bytes copied.
        verb_ns: what any verb costs before it touches a byte.
    """

    memory_bytes: int
    memcpy_bytes_per_s: int
    verb_ns: int


@dataclass(frozen=True, slots=True)
class Device:
    """What holds the weights and works on them; on a laptop, the host itself.

    Attributes:
        memory_bytes: room for weights and optimizer state.
        scan_bytes_per_s: comparing two snapshots, in bytes of both.
        digest_bytes_per_s: hashing elements for a digest.
        encode_bytes_per_s: packing sections into a bucket, checksum included.
        decode_bytes_per_s: checking a bucket's checksum and cutting it into ranges.
        validate_bytes_per_s: checking positions and bounds of a decoded bucket.
        apply_bytes_per_s: writing a bucket's values in place, in bytes of the bucket; undoing takes as long.
        optimizer_bytes_per_s: one optimizer step, in bytes of parameters.
    """

    memory_bytes: int
    scan_bytes_per_s: int
    digest_bytes_per_s: int
    encode_bytes_per_s: int
    decode_bytes_per_s: int
    validate_bytes_per_s: int
    apply_bytes_per_s: int
    optimizer_bytes_per_s: int


@dataclass(frozen=True, slots=True)
class Control:
    """The control plane.

    Attributes:
        message_ns: one message's way to a peer.
        connect_ns: opening a data group, once its members have met; closing one costs ``Host.verb_ns``.
    """

    message_ns: int
    connect_ns: int


@dataclass(frozen=True, slots=True)
class Generation:
    """What generates on a rollout.

    Attributes:
        pause_ns: from asking for a pause until no request reads the weights.
        resume_ns: from asking for more until requests read them again.
    """

    pause_ns: int
    resume_ns: int


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a profile, with where it comes from.

    Attributes:
        value: in the unit that the number's name ends with.
        stated: value and unit as the file states them.
        kind: one of ``KINDS``.
        source: who measured what, or why this guess.
        ci: lower and upper end of its 95 % interval, in the unit of ``value``; None when unknown.
    """

    value: int
    stated: str
    kind: str
    source: str
    ci: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Profile:
    """A modelled machine.

    Attributes:
        name: as scenarios call it.
        summary: one sentence.
        host, device, control, generation: its parts.
        network: the link that the ranks of a data group share; its latency is in the same section.
        quantities: provenance by dotted name, such as ``host.memcpy_bytes_per_s``, in the file's order.
    """

    name: str
    summary: str
    host: Host
    device: Device
    network: Link
    control: Control
    generation: Generation
    quantities: Mapping[str, Quantity]

    def of_kind(self, kind: str) -> tuple[str, ...]:
        """Dotted names of the numbers of one kind, in the file's order."""
        return tuple(name for name, quantity in self.quantities.items() if quantity.kind == kind)


_SECTIONS: Mapping[str, tuple[str, ...]] = {
    **{
        section: tuple(field.name for field in fields(part))
        for section, part in (
            ("host", Host),
            ("device", Device),
            ("control", Control),
            ("generation", Generation),
        )
    },
    "network": ("bandwidth_bytes_per_s", "latency_ns"),
}


def profile_names() -> tuple[str, ...]:
    """Names of the profiles that come with this package, sorted."""
    folder = resources.files(__package__).joinpath("profiles")
    return tuple(sorted(file.name[:-5] for file in folder.iterdir() if file.name.endswith(".toml")))


def load_profile(name: str | Path) -> Profile:
    """A built-in profile by name, or any profile by the path of its TOML file.

    Raises ProfileError that names what is unknown, missing or misfit, with near names.
    """
    if isinstance(name, Path) or name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise ProfileError(
                f"hardware profile {str(name)!r} is no file; give a path, or one of {_list(profile_names())}"
            )
        return parse_profile(path.read_text(encoding="utf-8"), path.name)
    if name not in profile_names():
        raise ProfileError(_unknown("hardware profile", name, profile_names()))
    file = resources.files(__package__).joinpath("profiles", f"{name}.toml")
    return parse_profile(file.read_text(encoding="utf-8"), file.name)


def parse_profile(text: str, where: str = "profile") -> Profile:
    """A profile from TOML text; ``where`` names it in errors. Raises ProfileError."""
    try:
        table = tomllib.loads(text, parse_float=Decimal)
    except tomllib.TOMLDecodeError as error:
        raise ProfileError(f"{where} is not TOML: {error}") from None
    _keys(table, ("name", "summary", *_SECTIONS), where)
    quantities: dict[str, Quantity] = {}
    for section, numbers in table.items():
        if section in _SECTIONS:
            _keys(_table(numbers, f"{where}: [{section}]"), _SECTIONS[section], f"{where}: [{section}]")
            for number, entry in numbers.items():
                quantities[f"{section}.{number}"] = _quantity(number, entry, f"{where}: {section}.{number}")

    def part(section: str) -> dict[str, int]:
        return {number: quantities[f"{section}.{number}"].value for number in _SECTIONS[section]}

    return Profile(
        name=_text(table["name"], f"{where}: name"),
        summary=_text(table["summary"], f"{where}: summary"),
        host=Host(**part("host")),
        device=Device(**part("device")),
        network=Link("network", **part("network")),
        control=Control(**part("control")),
        generation=Generation(**part("generation")),
        quantities=MappingProxyType(quantities),
    )


def _quantity(number: str, entry: Any, where: str) -> Quantity:
    allowed = ("value", "unit", "kind", "source")
    _keys(_table(entry, where), allowed, where, optional=("ci",))
    suffix = next(suffix for suffix in UNITS if number.endswith(suffix))
    units, unit = UNITS[suffix], _text(entry["unit"], f"{where}.unit")
    if unit not in units:
        raise ProfileError(f"{where}: {_unknown('unit', unit, units)}")
    if entry["kind"] not in KINDS:
        raise ProfileError(f"{where}: {_unknown('kind', str(entry['kind']), KINDS)}")
    value = _scaled(entry["value"], units[unit], f"{where}.value")
    if value == 0 and suffix != "_ns":
        raise ProfileError(f"{where} is {entry['value']} {unit}; give more than 0")
    ci = None
    if "ci" in entry:
        if not isinstance(entry["ci"], list) or len(entry["ci"]) != 2:
            raise ProfileError(f"{where}.ci is {entry['ci']!r}; give [lower, upper] in {unit}")
        low, high = (_scaled(end, units[unit], f"{where}.ci") for end in entry["ci"])
        if not low <= value <= high:
            raise ProfileError(f"{where}.ci is [{low}, {high}] around {value}; the value must lie inside")
        ci = (low, high)
    return Quantity(
        value, f"{entry['value']} {unit}", entry["kind"], _text(entry["source"], f"{where}.source"), ci
    )


def _scaled(value: Any, factor: int, where: str) -> int:
    """``value * factor`` to the nearest integer. Refuses what a model would silently misread."""
    if isinstance(value, bool) or not isinstance(value, (int, Decimal)) or not Decimal(value).is_finite():
        raise ProfileError(f"{where} is {value!r}; give a number")
    scaled = round(Decimal(value) * factor)
    if value < 0 or (value > 0 and scaled == 0):
        raise ProfileError(f"{where} is {value}; give 0 or more, and a unit in which it is a whole number")
    return scaled


def _keys(
    table: Mapping[str, Any], required: Iterable[str], where: str, optional: tuple[str, ...] = ()
) -> None:
    known = (*required, *optional)
    for key in table:
        if key not in known:
            raise ProfileError(f"{where}: {_unknown('key', key, known)}")
    missing = [key for key in required if key not in table]
    if missing:
        raise ProfileError(
            f"{where} lacks {_list(missing)}; every number must be stated, there are no defaults"
        )


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where} is {value!r}; give a table")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ProfileError(f"{where} is {value!r}; give a text")
    return value


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=3) or names
    return f"unknown {what} {name!r}; did you mean {_list(near)}?"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
