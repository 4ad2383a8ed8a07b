"""These tests take minutes on purpose, so none of them says where it is."""

from __future__ import annotations

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def no_timeout_dump() -> None:
    """Take back pytest's own timer, which is meant for tests that hang."""
    faulthandler.cancel_dump_traceback_later()
