"""Run the rows of every ``bench_*.py`` here, print a table and write ``bench.json``.

``python tests/bench [NAME ...] [--out FILE]``; names choose files (``delta`` is ``bench_delta.py``).
"""

from __future__ import annotations

import argparse
import importlib
import json
from pathlib import Path

import torch
from harness import Row, machine, table

FOLDER = Path(__file__).parent


def main() -> None:
    known = [path.stem.removeprefix("bench_") for path in sorted(FOLDER.glob("bench_*.py"))]
    parser = argparse.ArgumentParser(prog="python tests/bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*known, []], metavar="NAME", help=", ".join(known))
    parser.add_argument("--out", type=Path, default=Path("bench.json"))
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.names or known:
        rows += importlib.import_module(f"bench_{name}").rows()
    print(table(rows))
    result = {"machine": machine(), "rows": [row.as_json() for row in rows]}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"\nratio: how many times better ours is. {arguments.out} has the conditions of every row.")


if __name__ == "__main__":
    main()
