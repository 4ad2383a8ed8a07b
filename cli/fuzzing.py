"""``weightsync fuzz``: the shipped kit's fuzzer with a progress bar, and what it found as text."""

from __future__ import annotations

from rich.console import Console

from weightsync.cli.tables import progress_bar
from weightsync.testing.fuzz import awaits, exhaustive_cases, fuzz, seeded_cases


def fuzz_command(console: Console, seeds: int | None, receive: str, workers: int = 1) -> bool:
    """Run seeded plans, or with ``seeds`` None every fault at every await; True when a promise was broken.

    The reduced plan, its seed and its trace are printed.
    """
    if seeds is None:
        cases = list(exhaustive_cases(awaits(receive=receive), receive))
    else:
        cases = list(seeded_cases(range(seeds)))
    with progress_bar(console) as bar:
        task = bar.add_task("runs with faults", total=len(cases))
        finding = fuzz(cases=cases, workers=workers, progress=lambda done: bar.update(task, completed=done))
    if finding is None:
        console.print(f"no promise was broken in {len(cases):,} runs", style="bold green", highlight=False)
        return False
    console.print(str(finding), highlight=False, markup=False, soft_wrap=True)
    console.print("a promise was broken", style="bold red")
    return True
