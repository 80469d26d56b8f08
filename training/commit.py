"""Putting a file in place whole or not at all, whatever kills the process or fills the disk."""

import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)
"""Names of files not in place yet; one that is still there was left by a kill."""


@contextmanager
def written_beside(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in ``folder``, mode 0600, that is removed unless it was placed."""
    temporary = folder / f".tmp-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield temporary, file
    finally:
        temporary.unlink(missing_ok=True)


def place(
    temporary: Path, file: BinaryIO, name: str, *, last_word: Callable[[], None] = lambda: None
) -> None:
    """Make it ``name``, in the same folder, on the disk and not only in memory.

    ``last_word`` is called when only the renaming is left to do, and may raise to prevent it.
    """
    file.flush()
    os.fsync(file.fileno())
    file.close()  # Windows renames no open file
    last_word()
    temporary.replace(temporary.with_name(name))
    sync_folder(temporary.parent)


def sync_folder(folder: Path) -> None:
    """See to it that the names in a folder are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where a folder cannot be opened
        return
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


class HashingFile:
    """Hashes and counts what is written to it, for ``torch.save``.

    It keeps the first OSError until ``finish``, since torch's C++ side would raise one of its own instead.
    """

    def __init__(self, file: BinaryIO, error: OSError | None = None) -> None:
        """``error`` is what ``finish`` shall raise: then nothing is written."""
        self._file = file
        self._digest = hashlib.sha256()
        self._error = error
        self.size_bytes = 0
        self.sha256 = ""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Write all of ``data``."""
        view = memoryview(data)
        if self._error is None:
            try:
                self._file.write(view)
                self._digest.update(view)
            except OSError as error:
                self._error = error
        self.size_bytes += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Hand on what is buffered."""
        with suppress(OSError):  # comes again in finish
            self._file.flush()

    def finish(self) -> None:
        """Set ``sha256``.

        Raises:
            OSError: something could not be written.
        """
        if self._error is not None:
            raise self._error
        self._file.flush()
        self.sha256 = self._digest.hexdigest()
