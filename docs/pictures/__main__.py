"""Draw every picture of the docs: ``python docs/pictures [FOLDER]``, by default into this folder."""

from __future__ import annotations

import sys
from pathlib import Path

import clocks
import recording
import sequence
import shards


def main(folder: Path) -> None:
    """Write the pictures into ``folder``."""
    pictures = {
        "update": sequence.success(recording.record_success()),
        "rollback": sequence.rollback(recording.record_rollback()),
        "clocks": clocks.show(),
        "shards": shards.show(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in pictures.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
