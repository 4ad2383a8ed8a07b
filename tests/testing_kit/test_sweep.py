"""A sweep over processes: failures in order, a crash and a hang are findings, and the bar shows only on terminals."""

from __future__ import annotations

import io
import operator
import os
import time
from functools import partial

from weightsync.sim.faults import Fault
from weightsync.testing.fuzz import Case, Protocol, sweep_cases
from weightsync.testing.sweep import Bar, sweep
from weightsync.testing.wrong_protocols import ReusedVersion

_OWN_NAME = partial(os.readlink, "/proc/self")
"""The process's number, as a string of digits."""

FINDS_REUSED = Fault("rollout1.1", 23, "fail")


def test_failures_come_in_the_order_of_the_items_whatever_becomes_of_a_process() -> None:
    seen: list[tuple[int, int]] = []
    items = [
        tuple,
        partial(os._exit, 3),
        partial(tuple, ["one", "two"]),
        partial(time.sleep, 600),
        partial(int, "no number"),
        tuple,
    ]
    failures = sweep(
        operator.call, items, limit_s=2.0, progress=lambda done, failed: seen.append((done, failed))
    )
    assert [failure.item for failure in failures] == items[1:5]
    died, said, hung, raised = (failure.sentences for failure in failures)
    assert "exit code 3" in died[0]
    assert said == ("one", "two")
    assert hung == ("it did not end within 2.0 s",)
    assert raised[0].startswith("its check failed: ValueError: invalid literal")
    assert seen[-1] == (6, 4)
    assert [done for done, _ in seen] == [1, 2, 3, 4, 5, 6]


def test_a_process_gives_way_to_a_new_one_after_a_few_items() -> None:
    processes = sweep(operator.call, [_OWN_NAME] * 4, workers=1, renew=2)
    first, second, third, fourth = (failure.sentences for failure in processes)
    assert first == second != third == fourth


def test_nothing_to_check_starts_no_process() -> None:
    assert sweep(operator.call, []) == []


def test_simulated_cases_are_swept_with_the_protocol_that_is_given() -> None:
    cases = [Case((FINDS_REUSED,)), Case(())]
    failures = sweep_cases(cases, Protocol(trainer=ReusedVersion))
    assert [failure.item for failure in failures] == cases[:1]
    assert "was used twice" in str(failures[0])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_is_silent_but_on_a_terminal() -> None:
    pipe, terminal = io.StringIO(), Terminal()
    for stream in (pipe, terminal):
        bar = Bar("runs", 4, stream)
        bar(2, 0)
        bar(4, 1)
    assert pipe.getvalue() == ""
    assert terminal.getvalue().startswith("\rruns [" + 20 * "#" + 20 * "." + "] 2/4, 0 failed")
    assert terminal.getvalue().endswith("s\n")
