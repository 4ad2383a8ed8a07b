"""Hypothesis profiles, and one thread per torch operation so that parallel runs do not fight for cores.

``dev`` (default) draws 50 random examples, ``ci`` the same 50 every time, ``nightly`` 2,000. Pick one with
``--hypothesis-profile``. ``ci`` does not shrink what fails, which can take longer than the rest of the suite: it prints
what reproduces it, for ``dev`` to shrink. There is no deadline: first calls into torch are slow, and groups take their
time.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, Phase, settings

_SLOW = [HealthCheck.too_slow]  # drawing tensors is slow on a busy machine

settings.register_profile("dev", max_examples=50, deadline=None, suppress_health_check=_SLOW)
settings.register_profile(
    "ci", max_examples=50, deadline=None, derandomize=True, suppress_health_check=_SLOW,
    phases=[Phase.explicit, Phase.generate], print_blob=True,
)  # fmt: skip
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=_SLOW)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

torch.set_num_threads(1)
