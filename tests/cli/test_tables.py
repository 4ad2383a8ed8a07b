from __future__ import annotations

import io
import re
from pathlib import Path

from rich.console import Console, RenderableType

from weightsync.cli import tables
from weightsync.cli.tables import CheckRow, VersionRow
from weightsync.reference.rank import PHASES

RUNNING = (Path(__file__).parents[2] / "docs" / "running.md").read_text(encoding="utf-8")

AGREED = dict.fromkeys(("trainer.0", "rollout0.0", "rollout1.0", "rollout1.1"), 0xA000_F00D << 32)


def rendered(thing: RenderableType, width: int = 110) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(thing)
    output = console.file
    assert isinstance(output, io.StringIO)
    return output.getvalue()


def test_a_version_row_shows_every_number_that_was_promised() -> None:
    text = rendered(tables.version_table([VersionRow(2, "delta", 1_250, 100_000, 7_564, AGREED)]))
    for word in ("2", "delta", "1,250", "1.25 %", "7.56 kB", "48.4", "a000f00d all 4 ranks"):
        assert word in text


def test_it_fits_in_eighty_columns() -> None:
    text = rendered(tables.version_table([VersionRow(2, "delta", 1_250, 100_000, 7_564, AGREED)]), width=80)
    assert "…" not in text
    assert "7.56 kB" in text


def test_an_empty_update_has_no_bits_per_change() -> None:
    row = VersionRow(3, "empty", 0, 100, 88)
    assert row.bits_per_change is None
    text = rendered(tables.version_table([row]))
    assert "0.00 %" in text
    assert "not compared" in text


def test_a_rank_with_another_digest_is_named() -> None:
    text = tables.digest_text({**AGREED, "rollout1.1": -1})
    assert text.plain == ("a000f00d rollout0.0 rollout1.0 trainer.0\nffffffff rollout1.1") or text.plain == (
        "ffffffff rollout1.1\na000f00d rollout0.0 rollout1.0 trainer.0"
    )
    wrong = [span for span in text.spans if "red" in str(span.style)]
    assert [text.plain[span.start : span.end].strip() for span in wrong] == ["ffffffff rollout1.1"]


def test_modelled_and_measured_never_share_a_column() -> None:
    table = tables.phase_table(
        {"apply": 5_000, "snapshot": 1_234_000},
        {"snapshot": 2_000_000, "commit": 17},
        modelled_on="sim, laptop",
        measured_on="gloo",
    )
    assert [str(column.header) for column in table.columns] == [
        "phase",
        "modelled\n(sim, laptop)",
        "measured\n(gloo)",
    ]
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert cells == [
        ("snapshot", "1.23 ms", "2.00 ms"),
        ("apply", "5.00 us", "-"),
        ("commit", "-", "17 ns"),
    ]


def test_a_phase_without_spans_is_absent_and_a_missing_side_has_no_column() -> None:
    table = tables.phase_table(None, {"total": 1})
    assert [str(column.header) for column in table.columns] == ["phase", "measured"]
    assert list(table.columns[0].cells) == ["total"]


def test_phases_stand_in_the_order_of_an_update_and_unknown_ones_last() -> None:
    assert tables.in_order(["total", "zeta", "apply", "snapshot", "alpha", "apply"]) == (
        "snapshot",
        "apply",
        "alpha",
        "zeta",
        "total",
    )


def test_times_of_whole_updates_stand_below_a_rule_and_are_said_to_be_no_sums() -> None:
    text = rendered(tables.phase_table(None, {"exposed": 1, "alpha": 2, "total": 3, "apply": 4}))
    rows = re.findall(r"(?:│ (\w+)|(├))", text)
    assert [word or rule for word, rule in rows] == ["apply", "alpha", "├", "total", "exposed"]
    assert "total, exposed: of whole updates, not summed over ranks" in " ".join(text.split())
    assert "summed" not in rendered(tables.phase_table(None, {"apply": 4}, title="phases"))


def phases_of(page: str) -> dict[str, str]:
    """Verb -> phase, as the page's table has them."""
    (table,) = re.findall(r"^\| phase \| verbs.*\n\|.*\n((?:\|.+\n)+)", page, flags=re.MULTILINE)
    rows = [line.split("|")[1:3] for line in table.splitlines()]
    return {
        verb: phase
        for (phase,), verbs in (map(re.compile("`(.+?)`").findall, row) for row in rows)
        for verb in verbs
    }


def test_the_page_on_running_names_the_phase_of_every_verb() -> None:
    assert phases_of(RUNNING) == PHASES
    assert set(PHASES.values()) <= set(tables.PHASES)


def test_a_verb_under_another_phase_is_seen() -> None:
    assert phases_of(RUNNING.replace("`pause_flush` | `pause`", "`pause_flush` | `paws`")) != PHASES


def test_the_verdict_names_the_first_failure() -> None:
    good = CheckRow("bytes of rollout0.0", True)
    bad = CheckRow("bytes of rollout1.1", False, "model.norm.weight[3] is 0x3f80, expected 0x3f81")
    assert tables.verdict_text([good]).plain == "verdict: all 1 checks hold, bit for bit"
    assert (
        "1 of 2 checks failed, first bytes of rollout1.1: model.norm.weight[3]"
        in tables.verdict_text([good, bad]).plain
    )
    assert "nothing was checked" in tables.verdict_text([]).plain
    text = rendered(tables.checks_table([good, bad]))
    assert "equal" in text
    assert "DIFFERENT" in text


def test_what_was_found_is_shown_as_it_is_brackets_too() -> None:
    row = tables.CheckRow("version 1 commits", ok=False, detail="[/gloo/pair.cc:537] [red]reset")
    assert "[/gloo/pair.cc:537] [red]reset" in rendered(tables.checks_table([row]))


def test_units() -> None:
    assert [tables.format_bytes(n) for n in (0, 999, 1_000, 12_345, 999_999, 4_560_000, 10**15)] == [
        "0 B",
        "999 B",
        "1.00 kB",
        "12.3 kB",
        "1.00 MB",
        "4.56 MB",
        "1,000 TB",
    ]
    assert [tables.format_ns(n) for n in (0, 999, 1_500, 99_990, 123_456_789, 90 * 10**9)] == [
        "0 ns",
        "999 ns",
        "1.50 us",
        "100 us",
        "123 ms",
        "90.0 s",
    ]


def test_the_progress_bar_writes_nothing_to_a_pipe_until_it_ends() -> None:
    console = Console(file=io.StringIO(), width=80, color_system=None, force_terminal=False)
    with tables.progress_bar(console) as progress:
        task = progress.add_task("updates", total=2)
        progress.advance(task)
        progress.advance(task)
    output = console.file
    assert isinstance(output, io.StringIO)
    assert "2/2" in output.getvalue()
