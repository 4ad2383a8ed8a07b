"""Any one fault at any await, under options that change what is kept or sent, on the simulated clock."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weightsync.testing.fuzz import awaits, exhaustive_cases, sweep_cases
from weightsync.testing.sweep import Bar, require_none

OPTIONS = [
    {"receive": "stage", "route": "owned"},
    {"receive": "stream", "route": "owned"},
    {"receive": "stage", "baseline": "dirty"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options.values()))
def test_any_one_fault_at_any_await_breaks_no_promise(
    options: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    cases = [replace(case, **options) for case in exhaustive_cases(awaits(**options))]
    with capfd.disabled():
        failures = sweep_cases(cases, progress=Bar(f"one fault, {options}", len(cases)))
    require_none(failures, len(cases))
