"""Find and read the TensorBoard event files that a run has on a host, for `kit board`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

MOST_FILES = 10_000


def event_files(folder: str) -> list[list[Any]]:
    """Return the event files below a folder: ``[relative path, bytes, seconds since 1970 of the last change]``."""
    root = Path(folder).expanduser()
    found: list[list[Any]] = []
    for path in root.rglob("*tfevents*"):
        try:
            there = path.stat()
        except OSError:  # removed meanwhile
            continue
        if path.is_file() and len(found) < MOST_FILES:
            found.append([str(path.relative_to(root)), there.st_size, there.st_mtime])
    return found


def part_of(folder: str, path: str, offset: int, size: int) -> str:
    """Return up to `size` bytes of a file below a folder, from `offset` on, in base64."""
    with (Path(folder).expanduser() / path).open("rb") as file:
        file.seek(offset)
        return base64.b64encode(file.read(size)).decode("ascii")
