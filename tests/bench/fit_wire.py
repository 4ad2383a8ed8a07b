"""Measures every form over the densities and prints ``reference/wire/rates.py``: the frozen profile of ``choose``.

``python tests/bench/fit_wire.py > reference/wire/rates.py``, then ruff format. Each number is the least of several
passes, so that a busy moment of the machine spoils none.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
from harness import machine
from wire_data import DTYPE, NUMEL, Update, adam, decode, encode

from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import ALL_FORMS, Form, Positions
from weightsync.reference.wire.sections import decode_section, encode_section
from weightsync.reference.wire.streams import Zstd

DENSITIES = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.6)
PASSES = 6
HEAD = '''"""What this package's forms take, in time and bits: the frozen profile that ``choose`` is given by default.

Measured by ``tests/bench/fit_wire.py`` on {cpu}, {cores} cores shared with other work, torch {torch}, numpy
{numpy}: one thread, the least of {passes} passes. Data: one bf16 tensor of (4096, 1024), a normally distributed
step on fp32 masters that changes the given share of its elements; dense forms per element of the range.
"""

from __future__ import annotations

from types import MappingProxyType

from weightsync.reference.wire.costs import Curve, Rates
from weightsync.reference.wire.forms import ALL_FORMS

_DENSITIES = {densities}

_CURVES = {{'''
FOOT = '''}}

RATES = Rates(
    _DENSITIES,
    section_ns={section:.0f},
    curves=MappingProxyType({{form: Curve(*_CURVES[form.name]) for form in ALL_FORMS}}),
)
"""The profile measured."""'''

Cell = tuple[float, float, int]


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Least nanoseconds of one call."""
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter_ns()
        call()
        best = min(best, time.perf_counter_ns() - start)
    return best


def measure(form: Form, one: Update, zstd: Zstd) -> Cell:
    """Encode and decode ns per element, and bits."""
    if form.positions is Positions.DENSE:
        count = one.new.numel()
        found = encode_section(None, one.new, form, zstd)
        read = (found.section, found.form, count, count, DTYPE, "w", zstd)
        encode_ns = fastest(lambda: encode_section(None, one.new, form, zstd), 2)
        decode_ns = fastest(lambda: decode_section(*read), 2)
    else:
        count = one.positions.numel()
        found = encode(one, form, zstd)
        rounds = max(2, min(20, 400_000 // count))
        encode_ns = fastest(lambda: encode(one, form, zstd), rounds)
        decode_ns = fastest(lambda: decode(found, one, NUMEL, zstd), rounds)
    return encode_ns / count, decode_ns / count, 8 * found.section.numel()


def main() -> None:
    """Print the profile."""
    torch.set_num_threads(1)
    zstd = Zstd()
    whole = (torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)) * 0.02).to(DTYPE)
    dense = Update(torch.empty(0), int_view(whole), int_view(whole))
    updates = [adam(density, seed=1) for density in DENSITIES]
    tiny = Update(*(column[:1] for column in updates[-1]))
    best: dict[tuple[Form, int], Cell] = {}
    section = float("inf")
    for number in range(PASSES):
        print(f"pass {number + 1} of {PASSES}", file=sys.stderr)
        section = min(section, sum(measure(ALL_FORMS[2], tiny, zstd)[:2]))
        for form in ALL_FORMS:
            rows = [dense] if form.positions is Positions.DENSE else updates
            for index, one in enumerate(rows):
                now, known = measure(form, one, zstd), best.get((form, index))
                best[form, index] = now if known is None else (*map(min, now[:2], known[:2]), now[2])
    conditions = machine()
    print(HEAD.format(**conditions, densities=DENSITIES, passes=PASSES))
    for form in ALL_FORMS:
        cells = [best[form, index if (form, index) in best else 0] for index in range(len(DENSITIES))]
        counts = [
            dense.new.numel() if form.positions is Positions.DENSE else one.positions.numel()
            for one in updates
        ]
        bits = [cell[2] / count for cell, count in zip(cells, counts, strict=True)]
        print(f'    "{form.name}": (')
        for column in ([cell[0] for cell in cells], [cell[1] for cell in cells], bits):
            print(
                f"        ({', '.join(f'{value:.3g}' if value > 0.1 else f'{value:.4f}' for value in column)}),"
            )
        print("    ),")
    print(FOOT.format(section=section))


if __name__ == "__main__":
    main()
