"""What ``weightsync inspect`` tells of a folder of versions: as data, and as tables."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from weightsync.backends.disk.chains import fresh_chain
from weightsync.backends.disk.cleaner import hidden, plan_cleaning
from weightsync.backends.disk.index import listing
from weightsync.backends.disk.leases import leases
from weightsync.backends.disk.store import Store
from weightsync.cli.tables import format_bytes


def report(store: Store, now_ns: int, keep: int) -> dict[str, Any]:
    """Versions, leases, and what a cleaner that keeps ``keep`` versions would remove now; ready for JSON."""
    there, held = listing(store), leases(store)
    plan = plan_cleaning(there.indexes, held, now_ns, keep)
    versions = []
    for version, index in there.indexes.items():
        chain = fresh_chain(there.indexes, version)
        versions.append(
            {
                "version": version,
                "kind": index.kind,
                "base": index.base or index.delta_base,
                "bytes": index.nbytes,
                "delta_bytes": sum(one.bytes for one in index.delta) if index.delta_base else None,
                "density": index.changed / index.elements if index.elements else 0.0,
                "encodings": dict(index.encodings),
                "chain": None if chain is None else [one.version for one in chain],
                "chain_bytes": None if chain is None else sum(one.nbytes for one in chain),
                "kept": plan.kept.get(version),
            }
        )
    return {
        "versions": versions,
        "removable": list(plan.removable),
        "unfinished": list(there.unfinished),
        "hidden": sorted(hidden(store)),
        "damaged": there.damaged,
        "leases": [
            {"reader": one.reader, "version": one.version, "ended": one.ends_ns <= now_ns} for one in held
        ],
    }


def inspect_tables(console: Console, found: dict[str, Any]) -> None:
    """Print a report."""
    table = Table("version", "kind", "base", "bytes", "density", "from nothing", "stays because")
    for one in found["versions"]:
        size = format_bytes(one["bytes"])
        if one["delta_bytes"] is not None:
            size += f" + {format_bytes(one['delta_bytes'])}"
        chain = (
            "-" if one["chain"] is None else f"{len(one['chain'])} read, {format_bytes(one['chain_bytes'])}"
        )
        base = str(one["base"] or "-")
        why = one["kept"] or "removable"
        table.add_row(str(one["version"]), one["kind"], base, size, f"{one['density']:.3%}", chain, why)
    console.print(table)
    for lease in found["leases"]:
        ended = ", ended" if lease["ended"] else ""
        console.print(f"lease: {lease['reader']} holds version {lease['version']}{ended}", highlight=False)
    for key in ("removable", "unfinished", "hidden"):
        if found[key]:
            console.print(f"{key}: {', '.join(map(str, found[key]))}", highlight=False)
    for version, why in found["damaged"].items():
        console.print(f"damaged: version {version}: {why}", highlight=False, markup=False)
