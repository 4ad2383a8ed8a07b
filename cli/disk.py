"""``weightsync publish | pull | inspect | verify``: weights through a folder or an object store."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from torch import Tensor

from weightsync.backends.disk import (
    CheckpointReader,
    Index,
    LiveReader,
    LocalFiles,
    Publisher,
    PublisherSettings,
)
from weightsync.backends.disk.checkpoint import Checkpoint
from weightsync.backends.disk.fresh import parts
from weightsync.backends.disk.index import listing
from weightsync.backends.disk.objects import open_store
from weightsync.backends.disk.squash import signed
from weightsync.backends.disk.store import Progress as Told
from weightsync.backends.disk.store import Store
from weightsync.cli.disk_view import inspect_tables, report
from weightsync.cli.tables import format_bytes
from weightsync.reference.errors import PatchMismatch, WeightSyncError
from weightsync.reference.params import ParamMeta

LARGEST_EXTRA = 64 << 20
"""Files of a checkpoint beside its weights that are larger than this are not published."""

Where = Annotated[
    str, typer.Argument(help="Folder or URL with the versions, such as /mnt/run7 or s3://bucket/run7.")
]
Into = Annotated[
    str, typer.Option("--into", help="Folder or URL for the versions, such as s3://bucket/run7.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Keep = Annotated[int, typer.Option(min=1, help="Newest versions that a reader without any must reach.")]


def publish_command(
    checkpoint: Annotated[Path, typer.Argument(help="A folder of safetensors files.")],
    into: Into,
    base: Annotated[
        Path | None,
        typer.Option(help="The checkpoint published last; by default it is read from the versions."),
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Publish a full version.")] = False,
    anchor_every: Annotated[int, typer.Option(min=1, help="A full version after so many deltas.")] = 20,
    keep: Keep = 40,
    as_json: Json = False,
) -> None:
    """Publish a checkpoint as the next version: as a delta where a version is there, else whole."""
    with _sentences():
        store, state = open_store(into), _load(checkpoint)
        extras = {
            path.name: path.read_bytes()
            for path in sorted(checkpoint.glob("*"))
            if path.suffix in (".json", ".txt", ".model", ".jinja") and path.is_file()
            if not path.name.endswith(".index.json") and path.stat().st_size <= LARGEST_EXTRA
        }
        metas = list(_metas(state).values())
        if base is not None and full:
            raise PatchMismatch(
                "--base is what a delta starts from, and --full publishes none; leave one out"
            )
        with _bar("publish", as_json) as told:
            settings = PublisherSettings(anchor_every=anchor_every, keep=keep)
            with Publisher(store, metas, settings, extras, progress=told) as publisher:
                newest = listing(store).newest
                if base is not None and newest is None:
                    raise PatchMismatch(
                        f"--base {str(base)!r} was not published: {into!r} holds no version, expected one that it is; "
                        "leave it out, and the checkpoint is published whole"
                    )
                if newest is not None and not full:
                    publisher.adopt(_load(base) if base is not None else _state_of(store, newest, state))
                index = publisher.publish(state, full)
                removed = publisher.clean()
        said = {"version": index.version, "kind": index.kind, "base": index.base, "bytes": index.nbytes,
                "changed": index.changed, "elements": index.elements, "removed": list(removed)}  # fmt: skip
        if as_json:
            print(json.dumps(said))
            return
        print(
            f"version {index.version} ({index.kind}): {format_bytes(index.nbytes)}, {index.changed:,} of "
            f"{index.elements:,} elements"
        )


def pull_command(
    source: Where,
    into: Annotated[
        Path, typer.Option("--into", help="The checkpoint folder to keep; made when it is empty.")
    ],
    version: Annotated[
        int | None, typer.Option(min=1, help="The version wanted; by default the newest.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring a checkpoint folder to a version, in place, whole or not at all."""
    with _sentences():
        store = open_store(source)
        with _bar("pull", as_json) as told:
            reader = CheckpointReader(store, into, progress=told)
            try:
                step = reader.pull(version)
            finally:
                reader.leave()
        if as_json:
            print(json.dumps({"version": step.version, "chain": list(step.chain)}))
            return
        chain = ", ".join(map(str, step.chain)) or "none; it was there"
        print(f"{into} holds version {step.version}; versions read: {chain}")


def inspect_command(source: Where, keep: Keep = 40, as_json: Json = False) -> None:
    """List the versions: sizes, densities, chains, leases, and what a cleaner would remove."""
    with _sentences():
        found = report(open_store(source), time.time_ns(), keep)
        if as_json:
            print(json.dumps(found, indent=1))
        else:
            inspect_tables(Console(), found)


def verify_command(source: Where, as_json: Json = False) -> None:
    """Read every byte of every version and hold it against its checksums; a checkpoint folder is counted anew."""
    with _sentences():
        local = Path(source)
        rows: list[tuple[str, str]] = []
        if (local / ".weightsync" / "state.json").exists():
            state, digest = CheckpointReader(open_store(source), local, name=None).verify()
            right = state is not None and state.digest == digest
            rows.append(
                (f"checkpoint at version {state.version if state else 'none'}", "" if right else "other bits")
            )
        else:
            store = open_store(source)
            there = listing(store)
            with _bar("verify", as_json) as told:
                for version, index in there.indexes.items():
                    rows.append((f"version {version} ({index.kind})", _fault(store, index, told)))
            rows += [(f"version {version}", why) for version, why in there.damaged.items()]
            if not rows:
                raise PatchMismatch(
                    f"{source!r} holds no version, expected at least one; name the folder they are in"
                )
        if as_json:
            print(json.dumps([{"what": what, "fault": fault or None} for what, fault in rows], indent=1))
        else:
            table = Table("what", "right", "fault")
            for what, fault in rows:
                table.add_row(what, "no" if fault else "yes", fault)
            Console().print(table)
    if any(fault for _, fault in rows):
        raise typer.Exit(1)


def _fault(store: Store, index: Index, told: Told) -> str:
    try:
        for entry in (*index.files, *index.delta):
            for _ in parts(store, index.folder, entry, told):
                pass
    except (PatchMismatch, OSError) as error:
        return str(error)
    return ""


def _load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint folder, its own memory."""
    if not folder.is_dir():
        raise PatchMismatch(f"checkpoint {str(folder)!r} is no folder, expected one with safetensors files")
    checkpoint = Checkpoint(LocalFiles(folder))
    found = {}
    for name, meta in checkpoint.metas.items():
        found[name] = signed(checkpoint.read(name)).view(meta.dtype).reshape(meta.shape)
    checkpoint.close()
    if not found:
        raise PatchMismatch(f"checkpoint {str(folder)!r} has no safetensors file, expected at least one")
    return found


def _metas(state: Mapping[str, Tensor]) -> dict[str, ParamMeta]:
    return {name: ParamMeta.of(name, tensor) for name, tensor in state.items()}


def _state_of(store: Store, newest: Index, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The newest version's state, read into memory."""
    state = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    LiveReader(store, state).pull(newest.version)
    return state


@contextmanager
def _bar(what: str, quiet: bool) -> Iterator[Told]:
    """A progress bar on stderr that counts bytes."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    hidden = quiet or not sys.stderr.isatty()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)
        yield lambda moved: bar.advance(task, moved)


@contextmanager
def _sentences() -> Iterator[None]:
    """Print an error as its sentence, without a traceback, and end with code 1."""
    try:
        yield
    except (WeightSyncError, OSError) as error:
        Console(stderr=True).print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
