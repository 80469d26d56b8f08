"""Writing files atomically, whatever kills the process or fills the disk."""

import errno
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

log = logging.getLogger("nodekit.training")

T = TypeVar("T")

RETRY_S = 5.0
"""How long reading is retried: while a file server restarts, or there are no file descriptors."""
_PAUSE_S = 0.25
NOT_FOUND = (FileNotFoundError, NotADirectoryError)
"""The errors for a file that does not exist. After any other OSError, that is unknown."""
TEMPORARY = re.compile(r"\.tmp-[0-9a-f]{16}", re.ASCII)
"""Names of files that are being written, or that a kill has left."""
_writers: dict[Path, threading.Lock] = {}  # folder → taken by the thread of this process that writes there


def retried(read: Callable[[], T], until_s: float | None = None) -> T:
    """Return what ``read`` returns, retrying while it raises an OSError other than ``NOT_FOUND``.

    Args:
        read: reads something, and may be called again.
        until_s: give up at this ``time.monotonic()``; None: ``RETRY_S`` from now.
    """
    until_s = time.monotonic() + RETRY_S if until_s is None else until_s
    while True:
        try:
            return read()
        except NOT_FOUND:
            raise
        except OSError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(_PAUSE_S)


@contextmanager
def warned(text: str) -> Iterator[None]:
    """Log an OSError after the text, and go on."""
    try:
        yield
    except OSError as error:
        log.warning("%s: %s", text, error)


@contextmanager
def locked(folder: Path, *, waits: bool = False) -> Iterator[None]:
    """Let one writer at a time write to ``folder``, of all processes and of this one's threads.

    There is only one, unless ranks save alone (``save_if_newest``), or an attempt has ended whose last save goes on.
    Where there are no locks between processes, on some file servers and on Windows, it is one of this process's.

    Args:
        folder: of snapshots.
        waits: for another thread of this process as long as it takes, and for no more than some seconds for others.

    Raises:
        BlockingIOError: another one still does after some seconds.
    """
    own = _writers.setdefault(folder.resolve(), threading.Lock())
    if not own.acquire(timeout=-1 if waits else RETRY_S):
        raise _busy(folder)
    try:
        with _locked_for_others(folder):
            yield
    finally:
        own.release()


@contextmanager
def _locked_for_others(folder: Path) -> Iterator[None]:
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where a folder cannot be opened
        yield
        return
    import fcntl

    def take() -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _busy(folder) from None
        except OSError:  # no locks here: it is no use to try again
            pass

    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        retried(take)
        yield
    finally:
        with suppress(OSError):  # a data loader's workers, forked meanwhile, have it open too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _busy(folder: Path) -> BlockingIOError:
    return BlockingIOError(errno.EWOULDBLOCK, "another save is under way there", str(folder))


@contextmanager
def written_beside(folder: Path) -> Iterator[tuple[Path, BinaryIO]]:
    """A new file in ``folder``, mode 0600, which is removed at the end unless it was placed."""
    temporary = folder / f".tmp-{secrets.token_hex(8)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield temporary, file
    finally:
        with suppress(OSError):  # the next save removes it; do not hide another error
            temporary.unlink(missing_ok=True)


def place(
    temporary: Path,
    file: BinaryIO,
    name: str,
    *,
    syncs: bool = True,
    last_word: Callable[[], None] = lambda: None,
) -> None:
    """Rename the file to ``name``, in the same folder.

    Args:
        temporary: where it is.
        file: the same, open.
        name: new, or that of a file that it replaces.
        syncs: the file before that, and its name afterwards.
        last_word: called right before the renaming; may raise to prevent it.
    """
    file.flush()
    if syncs:
        os.fsync(file.fileno())
    file.close()  # Windows renames no open file
    last_word()
    temporary.replace(temporary.with_name(name))
    if syncs:
        sync_folder(temporary.parent)


def sync(path: Path) -> None:
    """Sync a file that this process has written and closed."""
    file_fd = os.open(path, os.O_RDWR)  # Windows syncs no file that is open for reading alone
    try:
        os.fsync(file_fd)
    finally:
        os.close(file_fd)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, where a folder cannot be opened
        return
    folder_fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


class HashingFile:
    """Hashes and counts what is written to it, for ``torch.save``.

    It raises the first OSError in ``finish``, since torch's C++ code would turn it into an error of its own.
    """

    def __init__(self, file: BinaryIO, error: OSError | None = None) -> None:
        """With an ``error``, nothing is written, and ``finish`` raises it."""
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
        """Flush the file."""
        with suppress(OSError):  # finish raises it again
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
