"""Names of version folders and files, and which names may be opened at all."""

from __future__ import annotations

import re

from weightsync.reference.errors import PatchMismatch, WeightSyncError

INDEX = "weightsync.json"
"""Written last into a version's folder: a folder without it is no version."""
CLAIM = "weightsync.claim"
"""Written first into a version's folder: whose number it is."""
HF_INDEX = "model.safetensors.index.json"
KEPT = ".weightsync"
"""Folder for locks, leases, the state of a checkpoint and its journal."""

_VERSION = re.compile(r"weight_v([0-9]{6,18})")
_DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", flags=re.IGNORECASE)
_LONGEST = 255


class FolderLocked(WeightSyncError):
    """Another process holds the lock of a folder."""


def version_folder(version: int) -> str:
    """Folder of a version: ``weight_v000123``, with more digits when it takes them."""
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """The version whose folder this is, or None for any other name."""
    found = _VERSION.fullmatch(folder)
    if found is None or version_folder(int(found[1])) != folder:
        return None
    return int(found[1])


def safe_name(name: object) -> str:
    """``name``, if it stays in its folder on every system: relative, parts joined by ``/``.

    Raises:
        PatchMismatch: empty, absolute, a part that is ``.`` or ``..`` or a device, a backslash, a colon, a
            control character such as NUL, or a part of more than 255 bytes.
    """
    problem = None
    if not isinstance(name, str) or not name:
        problem = "is empty or no text"
    elif any(ord(letter) < 32 or letter in "\\:\x7f" for letter in name):
        problem = "holds a control character, a backslash or a colon"
    elif not name.isprintable():
        problem = "holds a character that cannot be printed"
    else:
        for part in name.split("/"):
            if part in ("", ".", ".."):
                problem = "leaves its folder or has an empty part"
            elif _DEVICES.fullmatch(part):
                problem = "is a device's"
            elif len(part.encode()) > _LONGEST:
                problem = f"has a part of more than {_LONGEST} bytes"
    if problem is not None:
        raise PatchMismatch(
            f"file name {str(name)[:80]!r} {problem}, expected a plain name within the folder; do not use "
            "what named it"
        )
    return str(name)


def plain_name(name: object) -> str:
    """``safe_name`` of a file that lies directly in its folder and is not hidden."""
    safe = safe_name(name)
    if "/" in safe or safe.startswith("."):
        raise PatchMismatch(
            f"file name {safe[:80]!r} is hidden or names a folder, expected a plain file name"
        )
    return safe
