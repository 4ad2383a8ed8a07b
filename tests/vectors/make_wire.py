"""Writes ``wire.json``: one section in every form and for items of every size, with what it says.

``python tests/vectors/make_wire.py``; only when the format changes, since the file is what other implementations read.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

from weightsync.reference.digest import dtype_name
from weightsync.reference.params import int_view
from weightsync.reference.wire.forms import ALL_FORMS, Form, Positions
from weightsync.reference.wire.sections import encode_section
from weightsync.reference.wire.streams import Zstd
from weightsync.reference.wire.values import coded

DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int64)
EVEN = [*range(0, 96, 2), 97, 98, 99]
LONG = [*range(2, 170, 2), 600, 1200, 66_000, 66_001, 66_002]


def vector(form: Form, dtype: torch.dtype, positions: list[int]) -> dict[str, object] | None:
    """One entry, or None when the form would not be written for this."""
    generator = torch.Generator().manual_seed(len(positions))
    integer = int_view(torch.empty(0, dtype=dtype)).dtype
    raw = torch.randint(0, 256, (len(positions) * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    old = raw.view(integer)
    new = old + torch.randint(0, 2, old.shape, generator=generator).to(integer) * 2 - 1
    new[::9] = old[::9] ^ 37
    new[0] = ~old[0]
    dense = form.positions is Positions.DENSE
    if dense:
        new = new % 3
        positions = list(range(len(positions)))
    at = None if dense else torch.tensor(positions, dtype=torch.int32)
    found = encode_section(at, coded(form.values, new, old, dtype), form, Zstd())
    if found.form != form:
        return None
    return {
        "form": form.name,
        "numbers": list(form),
        "dtype": dtype_name(dtype),
        "positions": positions,
        "old": [f"{value & ((1 << 8 * dtype.itemsize) - 1):x}" for value in old.tolist()],
        "new": [f"{value & ((1 << 8 * dtype.itemsize) - 1):x}" for value in new.tolist()],
        "section": bytes(found.section.tolist()).hex(),
    }


def main() -> None:
    """Write the file beside this one."""
    vectors = [
        found
        for form in ALL_FORMS
        for dtype in (DTYPES if form.positions in (Positions.GAP8, Positions.INT32) else DTYPES[:1])
        for positions in ((EVEN, LONG) if dtype is DTYPES[0] else (EVEN,))
        if (found := vector(form, dtype, positions)) is not None
    ]
    lines = ",\n".join(json.dumps(one, separators=(",", ":")) for one in vectors)
    Path(__file__).with_name("wire.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
