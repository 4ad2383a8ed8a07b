"""Rich tables of one run: per version, per phase, the checks, and the progress bar. Pure rendering."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from weightsync.reference.metrics import bits_per_change, density

PHASES = (
    "connect",
    "control",
    "pause_flush",
    "source_materialize",
    "snapshot",
    "diff",
    "tp_gather",
    "hf_conversion",
    "encode",
    "lock_wait",
    "broadcast",
    "decode",
    "validate",
    "apply",
    "digest",
    "commit",
    "rollback",
    "continue",
    "wait",
    "idle",
)
"""Phase keys in the order in which an update meets them; others follow in alphabetical order."""

WHOLE = ("total", "paused", "exposed")
"""Times of whole updates, which are no sums of spans; they stand below the phases."""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """What one committed version cost, and what every rank holds after it.

    Attributes:
        version: the version's number.
        kind: ``full``, ``delta`` or ``empty``.
        changed: elements that differ from the version before; all of them in a full update.
        elements: elements of the whole checkpoint.
        wire_bytes: bytes sent, headers and trailer included.
        digests: rank name -> digest of the state that its group holds, as signed int64.
    """

    version: int
    kind: str
    changed: int
    elements: int
    wire_bytes: int
    digests: Mapping[str, int] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Share of all elements that changed, 0 to 1."""
        return density(self.changed, self.elements)

    @property
    def bits_per_change(self) -> float | None:
        """Bits sent per changed element, or None when nothing changed."""
        return bits_per_change(self.wire_bytes, self.changed)


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check of the run: what was compared, whether it held, and what was found.

    Attributes:
        name: what was compared, such as ``bytes of rollout1.0``.
        ok: True when it held.
        detail: what was found; for a failure the tensor, the position and both bit patterns.
    """

    name: str
    ok: bool
    detail: str = ""


def version_table(rows: Sequence[VersionRow], title: str = "versions") -> Table:
    """One row per version: changed elements, density, bytes, bits per change, digest on every rank."""
    table = Table(title=title, title_justify="left")
    for name in ("version", "update", "changed", "density", "bytes", "bits/change"):
        table.add_column(name, justify="left" if name == "update" else "right", no_wrap=True)
    table.add_column("digest on every rank", overflow="fold")
    for row in rows:
        bits = row.bits_per_change
        table.add_row(
            str(row.version),
            row.kind,
            f"{row.changed:,}",
            f"{100 * row.density:.2f} %",
            format_bytes(row.wire_bytes),
            "-" if bits is None else f"{bits:.1f}",
            digest_text(row.digests),
        )
    return table


def digest_text(digests: Mapping[str, int]) -> Text:
    """The digest with ``all N ranks`` when they agree; otherwise each digest with the ranks that hold it.

    A digest is written as its first 8 of 16 hex digits; two that share those are still told apart by standing
    on two lines.
    """
    holders: dict[int, list[str]] = {}
    for rank in sorted(digests):
        holders.setdefault(digests[rank], []).append(rank)
    if not holders:
        return Text("not compared", style="dim")
    if len(holders) == 1:
        return Text(f"{_hex(next(iter(holders)))} all {len(digests)} ranks", style="green")
    most = max(len(ranks) for ranks in holders.values())
    text = Text()
    for digest, ranks in holders.items():
        style = "green" if len(ranks) == most else "bold red"
        text.append(("\n" if text else "") + f"{_hex(digest)} {' '.join(ranks)}", style=style)
    return text


def phase_table(
    modelled: Mapping[str, int] | None,
    measured: Mapping[str, int] | None,
    *,
    modelled_on: str = "",
    measured_on: str = "",
    title: str = "phases, summed over ranks",
) -> Table:
    """Nanoseconds per phase with a *modelled* and a *measured* column; a phase in neither is absent.

    A side that is None has no column. A phase of the other side only shows ``-``, which is not zero time. Times of
    whole updates stand below a rule, and a line under the table says that they are no sums over ranks.
    """
    sides = [("modelled", modelled_on, modelled), ("measured", measured_on, measured)]
    shown = [(name, conditions, side) for name, conditions, side in sides if side is not None]
    table = Table(title=title, title_justify="left")
    table.add_column("phase", no_wrap=True)
    for name, conditions, _ in shown:
        table.add_column(f"{name}\n({conditions})" if conditions else name, justify="right")
    phases = in_order(phase for _, _, side in shown for phase in side)
    whole = [phase for phase in phases if phase in WHOLE]
    for phase in phases:
        if phase in whole[:1]:
            table.add_section()
        table.add_row(phase, *(format_ns(side[phase]) if phase in side else "-" for _, _, side in shown))
    if whole:
        table.caption = f"{', '.join(whole)}: of whole updates, not summed over ranks"
        table.caption_justify = "left"
    return table


def checks_table(rows: Sequence[CheckRow], title: str = "checks") -> Table:
    """One row per check, failures in red, with what was found."""
    table = Table(title=title, title_justify="left")
    table.add_column("check")
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for row in rows:
        verdict = Text("equal", style="green") if row.ok else Text("DIFFERENT", style="bold red")
        table.add_row(Text(row.name), verdict, Text(row.detail))  # a detail may hold brackets
    return table


def verdict_text(rows: Sequence[CheckRow]) -> Text:
    """One sentence: every check held, or how many did not and the first of them."""
    wrong = [row for row in rows if not row.ok]
    if not rows:
        return Text("verdict: nothing was checked", style="bold yellow")
    if not wrong:
        return Text(f"verdict: all {len(rows)} checks hold, bit for bit", style="bold green")
    first = f"{wrong[0].name}: {wrong[0].detail}" if wrong[0].detail else wrong[0].name
    return Text(f"verdict: {len(wrong)} of {len(rows)} checks failed, first {first}", style="bold red")


def progress_bar(console: Console | None = None) -> Progress:
    """A progress bar that counts updates; it draws nothing where ``console`` is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def in_order(phases: Iterable[str]) -> tuple[str, ...]:
    """The distinct phases in the order of an update, unknown ones after them and sorted, whole updates last."""
    rank = {phase: number for number, phase in enumerate((*PHASES, None, *WHOLE))}
    return tuple(sorted(set(phases), key=lambda phase: (rank.get(phase, len(PHASES)), phase)))


def format_bytes(nbytes: int) -> str:
    """Bytes with a decimal unit: ``640 B``, ``12.3 kB``, ``4.56 MB``."""
    return f"{nbytes:,} B" if nbytes < 1000 else _scaled(nbytes, ("kB", "MB", "GB", "TB"), 1000)


def format_ns(duration_ns: int) -> str:
    """A duration with its unit: ``640 ns``, ``12.3 us``, ``4.56 ms``, ``7.89 s``."""
    return f"{duration_ns} ns" if duration_ns < 1000 else _scaled(duration_ns, ("us", "ms", "s"), 1000)


def _scaled(value: int, units: Sequence[str], step: int) -> str:
    size = value / step
    number = 0
    while size >= 999.5 and number + 1 < len(units):
        size /= step
        number += 1
    digits = 2 if size < 9.995 else 1 if size < 99.95 else 0
    return f"{size:,.{digits}f} {units[number]}"


def _hex(digest: int) -> str:
    return f"{digest & 0xFFFF_FFFF_FFFF_FFFF:016x}"[:8]
