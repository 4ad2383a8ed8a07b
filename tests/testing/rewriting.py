"""Has pytest, where it runs, rewrite the kit's assertions, so that a red one shows what it compared.

It must happen before the modules are imported, so the package imports this one first. Without pytest nothing
happens.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = tuple(f"weightsync.testing.{path.stem}" for path in sorted(Path(__file__).parent.glob("*.py")))
"""Full names of the kit's modules."""

if "pytest" in sys.modules:
    sys.modules["pytest"].register_assert_rewrite(*(name for name in NAMES if name not in sys.modules))
