"""Writes a file atomically: it has either all of its new content or the old one."""

import os
import secrets
from pathlib import Path


def write(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Replace a file's content with a text; a link stays a link, and a pipe or a device is written to.

    Args:
        path: of the file.
        text: the whole content.
        mode: permissions of a new file, less the umask.

    Raises:
        OSError: the file cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8", errors="replace")
        return
    beside = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        with os.fdopen(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode),
            "w",
            encoding="utf-8",
            errors="replace",
        ) as file:
            file.write(text)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
