"""A file that is there whole, or as it was before."""

import os
import secrets
from pathlib import Path


def write(path: Path, text: str, *, mode: int = 0o600) -> None:
    """Put the text in place of what the file had; a link stays one, and a pipe or a device is written to.

    Args:
        path: the file.
        text: all of it.
        mode: of a file that is new, less the umask.

    Raises:
        OSError: it cannot be written.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f".{path.name}.tmp-{secrets.token_hex(8)}")
    try:
        with os.fdopen(
            os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8"
        ) as file:
            file.write(text)
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise
